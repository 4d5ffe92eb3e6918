//! Names of nodes: a container for each key, and below it a node for each owner.
//!
//! The layout is that of Curator's `InterProcessMutex` for the path of the container.

use std::collections::HashSet;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use crate::backend::Owner;

/// What the name of a node cannot contain. All text beyond ASCII is encoded too, see `utf8_percent_encode`.
const ENCODED: &AsciiSet = &CONTROLS.add(b'/').add(b'%');

/// What precedes the owner token in the name of a node.
const PROTECTED: &str = "_c_";
/// What precedes the number that the server appends.
const LOCK: &str = "lock-";

/// The path of the container of `key` below `root`. Different keys have different paths.
pub(crate) fn container(root: &str, key: &str) -> String {
    // Names that a path cannot have, and one that the server has taken.
    let special = match key {
        "." => Some("%2E"),
        ".." => Some("%2E%2E"),
        "zookeeper" => Some("%7Aookeeper"),
        _ => None,
    };
    match special {
        Some(name) => format!("{root}/{name}"),
        None => format!("{root}/{}", utf8_percent_encode(key, ENCODED)),
    }
}

/// The key of the container with this name. `None` for any other name.
pub(crate) fn key_of(name: &str) -> Option<String> {
    (name != "zookeeper")
        .then(|| percent_decode_str(name).decode_utf8().ok())
        .flatten()
        .map(Into::into)
}

/// The path of a new node of `owner` in `container`, before the server appends its number.
pub(crate) fn new_node(container: &str, owner: &Owner) -> String {
    format!("{container}/{}{LOCK}", owner_prefix(owner))
}

/// The path of `contender`, a node of `owner`, after its move into the session `id`.
pub(crate) fn moved_node(container: &str, owner: &Owner, id: i64, contender: &Contender) -> String {
    let number = contender.name.rsplit_once(LOCK).map_or("", |(_, number)| number);
    format!("{container}/{}{id:x}-{LOCK}{number}", owner_prefix(owner))
}

/// What the names of all nodes of `owner` begin with.
pub(crate) fn owner_prefix(owner: &Owner) -> String {
    format!("{PROTECTED}{}-", String::from_utf8_lossy(owner.as_bytes()))
}

/// The owner of the node at `path`, if it has the form of this crate's nodes.
pub(crate) fn owner_of(path: &str) -> Option<Owner> {
    owner_in_name(path.rsplit_once('/')?.1)
}

fn owner_in_name(name: &str) -> Option<Owner> {
    let token = name.strip_prefix(PROTECTED)?.as_bytes().first_chunk::<32>()?;
    Some(Owner::from_text(*token))
}

/// The container of the node at `path`.
pub(crate) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// A node in the queue of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contender {
    pub(crate) name: String,
    /// The number that the server has appended. It counts the creations in the container, and wraps.
    number: i32,
}

impl Contender {
    /// `None` for a node that is in no queue: its name has no number.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let number = match name.rsplit_once(LOCK) {
            Some((_, number)) => number.parse().ok()?,
            // Other recipes; negative numbers only come after two billion creations.
            None => name.get(name.len().checked_sub(10)?..)?.parse().ok()?,
        };
        Some(Self { name: name.to_owned(), number })
    }

    /// Whether this node comes before `other`. Numbers that have wrapped come after those that have not.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        match self.number.wrapping_sub(other.number) {
            0 => self.name < other.name,
            distance => distance < 0,
        }
    }

    pub(crate) fn is_of(&self, owner: &Owner) -> bool {
        self.name.starts_with(&owner_prefix(owner))
    }

    /// The owner, if the name has the form of this crate's nodes. A name of Curator has a UUID in place of the token.
    pub(crate) fn owner(&self) -> Option<Owner> {
        owner_in_name(&self.name).filter(|owner| self.is_of(owner))
    }

    /// Whether it was moved into another session: the name has the number of that session.
    pub(crate) fn is_moved(&self) -> bool {
        let rest = self.owner().and_then(|owner| self.name.strip_prefix(&owner_prefix(&owner)));
        rest.is_none_or(|rest| !rest.starts_with(LOCK))
    }
}

/// The nodes in the queue of a key.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyQueueNodes(Vec<Contender>);

