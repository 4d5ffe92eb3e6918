//! Which server of a Redis Cluster has each hash slot.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use redis::Value;

use crate::backend::redis::hash_slot::SLOTS;

/// Host and port of a server of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
}

impl Address {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// Parses `host:port` from an answer of `asked`. An empty host is the host of `asked`.
    pub(crate) fn parse(text: &str, asked: &Self) -> Option<Self> {
        // The host may be an IPv6 address without brackets.
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        Self::with_host(host, port, asked)
    }

    fn with_host(host: &str, port: u16, asked: &Self) -> Option<Self> {
        match host {
            "" => Some(Self { host: asked.host.clone(), port }),
            // The server is configured to announce a host name and has none.
            "?" => None,
            host => Some(Self::new(host, port)),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// One server's answer to `CLUSTER SLOTS`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotRanges {
    /// First slot, last slot and master of each range.
    ranges: Vec<(u16, u16, Address)>,
    replicas: Vec<Address>,
    /// The node ids of masters and replicas.
    ids: Vec<String>,
}

impl SlotRanges {
    /// Parses `asked`'s answer to `CLUSTER SLOTS`. `None` for any other value.
    pub(crate) fn parse(answer: &Value, asked: &Address) -> Option<Self> {
        let Value::Array(entries) = answer else { return None };
        let mut all = Self::default();
        for entry in entries {
            let Value::Array(parts) = entry else { return None };
            let [Value::Int(first), Value::Int(last), master, replicas @ ..] = parts.as_slice()
            else {
                return None;
            };
            let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
            if last >= SLOTS {
                return None;
            }
            all.ids.extend(std::iter::once(master).chain(replicas).filter_map(id));
            if let Some(master) = node(master, asked)? {
                all.ranges.push((first, last, master));
            }
            for replica in replicas {
                all.replicas.extend(node(replica, asked)?);
            }
        }
        Some(all)
    }

    pub(crate) fn masters(&self) -> Vec<Address> {
        let mut masters: Vec<_> = self.ranges.iter().map(|(_, _, master)| master.clone()).collect();
        masters.sort_unstable();
        masters.dedup();
        masters
    }
}

/// The address of a server in `CLUSTER SLOTS`. `Some(None)` if it cannot be connected to.
fn node(value: &Value, asked: &Address) -> Option<Option<Address>> {
    let Value::Array(parts) = value else { return None };
    let [host, Value::Int(port), ..] = parts.as_slice() else { return None };
    let port = u16::try_from(*port).ok()?;
    let host = match host {
        Value::Nil => "",
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        _ => return None,
    };
    Some(Address::with_host(host, port, asked))
}

/// The node id of a server in `CLUSTER SLOTS`.
fn id(value: &Value) -> Option<String> {
    let Value::Array(parts) = value else { return None };
    let [_, _, Value::BulkString(id), ..] = parts.as_slice() else { return None };
    String::from_utf8(id.clone()).ok()
}

/// The current map of all slots, shared by the connections of a cluster.
#[derive(Debug)]
pub(crate) struct SlotMap(RwLock<SlotTable>);

#[derive(Debug)]
struct SlotTable {
    masters: Vec<Address>,
    replicas: Vec<Address>,
    ids: Vec<String>,
    /// For each slot the index of its owner in `masters`, or [`UNASSIGNED`].
    owners: Vec<u16>,
}

const UNASSIGNED: u16 = u16::MAX;

impl SlotTable {
    fn new(answer: &SlotRanges) -> Self {
        let masters = answer.masters();
        let mut owners = vec![UNASSIGNED; usize::from(SLOTS)];
        for (first, last, master) in &answer.ranges {
            let at = masters.binary_search(master).ok().and_then(|at| u16::try_from(at).ok());
            for slot in *first..=*last {
                owners[usize::from(slot)] = at.unwrap_or(UNASSIGNED);
            }
        }
        let mut replicas = answer.replicas.clone();
        replicas.sort_unstable();
        replicas.dedup();
        let mut ids = answer.ids.clone();
        ids.sort_unstable();
        ids.dedup();
        Self { masters, replicas, ids, owners }
    }

    fn owner(&self, slot: u16) -> Option<&Address> {
        self.masters.get(usize::from(*self.owners.get(usize::from(slot))?))
    }
}

impl SlotMap {
    pub(crate) fn new(answer: &SlotRanges) -> Self {
        Self(RwLock::new(SlotTable::new(answer)))
    }

    pub(crate) fn owner(&self, slot: u16) -> Option<Address> {
        self.table().owner(slot).cloned()
    }

    pub(crate) fn is_owner(&self, slot: u16, address: &Address) -> bool {
        self.table().owner(slot) == Some(address)
    }

    /// The first slot of `address`.
    pub(crate) fn some_slot(&self, address: &Address) -> Option<u16> {
        let table = self.table();
        (0..SLOTS).find(|slot| table.owner(*slot) == Some(address))
    }

    pub(crate) fn masters(&self) -> Vec<Address> {
        self.table().masters.clone()
    }

    pub(crate) fn replicas(&self) -> Vec<Address> {
        self.table().replicas.clone()
    }

    /// The node ids of masters and replicas.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.table().ids.clone()
    }

    /// The number of slots without an owner.
    pub(crate) fn unserved(&self) -> usize {
        self.table().owners.iter().filter(|owner| **owner == UNASSIGNED).count()
    }

    /// Assigns `slot` to `address`. False if the slot was already assigned to that address.
    pub(crate) fn patch(&self, slot: u16, address: &Address) -> bool {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if slot >= SLOTS || table.owner(slot) == Some(address) {
            return false;
        }
        let at = table.masters.iter().position(|master| master == address).unwrap_or_else(|| {
            table.masters.push(address.clone());
            table.masters.len() - 1
        });
        table.owners[usize::from(slot)] = u16::try_from(at).unwrap_or(UNASSIGNED);
        true
    }

    /// Replaces the whole map. False if no slot has changed its owner.
    pub(crate) fn replace(&self, answer: &SlotRanges) -> bool {
        let new = SlotTable::new(answer);
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let changed = (0..SLOTS).any(|slot| new.owner(slot) != table.owner(slot));
        *table = new;
        changed
    }

    fn table(&self) -> RwLockReadGuard<'_, SlotTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_be_ipv6_or_without_a_host() {
        let asked = Address::new("10.0.0.1", 6379);
        assert_eq!(Address::parse(":7000", &asked), Some(Address::new("10.0.0.1", 7000)));
        assert_eq!(Address::parse("::1:7000", &asked), Some(Address::new("::1", 7000)));
        assert_eq!(Address::parse("b.example:7000", &asked), Some(Address::new("b.example", 7000)));
        for odd in ["", "b", "b:", "b:x", "?:7000", "b:70000"] {
            assert_eq!(Address::parse(odd, &asked), None, "{odd}");
        }
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn entry(first: i64, last: i64, nodes: &[(Value, i64)]) -> Value {
        let node = |(host, port): &(Value, i64)| {
            Value::Array(vec![host.clone(), Value::Int(*port), text("id")])
        };
        let mut parts = vec![Value::Int(first), Value::Int(last)];
        parts.extend(nodes.iter().map(node));
        Value::Array(parts)
    }

    #[test]
    fn an_answer_is_parsed_and_the_map_patched() {
        let asked = Address::new("10.0.0.1", 6379);
        let reply = Value::Array(vec![
            entry(0, 99, &[(Value::Nil, 7000), (text("10.0.0.4"), 7003)]),
            entry(200, 16_383, &[(text("10.0.0.2"), 7001)]),
            entry(100, 100, &[(text("?"), 7001)]),
        ]);
        let answer = SlotRanges::parse(&reply, &asked).unwrap();
        let map = SlotMap::new(&answer);
        let (first, second) = (Address::new("10.0.0.1", 7000), Address::new("10.0.0.2", 7001));
        assert_eq!(map.owner(99), Some(first.clone()));
        assert_eq!(map.owner(100), None);
        assert_eq!(map.owner(16_383), Some(second.clone()));
        assert_eq!(map.unserved(), 100);
        assert_eq!(map.masters(), [first.clone(), second.clone()]);
        assert_eq!(map.replicas(), [Address::new("10.0.0.4", 7003)]);

        let third = Address::new("10.0.0.3", 7002);
        assert!(map.patch(99, &third));
        assert!(!map.patch(99, &third));
        assert!(map.is_owner(99, &third) && map.is_owner(98, &first));
        assert!(map.replace(&answer));
        assert!(!map.replace(&answer));
        assert!(map.is_owner(99, &first));
        assert_eq!(map.some_slot(&second), Some(200));
    }

    #[test]
    fn other_answers_are_refused() {
        let asked = Address::new("10.0.0.1", 6379);
        for odd in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![entry(0, 16_384, &[(text("a"), 1)])]),
            Value::Array(vec![entry(-1, 5, &[(text("a"), 1)])]),
            Value::Array(vec![entry(0, 5, &[(text("a"), 70_000)])]),
            Value::Array(vec![entry(0, 5, &[])]),
        ] {
            assert_eq!(SlotRanges::parse(&odd, &asked), None, "{odd:?}");
        }
    }
}
