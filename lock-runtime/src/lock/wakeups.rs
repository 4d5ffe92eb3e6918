//! Notifications from the store: wakes waiters, and renews the lease of a holder at once.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::backend::Notifier;
use crate::backend::notifier::NotifySink;
use crate::base::clock::Clock;
use crate::base::owner::Owner;
use crate::lease::renewal::Watchdog;
use crate::queue::wait_queue::Queue;

/// The notifier of a pool with these queues and renewals.
pub(crate) fn notifier(queue: &Arc<Queue>, watchdog: &Arc<Watchdog>, clock: Clock) -> Notifier {
    let (queue, watchdog) = (Arc::downgrade(queue), Arc::downgrade(watchdog));
    Notifier::new(PoolWakeups { queue, watchdog, clock })
}

struct PoolWakeups {
    queue: Weak<Queue>,
    watchdog: Weak<Watchdog>,
    clock: Clock,
}

impl NotifySink for PoolWakeups {
    fn key_changed(&self, key: &str) {
        let Some(queue) = self.queue.upgrade() else { return };
        if let (Some(holder), Some(watchdog)) = (queue.stir(key), self.watchdog.upgrade()) {
            watchdog.hurry(&holder, self.clock.now());
        }
    }

    fn resync(&self) {
        let (Some(queue), Some(watchdog)) = (self.queue.upgrade(), self.watchdog.upgrade()) else {
            return;
        };
        let now = self.clock.now();
        for holder in queue.stir_all() {
            watchdog.hurry(&holder, now);
        }
    }

    fn head_of_queue(&self, key: &str, owner: &Owner, available_in: Duration) -> bool {
        let by = self.clock.now() + available_in;
        self.queue.upgrade().is_some_and(|queue| queue.call(key, owner, by))
    }

    fn contended(&self, key: &str) {
        if let Some(queue) = self.queue.upgrade() {
            queue.want(key);
        }
    }
}
