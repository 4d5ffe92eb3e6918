//! Notifications from the store: wakes waiters, and renews the lease of a holder immediately.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::backend::Notifier;
use crate::backend::notifier::NotifySink;
use crate::base::backend_error::BackendError;
use crate::base::clock::Clock;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::exec::driver::Driver;
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
    driver: &Driver,
) -> Notifier {
    Notifier::new(PoolWakeups {
        queue: Arc::downgrade(queue),
        renewals: Arc::downgrade(renewals),
        tracker: Arc::downgrade(tracker),
        store_status: Arc::downgrade(store_status),
        clock,
        driver: driver.clone(),
    })
}

/// A store may outlive the pool, so nothing here keeps it alive.
#[derive(Clone)]
struct PoolWakeups {
    queue: Weak<WaitQueues<LockWaiter>>,
    renewals: Weak<RenewalScheduler>,
    tracker: Weak<LeaseTracker>,
    store_status: Weak<StoreStatus>,
    clock: Clock,
    driver: Driver,
}

impl PoolWakeups {
    /// Renews these leases immediately, as far as they exist.
    fn expedite(&self, held: impl IntoIterator<Item = (Key, u64)>) {
        for (key, lease) in held {
            if !self.expedite_lease(lease) {
                self.driver.spawn(self.clone().expedite_successor(key));
            }
        }
    }

    /// Renews the lease with this number immediately. `false` if it is not tracked yet, or a hand-off is replacing it.
    fn expedite_lease(&self, lease: u64) -> bool {
        let (Some(renewals), Some(tracker)) = (self.renewals.upgrade(), self.tracker.upgrade())
        else {
            return true;
        };
        tracker.lease(lease).is_some_and(|lease| renewals.expedite(&lease, self.clock.now()))
    }

    /// Renews the lease of `key`. A grant or a hand-off changes the holder in the queue first, and the tracked lease after
    /// that.
    async fn expedite_successor(self, key: Key) {
        const PAUSE: Duration = Duration::from_millis(1);
        /// A thread in the middle of a hand-off may be suspended. Beyond that, the next regular renewal has to do.
        const ATTEMPTS: u32 = 1_000;
        for _ in 0..ATTEMPTS {
            let holder = self.queue.upgrade().and_then(|queue| queue.holder(&key));
            if holder.is_none_or(|lease| self.expedite_lease(lease)) {
                return;
            }
            tokio::time::sleep(PAUSE).await;
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

#[cfg(test)]
mod tests {
    use crate::base::clock::Instant;
    use crate::base::metrics::PoolMetrics;
    use crate::base::options::OnOutage;
    use crate::lease::lease::Lease;
    use crate::lease::lease::tests::{lease_with, successor};
    use crate::queue::key_queue::Contention;

    use super::*;

    const CLOCK: Clock = Clock::Boot;
    const KEY: Key = Key::from_static("k");

    async fn is_expedited(lease: &Lease, since: Instant) {
        let far = since + Duration::from_secs(1);
        while lease.due().unwrap() > far {
            tokio::task::yield_now().await;
        }
    }

    /// The lease is given up, then its successor is the holder in the queue, then it is tracked. The key changes before any of
    /// these steps, or after all.
    #[tokio::test(start_paused = true)]
    async fn a_change_during_a_hand_off_renews_the_successor() {
        for changes_before in 0..4 {
            let queue = Arc::new(WaitQueues::<LockWaiter>::new(10, CLOCK));
            let (renewals, tracker) = (Arc::default(), Arc::new(LeaseTracker::new()));
            let metrics = Arc::<PoolMetrics>::default();
            let status = StoreStatus::new(CLOCK, OnOutage::Wait, metrics, |_| {});
            let driver = Driver::current().unwrap();
            let notifier = notifier(&queue, &renewals, &tracker, &status, CLOCK, &driver);
            let former = lease_with(1);
            assert_eq!(queue.take_free(&[KEY]), [KEY]);
            tracker.insert(&former);
            queue.set_holder(&[KEY], former.holder(), Contention::None);
            renewals.schedule(&former);
            let changed = CLOCK.now();
            let step = |number| {
                if number == changes_before {
                    notifier.key_changed("k");
                }
            };
            step(0);
            let next = successor(&former);
            step(1);
            queue.transfer_holder(&KEY, next.holder());
            step(2);
            tracker.replace(&former, &next);
            renewals.transfer(&former, &next);
            step(3);
            is_expedited(&next, changed).await;
        }
    }
}
