//! How a store tells a pool what happens to keys.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::base::clock::Clock;
use crate::base::owner::Owner;
use crate::lease::renewal::Watchdog;
use crate::queue::wait_queue::Queue;

/// Rung by a store when something happened to a key. Keys are as the store knows them, with the pool's
/// prefix.
///
/// Every ring is a hint: whoever is woken asks the store, and what counts is the answer. So a ring too
/// many costs a request, and one that is missed costs time until the next regular look. None blocks.
#[derive(Clone)]
pub struct Bell(Arc<dyn Ear>);

impl Bell {
    pub(crate) fn of_pool(queue: &Arc<Queue>, watchdog: &Arc<Watchdog>, clock: Clock) -> Self {
        let (queue, watchdog) = (Arc::downgrade(queue), Arc::downgrade(watchdog));
        Self(Arc::new(PoolEar { queue, watchdog, clock }))
    }

    #[cfg(any(feature = "testing", feature = "redis"))]
    pub(crate) fn new(ear: impl Ear + 'static) -> Self {
        Self(Arc::new(ear))
    }

    /// `key` may have been freed, or taken away from its holder.
    pub fn changed(&self, key: &str) {
        self.0.changed(key);
    }

    /// Any key may have been freed or taken away: the connection was down, or the store was emptied.
    pub fn all_changed(&self) {
        self.0.all_changed();
    }

    /// The owner that stands in the store's line for `key` has the lock; or, if `within` is not zero, is
    /// next, and has it after that time at the latest. False if this pool does not know the owner any
    /// more; the store then has to call somebody else.
    #[must_use]
    pub fn called(&self, key: &str, owner: &Owner, within: Duration) -> bool {
        self.0.called(key, owner, within)
    }

    /// Others wait for `key`, which this pool holds.
    pub fn wanted(&self, key: &str) {
        self.0.wanted(key);
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").finish_non_exhaustive()
    }
}

/// Who listens to a bell.
pub(crate) trait Ear: Send + Sync {
    fn changed(&self, key: &str);
    fn all_changed(&self);
    fn called(&self, key: &str, owner: &Owner, within: Duration) -> bool;
    fn wanted(&self, key: &str);
}

/// Wakes who waits for a key, and has the watchdog look after who holds it.
struct PoolEar {
    queue: Weak<Queue>,
    watchdog: Weak<Watchdog>,
    clock: Clock,
}

impl Ear for PoolEar {
    fn changed(&self, key: &str) {
        let Some(queue) = self.queue.upgrade() else { return };
        if let (Some(holder), Some(watchdog)) = (queue.stir(key), self.watchdog.upgrade()) {
            watchdog.hurry(&holder, self.clock.now());
        }
    }

    fn all_changed(&self) {
        let (Some(queue), Some(watchdog)) = (self.queue.upgrade(), self.watchdog.upgrade()) else {
            return;
        };
        let now = self.clock.now();
        for holder in queue.stir_all() {
            watchdog.hurry(&holder, now);
        }
    }

    fn called(&self, key: &str, owner: &Owner, within: Duration) -> bool {
        let by = self.clock.now() + within;
        self.queue.upgrade().is_some_and(|queue| queue.call(key, owner, by))
    }

    fn wanted(&self, key: &str) {
        if let Some(queue) = self.queue.upgrade() {
            queue.want(key);
        }
    }
}
