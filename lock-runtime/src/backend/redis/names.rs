//! The names of the keys beside a lock.

use std::borrow::Cow;

use super::slots::{slot, tag};
use crate::key::Key;

/// The line of a lock: its key and this.
const LINE: &str = ":lock_runtime:line";

/// The one counter that all fences of a database, or of a slot, come from. One counter instead of one per lock
/// keeps the store's memory bounded.
const FENCE_COUNTER: &str = "lock_runtime:fence";

/// A lock that nobody takes, to find out what this user may do.
const PROBE: &str = "lock_runtime:probe";

/// What a node of a quorum has promised and accepted: for all pools, as their prefixes do not tell locks apart that
/// have the same key.
#[derive(Clone, Debug)]
pub(super) struct Book {
    pub(super) name: Cow<'static, str>,
    /// How many entries it may have, one or two for each lock.
    pub(super) most: u32,
}

impl Book {
    const NAME: &str = "lock_runtime:ballots";

    /// In a server that has all keys.
    pub(super) const OF_SERVER: Self = Self { name: Cow::Borrowed(Self::NAME), most: 100_000 };

    /// In a cluster, which has one for each of its 16,384 slots.
    pub(super) fn of_slot(locks: &[Key]) -> Self {
        let slot = locks.first().map_or(0, |lock| slot(lock.as_str()));
        Self { name: in_slot(slot, Self::NAME), most: 1_000 }
    }

    /// Whether `key` is not a lock but a book.
    pub(super) fn is_at(key: &str) -> bool {
        key.ends_with(Self::NAME)
    }
}

/// How the keys beside a lock are named.
#[derive(Clone, Debug)]
pub(super) struct Names {
    fence_counter: String,
    probe: String,
    space: Space,
}

/// Where the keys of a lock may be.
#[derive(Clone, Copy, Debug)]
enum Space {
    /// Anywhere.
    Server,
    /// All in the slot of the lock, whose key is the user's: `{tag}` in front puts the others there.
    Cluster,
}

impl Names {
    /// For a server that keeps all keys; `prefix` is the pool's.
    pub(super) fn of_server(prefix: &str) -> Self {
        Self::new(prefix, Space::Server)
    }

    /// For servers that keep some slots each.
    pub(super) fn of_cluster(prefix: &str) -> Self {
        Self::new(prefix, Space::Cluster)
    }

    fn new(prefix: &str, space: Space) -> Self {
        let fence_counter = [prefix, FENCE_COUNTER].concat();
        Self { fence_counter, probe: [prefix, PROBE].concat(), space }
    }

    pub(super) fn are_of_server(&self) -> bool {
        matches!(self.space, Space::Server)
    }

    pub(super) fn line(&self, lock: &Key) -> String {
        let lock = lock.as_str();
        match self.space {
            Space::Server => [lock, LINE].concat(),
            Space::Cluster => format!("{{{}}}{lock}{LINE}", tag(slot(lock))),
        }
    }

    /// Where the fences of `locks` come from.
    pub(super) fn fence_counter(&self, locks: &[Key]) -> Cow<'_, str> {
        match (self.space, locks) {
            (Space::Cluster, [lock, ..]) => in_slot(slot(lock.as_str()), &self.fence_counter),
            _ => (&self.fence_counter).into(),
        }
    }

    /// A lock that nobody takes; in a cluster in `slot`.
    pub(super) fn probe(&self, slot: u16) -> Key {
        match self.space {
            Space::Server => (&self.probe).into(),
            Space::Cluster => in_slot(slot, &self.probe).into_owned().into(),
        }
    }

    /// Whether one script may have both `a` and `b`.
    pub(super) fn may_share_a_script(&self, a: &Key, b: &Key) -> bool {
        match self.space {
            Space::Server => true,
            Space::Cluster => slot(a.as_str()) == slot(b.as_str()),
        }
    }
}

fn in_slot(slot: u16, name: &str) -> Cow<'static, str> {
    format!("{{{}}}{name}", tag(slot)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_a_cluster_all_keys_of_a_lock_are_in_its_slot() {
        let names = Names::of_cluster("shop:");
        for lock in ["shop:a", "shop:order:{7}", "shop:{", "shop:}{", "shop:{}{x}", "shop:ü"] {
            let lock = Key::from(lock);
            let home = slot(lock.as_str());
            assert_eq!(slot(&names.line(&lock)), home, "{lock}");
            assert_eq!(slot(&names.fence_counter(std::slice::from_ref(&lock))), home, "{lock}");
            assert_eq!(slot(&Book::of_slot(std::slice::from_ref(&lock)).name), home, "{lock}");
            let probe = names.probe(home);
            assert_eq!(slot(probe.as_str()), home, "{lock}");
            assert_eq!(slot(&names.line(&probe)), home, "{lock}");
        }
    }
}
