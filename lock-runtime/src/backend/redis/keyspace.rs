//! The names of the keys that belong to a lock.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::redis::hash_slot::{slot_of, tag};
use crate::base::key::Key;

/// The suffix of a lock's wait queue.
const QUEUE: &str = ":lock_runtime:line";

/// The counter of all fencing tokens of a database, or of a slot. One counter instead of one per lock bounds the
/// store's memory.
const FENCE_COUNTER: &str = "lock_runtime:fence";

/// A lock that no process takes, for checking the user's rights.
const PROBE: &str = "lock_runtime:probe";

/// The key and size limits of the log of promised and accepted ballots at a node of a quorum. All pools share one log:
/// key prefixes do not distinguish locks of the same key.
#[derive(Clone, Debug)]
pub(crate) struct BallotLog {
    pub(crate) key: Cow<'static, str>,
    /// The maximum number of entries, one or two for each lock.
    pub(crate) max_entries: u32,
    /// The number of entries kept for locks that are not held.
    pub(crate) max_idle: u32,
}

impl BallotLog {
    const NAME: &str = "lock_runtime:ballots";

    /// The log of a server that has all keys.
    pub(crate) const OF_SERVER: Self =
        Self { key: Cow::Borrowed(Self::NAME), max_entries: 100_000, max_idle: 100_000 };

    /// The log of one of the 16,384 slots of a cluster. The limits are smaller, so that the total is bounded by the
    /// held locks.
    pub(crate) fn of_slot(locks: &[Key]) -> Self {
        let slot = locks.first().map_or(0, |lock| slot_of(lock.as_str()));
        Self { key: in_slot(slot, Self::NAME), max_entries: 1_000, max_idle: 16 }
    }

    /// Whether `key` is the key of a log and not of a lock.
    pub(crate) fn is_log(key: &str) -> bool {
        key.ends_with(Self::NAME)
    }
}

/// Names the keys that belong to a lock. Clones share what the server has shown.
///
/// All processes must agree on the names, so the server decides them, not the URL. Where a script may use keys of
/// several slots, the names have no tag. Where it may not, each name has the hash tag of its lock's slot. A server
/// answers all processes alike, so the fencing tokens of a slot come from one counter. If a server begins to check
/// slots, the counter without a tag is abandoned. The tokens continue to grow by the server's clock, as after the
/// loss of a counter (`fence.lua`).
#[derive(Clone, Debug)]
pub(crate) struct Keyspace {
    fence_counter: String,
    probe: String,
    deployment: Deployment,
}

#[derive(Clone, Debug)]
enum Deployment {
    /// One endpoint; true once it has refused a script with keys of several slots.
    Server(Arc<AtomicBool>),
    /// Several servers with some slots each.
    Cluster,
}

impl Keyspace {
    /// For a server that has all keys; `prefix` is the pool's.
    pub(crate) fn of_server(prefix: &str) -> Self {
        Self::new(prefix, Deployment::Server(Arc::default()))
    }

    /// For several servers with some slots each.
    pub(crate) fn of_cluster(prefix: &str) -> Self {
        Self::new(prefix, Deployment::Cluster)
    }

    fn new(prefix: &str, deployment: Deployment) -> Self {
        let fence_counter = [prefix, FENCE_COUNTER].concat();
        Self { fence_counter, probe: [prefix, PROBE].concat(), deployment }
    }

    /// Whether one endpoint serves all keys.
    pub(crate) fn is_of_server(&self) -> bool {
        matches!(self.deployment, Deployment::Server(_))
    }

    /// Whether all keys of a lock have the hash tag of its slot.
    pub(crate) fn is_tagged(&self) -> bool {
        match &self.deployment {
            Deployment::Server(checks_slots) => checks_slots.load(Ordering::Relaxed),
            Deployment::Cluster => true,
        }
    }

    /// Adds tags from now on: the server has refused a script with keys of several slots.
    pub(crate) fn use_tags(&self) {
        if let Deployment::Server(checks_slots) = &self.deployment {
            checks_slots.store(true, Ordering::Relaxed);
        }
    }

    /// The wait queue of `lock`.
    pub(crate) fn wait_queue(&self, lock: &Key) -> String {
        let lock = lock.as_str();
        if self.is_tagged() {
            format!("{{{}}}{lock}{QUEUE}", tag(slot_of(lock)))
        } else {
            [lock, QUEUE].concat()
        }
    }

    /// The counter of the fencing tokens of `locks`.
    pub(crate) fn fence_counter(&self, locks: &[Key]) -> Cow<'_, str> {
        match locks {
            [lock, ..] if self.is_tagged() => in_slot(slot_of(lock.as_str()), &self.fence_counter),
            _ => (&self.fence_counter).into(),
        }
    }

    /// A lock that no process takes, in `slot` if names are tagged.
    pub(crate) fn probe(&self, slot: u16) -> Key {
        if self.is_tagged() {
            in_slot(slot, &self.probe).into_owned().into()
        } else {
            (&self.probe).into()
        }
    }

    /// Whether one script may use both `a` and `b`.
    pub(crate) fn may_share_a_script(&self, a: &Key, b: &Key) -> bool {
        !self.is_tagged() || slot_of(a.as_str()) == slot_of(b.as_str())
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
        let keyspace = Keyspace::of_cluster("shop:");
        for lock in ["shop:a", "shop:order:{7}", "shop:{", "shop:}{", "shop:{}{x}", "shop:ü"] {
            let lock = Key::from(lock);
            let home = slot_of(lock.as_str());
            assert_eq!(slot_of(&keyspace.wait_queue(&lock)), home, "{lock}");
            assert_eq!(
                slot_of(&keyspace.fence_counter(std::slice::from_ref(&lock))),
                home,
                "{lock}"
            );
            assert_eq!(
                slot_of(&BallotLog::of_slot(std::slice::from_ref(&lock)).key),
                home,
                "{lock}"
            );
            let probe = keyspace.probe(home);
            assert_eq!(slot_of(probe.as_str()), home, "{lock}");
            assert_eq!(slot_of(&keyspace.wait_queue(&probe)), home, "{lock}");
        }
    }

    #[test]
    fn a_server_that_checks_slots_uses_the_names_of_a_cluster() {
        let (server, cluster) = (Keyspace::of_server("shop:"), Keyspace::of_cluster("shop:"));
        let lock = [Key::from("shop:a")];
        let all = |keyspace: &Keyspace| {
            (
                keyspace.wait_queue(&lock[0]),
                keyspace.fence_counter(&lock).into_owned(),
                keyspace.probe(7),
            )
        };
        assert_eq!(server.fence_counter(&lock), "shop:lock_runtime:fence");
        assert!(!server.is_tagged() && cluster.is_tagged());
        server.use_tags();
        assert!(server.is_tagged() && server.is_of_server());
        assert_eq!(all(&server), all(&cluster));
    }
}
