//! The leases of locks that linger.

use std::sync::Arc;

use foldhash::HashMap;

use crate::base::key::Key;
use crate::base::sync::{Mutex, MutexGuard};
use crate::lease::lease::Lease;
use crate::lock::waiter::LockWaiter;
use crate::queue::wait_queue::WaitQueues;

/// The leases of a pool that have no holder, by their key.
///
/// Whether a lock lingers is decided in its [queue](crate::queue::wait_queue). What ends the linger there takes the
/// lease from here.
#[derive(Debug, Default)]
pub(crate) struct LingeringLeases(Mutex<HashMap<Key, Arc<Lease>>>);

impl LingeringLeases {
    pub(super) fn insert(&self, key: &Key, lease: Arc<Lease>) -> Option<Arc<Lease>> {
        self.by_key().insert(key.clone(), lease)
    }

    pub(super) fn take(&self, key: &Key) -> Option<Arc<Lease>> {
        self.by_key().remove(key)
    }

    /// The lease of `key`, if it `is_wanted`.
    pub(super) fn take_if(
        &self,
        key: &Key,
        is_wanted: impl FnOnce(&Arc<Lease>) -> bool,
    ) -> Option<Arc<Lease>> {
        let mut by_key = self.by_key();
        if is_wanted(by_key.get(key)?) { by_key.remove(key) } else { None }
    }

    pub(super) fn take_all(&self) -> Vec<Arc<Lease>> {
        self.by_key().drain().map(|(_, lease)| lease).collect()
    }

    fn by_key(&self) -> MutexGuard<'_, HashMap<Key, Arc<Lease>>> {
        self.0.lock()
    }

    /// Calls `release` with each lease at the end of its linger, or if it was lost meanwhile. Runs on the driver for the life
    /// of the pool. If its runtime ends before, the leases end with their ttl, and the pool does not stay in memory for them.
    pub(super) fn expire(
        self: Arc<Self>,
        queue: Arc<WaitQueues<LockWaiter>>,
        release: impl Fn(&Arc<Lease>) + Send,
    ) -> impl Future<Output = ()> + Send {
        // Also if the runtime ends before it has polled this.
        let lingering = DropPermitsOnDrop(self);
        async move {
            let lingering = &lingering.0;
            loop {
                for (key, is_over) in queue.lingered().await {
                    let is_due = |lease: &Arc<Lease>| is_over || lease.loss().is_some();
                    if let Some(lease) = lingering.take_if(&key, is_due) {
                        release(&lease);
                    }
                }
            }
        }
    }
}

/// The permit of a lease keeps its pool.
struct DropPermitsOnDrop(Arc<LingeringLeases>);

impl Drop for DropPermitsOnDrop {
    fn drop(&mut self) {
        for lease in self.0.take_all() {
            drop(lease.take_permit());
        }
    }
}
