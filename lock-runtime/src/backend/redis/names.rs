//! The names of the keys beside a lock.

use crate::key::Key;

/// The line of a lock: its key and this.
const LINE: &str = ":lock_runtime:line";

/// The one counter that all fences of a database come from. One counter instead of one per lock keeps the
/// store's memory bounded.
const FENCE_COUNTER: &str = "lock_runtime:fence";

/// A lock that nobody takes, to find out what this user may do.
const PROBE: &str = "lock_runtime:probe";

/// How the keys beside a lock are named.
#[derive(Clone, Debug)]
pub(super) struct Names {
    fence_counter: String,
    probe: Key,
}

impl Names {
    /// For a server that keeps all keys; `prefix` is the pool's.
    pub(super) fn of_server(prefix: &str) -> Self {
        let fence_counter = [prefix, FENCE_COUNTER].concat();
        Self { fence_counter, probe: [prefix, PROBE].concat().into() }
    }

    pub(super) fn line(&self, lock: &Key) -> String {
        [lock.as_str(), LINE].concat()
    }

    /// Where the fences of `locks` come from.
    pub(super) fn fence_counter(&self, locks: &[Key]) -> &str {
        let _ = locks;
        &self.fence_counter
    }

    pub(super) fn probe(&self) -> &Key {
        &self.probe
    }
}
