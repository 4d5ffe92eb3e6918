//! The names of the keys beside a lock.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::redis::routing::slots::{slot, tag};
use crate::base::key::Key;

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
pub(crate) struct Book {
    pub(crate) name: Cow<'static, str>,
    /// How many entries it may have, one or two for each lock.
    pub(crate) most: u32,
    /// How many it keeps for locks that are not held.
    pub(crate) spare: u32,
}

impl Book {
    const NAME: &str = "lock_runtime:ballots";

    /// In a server that has all keys.
    pub(crate) const OF_SERVER: Self =
        Self { name: Cow::Borrowed(Self::NAME), most: 100_000, spare: 100_000 };

    /// In a cluster, which has one for each of its 16,384 slots: what all of them keep is bounded by what is held.
    pub(crate) fn of_slot(locks: &[Key]) -> Self {
        let slot = locks.first().map_or(0, |lock| slot(lock.as_str()));
        Self { name: in_slot(slot, Self::NAME), most: 1_000, spare: 16 }
    }

    /// Whether `key` is not a lock but a book.
    pub(crate) fn is_at(key: &str) -> bool {
        key.ends_with(Self::NAME)
    }
}

/// How the keys beside a lock are named. Clones share what they learn of the server.
///
/// All processes have to agree on the names, so the server decides and not the URL: where one script may have keys of
/// several slots they stand as they are, and where it may not each bears the tag of its lock's slot. A server gives the
/// same answer to all, so the fences of a slot come from one counter. A server that begins to check slots leaves the
/// counter without a tag behind; the fences go on growing by its clock, as after the loss of a counter (`fence.lua`).
#[derive(Clone, Debug)]
pub(crate) struct Names {
    fence_counter: String,
    probe: String,
    keeper: Keeper,
}

/// Which servers the keys are in.
#[derive(Clone, Debug)]
enum Keeper {
    /// One endpoint; true once it has refused a script for having keys of several slots.
    Server(Arc<AtomicBool>),
    /// Servers that keep some slots each.
    Cluster,
}

/// Where the keys of a lock may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Anywhere,
    /// All in the slot of the lock, whose key is the user's: `{tag}` in front puts the others there.
    OneSlot,
}

impl Names {
    /// For a server that keeps all keys; `prefix` is the pool's.
    pub(crate) fn of_server(prefix: &str) -> Self {
        Self::new(prefix, Keeper::Server(Arc::default()))
    }

    /// For servers that keep some slots each.
    pub(crate) fn of_cluster(prefix: &str) -> Self {
        Self::new(prefix, Keeper::Cluster)
    }

    fn new(prefix: &str, keeper: Keeper) -> Self {
        let fence_counter = [prefix, FENCE_COUNTER].concat();
        Self { fence_counter, probe: [prefix, PROBE].concat(), keeper }
    }

    /// Whether they are for one endpoint that is asked for all keys.
    pub(crate) fn are_of_server(&self) -> bool {
        matches!(self.keeper, Keeper::Server(_))
    }

    /// Whether all keys of a lock bear the tag of its slot.
    pub(crate) fn are_tagged(&self) -> bool {
        self.space() == Space::OneSlot
    }

    /// From now on for a server that refuses scripts with keys of several slots.
    pub(crate) fn tag_all(&self) {
        if let Keeper::Server(checks_slots) = &self.keeper {
            checks_slots.store(true, Ordering::Relaxed);
        }
    }

    fn space(&self) -> Space {
        match &self.keeper {
            Keeper::Server(checks_slots) if !checks_slots.load(Ordering::Relaxed) => {
                Space::Anywhere
            }
            Keeper::Server(_) | Keeper::Cluster => Space::OneSlot,
        }
    }

    pub(crate) fn line(&self, lock: &Key) -> String {
        let lock = lock.as_str();
        match self.space() {
            Space::Anywhere => [lock, LINE].concat(),
            Space::OneSlot => format!("{{{}}}{lock}{LINE}", tag(slot(lock))),
        }
    }

    /// Where the fences of `locks` come from.
    pub(crate) fn fence_counter(&self, locks: &[Key]) -> Cow<'_, str> {
        match (self.space(), locks) {
            (Space::OneSlot, [lock, ..]) => in_slot(slot(lock.as_str()), &self.fence_counter),
            _ => (&self.fence_counter).into(),
        }
    }

    /// A lock that no process takes; where names are tagged in `slot`.
    pub(crate) fn probe(&self, slot: u16) -> Key {
        match self.space() {
            Space::Anywhere => (&self.probe).into(),
            Space::OneSlot => in_slot(slot, &self.probe).into_owned().into(),
        }
    }

    /// Whether one script may have both `a` and `b`.
    pub(crate) fn may_share_a_script(&self, a: &Key, b: &Key) -> bool {
        match self.space() {
            Space::Anywhere => true,
            Space::OneSlot => slot(a.as_str()) == slot(b.as_str()),
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

    #[test]
    fn a_server_that_checks_slots_has_the_names_of_a_cluster() {
        let (server, cluster) = (Names::of_server("shop:"), Names::of_cluster("shop:"));
        let lock = [Key::from("shop:a")];
        let all = |names: &Names| {
            (names.line(&lock[0]), names.fence_counter(&lock).into_owned(), names.probe(7))
        };
        assert_eq!(server.fence_counter(&lock), "shop:lock_runtime:fence");
        assert!(!server.are_tagged() && cluster.are_tagged());
        server.tag_all();
        assert!(server.are_tagged() && server.are_of_server());
        assert_eq!(all(&server), all(&cluster));
    }
}
