//! The ends of lingers.

use std::future::Future;
use std::sync::Arc;

use crate::exec::panic_boundary;
use crate::lease::lease::Lease;
use crate::lease::tracker::LeaseTracker;
use crate::lock::waiter::LockWaiter;
use crate::queue::wait_queue::WaitQueues;

/// Calls `release` with each lease at the end of its linger. Runs on the driver for the life of the pool. If its runtime ends
/// before, the leases end with their ttl, and the pool does not stay in memory for them.
pub(super) fn expire(
    queue: Arc<WaitQueues<LockWaiter>>,
    tracker: Arc<LeaseTracker>,
    release: impl Fn(&Arc<Lease>) + Send,
) -> impl Future<Output = ()> + Send {
    // Also if the runtime ends before it has polled this.
    let lingers = DropPermitsOnDrop { queue, tracker };
    async move {
        loop {
            for lease in lingers.queue.lingered().await {
                if let Some(lease) = lingers.tracker.lease(lease) {
                    // The leases that are left have no other end.
                    let _ = panic_boundary::call(|| release(&lease));
                }
            }
        }
    }
}

/// The permit of a lease keeps its pool.
struct DropPermitsOnDrop {
    queue: Arc<WaitQueues<LockWaiter>>,
    tracker: Arc<LeaseTracker>,
}

impl Drop for DropPermitsOnDrop {
    fn drop(&mut self) {
        if self.tracker.is_inherited() {
            return;
        }
        for lease in self.queue.end_all_lingers() {
            drop(self.tracker.lease(lease).map(|lease| lease.take_permit()));
        }
    }
}