impl KeyQueueNodes {
    pub(crate) fn parse(names: &[String]) -> Self {
        Self(names.iter().filter_map(|name| Contender::parse(name)).collect())
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Contender> {
        self.0.iter().find(|contender| contender.name == name)
    }

    /// The node of `owner` that comes first.
    pub(crate) fn first_of(&self, owner: &Owner) -> Option<&Contender> {
        let own = self.0.iter().filter(|contender| contender.is_of(owner));
        own.reduce(|first, other| if other.is_before(first) { other } else { first })
    }

    /// Further nodes of `owner` besides `name`: what a lost connection has created late.
    pub(crate) fn strays(&self, owner: &Owner, name: &str) -> impl Iterator<Item = &Contender> {
        self.0.iter().filter(move |contender| contender.name != name && contender.is_of(owner))
    }

    /// The node right before `contender` that is not `owner`'s.
    pub(crate) fn predecessor(&self, contender: &Contender, owner: &Owner) -> Option<&Contender> {
        let before =
            self.0.iter().filter(|other| other.is_before(contender) && !other.is_of(owner));
        before.reduce(|last, other| if last.is_before(other) { other } else { last })
    }

    /// The first node of each owner, in the order of the queue.
    pub(crate) fn owners_in_order(&self) -> Vec<Contender> {
        let mut nodes = self.0.clone();
        // Numbers that have wrapped come last. Relative to one of them, the order is total, whatever the numbers are.
        let start = nodes.first().map_or(0, |first| first.number);
        nodes.sort_by_key(|it| (it.number.wrapping_sub(start), it.name.clone()));
        let mut seen = HashSet::new();
        nodes.retain(|it| it.owner().is_none_or(|owner| seen.insert(owner)));
        nodes
    }

    /// Whether any node is not `owner`'s.
    pub(crate) fn has_others(&self, owner: &Owner) -> bool {
        self.0.iter().any(|contender| !contender.is_of(owner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(numbers: &[i32]) -> Vec<Contender> {
        // As the server prints them.
        let text = |number: &i32| match number {
            0.. => format!("{number:010}"),
            _ => format!("-{:09}", number.unsigned_abs()),
        };
        let names = numbers.iter().map(|number| format!("_c_x-lock-{}", text(number)));
        names.map(|name| Contender::parse(&name).unwrap()).collect()
    }

    #[test]
    fn numbers_are_read_also_when_they_have_wrapped() {
        let numbers = [0, 12, i32::MAX, -1, -5, i32::MIN];
        let read: Vec<_> = nodes(&numbers).iter().map(|contender| contender.number).collect();
        assert_eq!(read, numbers);
        assert_eq!(Contender::parse("lock-0000000003").unwrap().number, 3);
        assert_eq!(Contender::parse("ab__lock__0000000004").unwrap().number, 4);
        for name in ["", "lock-", "leases", "_c_x-lock-1x", "ü__lock_000004"] {
            assert_eq!(Contender::parse(name), None, "{name}");
        }
    }

    #[test]
    fn the_order_survives_the_wrap() {
        let order = nodes(&[i32::MAX - 1, i32::MAX, i32::MIN, i32::MIN + 1]);
        for (at, one) in order.iter().enumerate() {
            for (other_at, other) in order.iter().enumerate() {
                assert_eq!(one.is_before(other), at < other_at, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn the_predecessor_is_the_last_one_before() {
        let owner = Owner::from_text([b'7'; 32]);
        let own = format!("{}lock-0000000005", owner_prefix(&owner));
        let stray = format!("{}lock-0000000003", owner_prefix(&owner));
        let names =
            ["_c_a-lock-0000000002", "_c_b-lock-0000000009", &own, "_c_c-lock-0000000001", &stray];
        let queue = KeyQueueNodes::parse(&names.map(str::to_owned));
        let node = queue.find(&own).unwrap();
        assert_eq!(queue.predecessor(node, &owner).unwrap().name, names[0]);
        assert_eq!(queue.first_of(&owner).unwrap().name, stray);
        let strays: Vec<_> = queue.strays(&owner, &own).map(|it| it.name.clone()).collect();
        assert_eq!(strays, [stray]);
        assert!(queue.has_others(&owner));
    }

    #[test]
    fn keys_are_names_and_stay_distinct() {
        let keys =
            ["a", "a/b", "a%2Fb", ".", "%2E", "..", "zookeeper", "%7Aookeeper", "ü", "a\0", "a\n"];
        let paths: Vec<_> = keys.iter().map(|key| container("/r", key)).collect();
        for (at, path) in paths.iter().enumerate() {
            assert_eq!(path.matches('/').count(), 2, "{path}");
            assert!(path.is_ascii() && !path.bytes().any(|byte| byte.is_ascii_control()), "{path}");
            assert!(!paths[at + 1..].contains(path), "{path}");
            assert_eq!(key_of(&path[3..]).unwrap(), keys[at]);
        }
        assert_eq!(container("", "order:1"), "/order:1");
    }

    #[test]
    fn a_node_names_its_owner_also_behind_a_move() {
        let owner = Owner::from_text([b'a'; 32]);
        let path = format!("{}0000000007", new_node("/r/k", &owner));
        assert_eq!(owner_of(&path), Some(owner));
        assert_eq!(parent(&path), "/r/k");
        let contender = Contender::parse(path.rsplit_once('/').unwrap().1).unwrap();
        let moved = moved_node("/r/k", &owner, 0x1f, &contender);
        assert_eq!(owner_of(&moved), Some(owner));
        let moved = Contender::parse(moved.rsplit_once('/').unwrap().1).unwrap();
        assert_eq!(moved.number, contender.number);
        assert!(moved.is_of(&owner) && moved.name != contender.name);
        assert_eq!(owner_of("/r/k/_c_short-lock-1"), None);
    }
}
