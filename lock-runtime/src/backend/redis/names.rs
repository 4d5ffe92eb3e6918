//! The names of the keys beside a lock.

use crate::key::Key;

/// The line of a lock: its key and this.
const LINE: &str = ":lock_runtime:line";

/// The one counter that all fences of a database come from. One counter instead of one per lock keeps the
/// store's memory bounded.
const FENCE_COUNTER: &str = "lock_runtime:fence";

/// Of a node of a quorum: the greatest number it has accepted for a lock, in the lock's key and this.
const REGISTER: &str = ":lock_runtime:ballot";

/// Of a node of a quorum: what it knows of registers that it has forgotten.
const BOOK: &str = "lock_runtime:ballots";

/// A lock that nobody takes, to find out what this user may do.
const PROBE: &str = "lock_runtime:probe";

/// How the keys beside a lock are named.
#[derive(Clone, Debug)]
pub(super) struct Names {
    fence_counter: String,
    book: String,
    probe: Key,
}

impl Names {
    /// For a server that keeps all keys; `prefix` is the pool's.
    pub(super) fn of_server(prefix: &str) -> Self {
        let fence_counter = [prefix, FENCE_COUNTER].concat();
        let book = [prefix, BOOK].concat();
        Self { fence_counter, book, probe: [prefix, PROBE].concat().into() }
    }

    pub(super) fn line(&self, lock: &Key) -> String {
        [lock.as_str(), LINE].concat()
    }

    /// Where the fences of `locks` come from.
    pub(super) fn fence_counter(&self, locks: &[Key]) -> &str {
        let _ = locks;
        &self.fence_counter
    }

    pub(super) fn register(&self, lock: &Key) -> String {
        [lock.as_str(), REGISTER].concat()
    }

    pub(super) fn book(&self) -> &str {
        &self.book
    }

    pub(super) fn probe(&self) -> &Key {
        &self.probe
    }
}
