//! Notifications from the store: wakes waiters, and renews the lease of a holder immediately.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::backend::Notifier;
use crate::backend::notifier::NotifySink;
use crate::base::backend_error::BackendError;
use crate::base::clock::Clock;
use crate::base::owner::Owner;
use crate::lease::renewal::RenewalScheduler;
use crate::lease::tracker::LeaseTracker;
use crate::lock::store_status::StoreStatus;
use crate::lock::waiter::LockWaiter;
use crate::queue::wait_queue::WaitQueues;

/// The notifier of a pool with these queues, renewals and leases.
pub(super) fn notifier(
    queue: &Arc<WaitQueues<LockWaiter>>,
    renewals: &Arc<RenewalScheduler>,
    tracker: &Arc<LeaseTracker>,
    store_status: &Arc<StoreStatus>,
    clock: Clock,
) -> Notifier {
    let store_status = Arc::downgrade(store_status);
    let queue = Arc::downgrade(queue);
    let (renewals, tracker) = (Arc::downgrade(renewals), Arc::downgrade(tracker));
    Notifier::new(PoolWakeups { queue, renewals, tracker, store_status, clock })
}

/// A store may outlive the pool, so nothing here keeps it alive.
struct PoolWakeups {
    queue: Weak<WaitQueues<LockWaiter>>,
    renewals: Weak<RenewalScheduler>,
    tracker: Weak<LeaseTracker>,
    store_status: Weak<StoreStatus>,
    clock: Clock,
}

impl PoolWakeups {
    /// Renews the leases with these numbers, as far as they exist.
    fn expedite(&self, leases: impl IntoIterator<Item = u64>) {
        let (Some(renewals), Some(tracker)) = (self.renewals.upgrade(), self.tracker.upgrade())
        else {
            return;
        };
        let now = self.clock.now();
        for lease in leases.into_iter().filter_map(|id| tracker.lease(id)) {
            renewals.expedite(&lease, now);
        }
    }
}

impl NotifySink for PoolWakeups {
    fn key_changed(&self, key: &str) {
        if let Some(queue) = self.queue.upgrade() {
            self.expedite(queue.wake(key));
        }
    }

    fn resync(&self) {
        if let Some(status) = self.store_status.upgrade() {
            status.report_connect();
        }
        if let Some(queue) = self.queue.upgrade() {
            self.expedite(queue.wake_all());
        }
    }

    fn disconnected(&self, error: &BackendError) {
        if let Some(status) = self.store_status.upgrade() {
            status.report_disconnect(error);
        }
    }

    fn head_of_queue(&self, key: &str, owner: &Owner, available_in: Duration) -> bool {
        let by = self.clock.now() + available_in;
        self.queue.upgrade().is_some_and(|queue| queue.promote(key, owner, by))
    }

    fn contended(&self, key: &str) {
        if let Some(queue) = self.queue.upgrade() {
            queue.mark_contended(key);
        }
    }
}
