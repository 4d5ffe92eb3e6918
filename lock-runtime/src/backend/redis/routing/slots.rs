//! The slots of a Redis Cluster: which one a key is in, and which server has it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use once_cell::sync::Lazy;
use redis::Value;

use crate::base::key::Key;

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;

/// The slot of a key: of the part in its first braces if there is one, otherwise of all of it.
pub(crate) fn slot(key: &str) -> u16 {
    crc16(tagged(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// The slot that all of `keys` are in; the first two that are in different ones otherwise.
pub(crate) fn common(keys: &[Key]) -> Result<u16, (&str, &str)> {
    let Some((first, others)) = keys.split_first() else { return Ok(0) };
    let first = first.as_str();
    let shared = slot(first);
    match others.iter().find(|other| slot(other.as_str()) != shared) {
        Some(other) => Err((first, other.as_str())),
        None => Ok(shared),
    }
}

/// What puts a key into `slot` if it stands in braces in front: the least number that does. All our
/// processes have to agree on it.
pub(crate) fn tag(slot: u16) -> u32 {
    static TAGS: Lazy<Vec<u32>> = Lazy::new(|| {
        let mut tags = vec![u32::MAX; usize::from(SLOTS)];
        let mut missing = tags.len();
        let mut number = 0;
        while missing > 0 {
            let tag = &mut tags[usize::from(crc16(number.to_string().as_bytes()) % SLOTS)];
            if *tag == u32::MAX {
                *tag = number;
                missing -= 1;
            }
            number += 1;
        }
        tags
    });
    TAGS[usize::from(slot % SLOTS)]
}

fn tagged(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    static TABLE: Lazy<[u16; 256]> = Lazy::new(|| {
        let step = |crc: u16| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        std::array::from_fn(|byte| (0..8).fold((byte as u16) << 8, |crc, _| step(crc)))
    });
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

/// Where a server of the cluster is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
}

impl Address {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// `host:port` as `asked` has said it. Without a host it is its own.
    pub(crate) fn told(text: &str, asked: &Self) -> Option<Self> {
        // The host may be an IPv6 address without brackets.
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok()?;
        Self::with_host(host, port, asked)
    }

    fn with_host(host: &str, port: u16, asked: &Self) -> Option<Self> {
        match host {
            "" => Some(Self { host: asked.host.clone(), port }),
            // The server is to tell its name and has none.
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

/// What one server says about all slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Map {
    /// First and last slot, and who has them.
    ranges: Vec<(u16, u16, Address)>,
    replicas: Vec<Address>,
    /// What the cluster calls its servers, replicas too.
    ids: Vec<String>,
}

impl Map {
    /// Reads what `asked` answered to `CLUSTER SLOTS`. `None` if it is something else.
    pub(crate) fn parse(answer: &Value, asked: &Address) -> Option<Self> {
        let Value::Array(entries) = answer else { return None };
        let mut map = Self::default();
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
            map.ids.extend(std::iter::once(master).chain(replicas).filter_map(id));
            if let Some(master) = node(master, asked)? {
                map.ranges.push((first, last, master));
            }
            for replica in replicas {
                map.replicas.extend(node(replica, asked)?);
            }
        }
        Some(map)
    }

    pub(crate) fn masters(&self) -> Vec<Address> {
        let mut masters: Vec<_> = self.ranges.iter().map(|(_, _, master)| master.clone()).collect();
        masters.sort_unstable();
        masters.dedup();
        masters
    }
}

/// The address in an entry of `CLUSTER SLOTS`. `Some(None)` for one that nobody can go to.
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

/// The id in such an entry.
fn id(value: &Value) -> Option<String> {
    let Value::Array(parts) = value else { return None };
    let [_, _, Value::BulkString(id), ..] = parts.as_slice() else { return None };
    String::from_utf8(id.clone()).ok()
}

/// What is known about all slots at this moment.
#[derive(Debug)]
pub(crate) struct Slots(RwLock<Table>);

#[derive(Debug)]
struct Table {
    masters: Vec<Address>,
    replicas: Vec<Address>,
    ids: Vec<String>,
    /// For each slot who of `masters` has it.
    owners: Vec<u16>,
}

const NOBODY: u16 = u16::MAX;

impl Table {
    fn new(map: &Map) -> Self {
        let masters = map.masters();
        let mut owners = vec![NOBODY; usize::from(SLOTS)];
        for (first, last, master) in &map.ranges {
            let at = masters.binary_search(master).ok().and_then(|at| u16::try_from(at).ok());
            for slot in *first..=*last {
                owners[usize::from(slot)] = at.unwrap_or(NOBODY);
            }
        }
        let mut replicas = map.replicas.clone();
        replicas.sort_unstable();
        replicas.dedup();
        let mut ids = map.ids.clone();
        ids.sort_unstable();
        ids.dedup();
        Self { masters, replicas, ids, owners }
    }

    fn owner(&self, slot: u16) -> Option<&Address> {
        self.masters.get(usize::from(*self.owners.get(usize::from(slot))?))
    }
}

impl Slots {
    pub(crate) fn new(map: &Map) -> Self {
        Self(RwLock::new(Table::new(map)))
    }

    pub(crate) fn owner(&self, slot: u16) -> Option<Address> {
        self.table().owner(slot).cloned()
    }

    pub(crate) fn is_owner(&self, slot: u16, address: &Address) -> bool {
        self.table().owner(slot) == Some(address)
    }

    /// Any slot that `address` has.
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

    /// What the cluster calls its servers.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.table().ids.clone()
    }

    /// How many slots nobody has.
    pub(crate) fn unserved(&self) -> usize {
        self.table().owners.iter().filter(|owner| **owner == NOBODY).count()
    }

    /// `slot` is at `address`. False if that was known.
    pub(crate) fn patch(&self, slot: u16, address: &Address) -> bool {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if slot >= SLOTS || table.owner(slot) == Some(address) {
            return false;
        }
        let at = table.masters.iter().position(|master| master == address).unwrap_or_else(|| {
            table.masters.push(address.clone());
            table.masters.len() - 1
        });
        table.owners[usize::from(slot)] = u16::try_from(at).unwrap_or(NOBODY);
        true
    }

    /// Takes `map` for what is known. False if any slot is where it was.
    pub(crate) fn replace(&self, map: &Map) -> bool {
        let new = Table::new(map);
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let changed = (0..SLOTS).any(|slot| new.owner(slot) != table.owner(slot));
        *table = new;
        changed
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_the_slot_that_the_servers_say() {
        // As `CLUSTER KEYSLOT` of 7.0 has it.
        for (key, expected) in [
            ("123456789", 12_739),
            ("foo", 12_182),
            ("bar", 5_061),
            ("{user1000}.following", 3_443),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
            ("", 0),
        ] {
            assert_eq!(slot(key), expected, "{key}");
        }
    }

    #[test]
    fn a_tag_in_front_puts_any_key_into_its_slot() {
        for wanted in 0..SLOTS {
            let tag = tag(wanted);
            assert_eq!(slot(&format!("{{{tag}}}order:{{7}}")), wanted);
        }
    }

    #[test]
    fn keys_in_different_slots_are_named() {
        let keys = ["a{7}", "b{7}", "c"].map(Key::from);
        assert_eq!(common(&keys[..2]), Ok(slot("7")));
        assert_eq!(common(&keys), Err(("a{7}", "c")));
    }

    #[test]
    fn an_address_may_be_ipv6_or_without_a_host() {
        let asked = Address::new("10.0.0.1", 6379);
        assert_eq!(Address::told(":7000", &asked), Some(Address::new("10.0.0.1", 7000)));
        assert_eq!(Address::told("::1:7000", &asked), Some(Address::new("::1", 7000)));
        assert_eq!(Address::told("b.example:7000", &asked), Some(Address::new("b.example", 7000)));
        for odd in ["", "b", "b:", "b:x", "?:7000", "b:70000"] {
            assert_eq!(Address::told(odd, &asked), None, "{odd}");
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
    fn a_map_is_read_and_patched() {
        let asked = Address::new("10.0.0.1", 6379);
        let answer = Value::Array(vec![
            entry(0, 99, &[(Value::Nil, 7000), (text("10.0.0.4"), 7003)]),
            entry(200, 16_383, &[(text("10.0.0.2"), 7001)]),
            entry(100, 100, &[(text("?"), 7001)]),
        ]);
        let map = Map::parse(&answer, &asked).unwrap();
        let slots = Slots::new(&map);
        let (first, second) = (Address::new("10.0.0.1", 7000), Address::new("10.0.0.2", 7001));
        assert_eq!(slots.owner(99), Some(first.clone()));
        assert_eq!(slots.owner(100), None);
        assert_eq!(slots.owner(16_383), Some(second.clone()));
        assert_eq!(slots.unserved(), 100);
        assert_eq!(slots.masters(), [first.clone(), second.clone()]);
        assert_eq!(slots.replicas(), [Address::new("10.0.0.4", 7003)]);

        let third = Address::new("10.0.0.3", 7002);
        assert!(slots.patch(99, &third));
        assert!(!slots.patch(99, &third));
        assert!(slots.is_owner(99, &third) && slots.is_owner(98, &first));
        assert!(slots.replace(&map));
        assert!(!slots.replace(&map));
        assert!(slots.is_owner(99, &first));
        assert_eq!(slots.some_slot(&second), Some(200));
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let asked = Address::new("10.0.0.1", 6379);
        for odd in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![entry(0, 16_384, &[(text("a"), 1)])]),
            Value::Array(vec![entry(-1, 5, &[(text("a"), 1)])]),
            Value::Array(vec![entry(0, 5, &[(text("a"), 70_000)])]),
            Value::Array(vec![entry(0, 5, &[])]),
        ] {
            assert_eq!(Map::parse(&odd, &asked), None, "{odd:?}");
        }
    }
}
