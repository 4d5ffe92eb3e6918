//! Locks that linger: their leases have no holder, and are taken by the next request of the process.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::queue::key_queue::{Holder, KeyQueue, Linger, Waiter};
use crate::queue::wait_queue::WaitQueues;

impl<W: Waiter> WaitQueues<W> {
    /// Another lease of this process holds the lock under the same grant.
    pub(crate) fn transfer_holder(&self, key: &Key, holder: Holder) {
        if let Some(queue) = self.lock().by_key.get_mut(key) {
            queue.set_holder(holder);
        }
    }

    /// Whether the lock of `key` may stay with the process unused: nothing waits for it, and no barging window is due. If the
    /// store does not say whether other processes wait, the hold must have begun soon after the grant (`is_recent`).
    pub(crate) fn may_linger(
        &self,
        key: &Key,
        is_recent: bool,
        barging_interval: Option<Duration>,
        now: Instant,
    ) -> bool {
        let queues = self.lock();
        let may_linger = |queue: &KeyQueue<W>| {
            queue.may_linger(is_recent) && !queue.is_barging_due(barging_interval, now)
        };
        !queues.closed && queues.by_key.get(key).is_some_and(may_linger)
    }

    /// The lock of `key` lingers from now on, until `until`. `false` if something waits for it by now. As in
    /// [`may_linger`](Self::may_linger), the hold may have to be recent.
    pub(crate) fn begin_linger(&self, key: &Key, is_recent: bool, until: Instant) -> bool {
        let mut queues = self.lock();
        let queues = &mut *queues;
        let Some(queue) = queues.by_key.get_mut(key).filter(|queue| queue.may_linger(is_recent))
        else {
            return false;
        };
        if queues.closed {
            return false;
        }
        queues.last_id += 1;
        let linger =
            Linger { key: key.clone(), until, id: queues.last_id, timers: self.lingers.clone() };
        linger.set_timer();
        queue.linger = Some(Box::new(linger));
        true
    }

    /// Ends the linger of `key`, even before its time. `false` if the lock does not linger.
    pub(crate) fn end_linger(&self, key: &Key) -> bool {
        let mut queues = self.lock();
        let linger = queues.by_key.get_mut(key).and_then(|queue| queue.linger.take());
        linger.inspect(|linger| linger.remove_timer()).is_some()
    }

    /// Waits for the timers of lingers. Returns each key, and whether its linger is over, and was ended by this call: the
    /// caller releases the lock. Cancel safe.
    pub(crate) async fn lingered(&self) -> Vec<(Key, bool)> {
        self.lingers.due(self.clock).await;
        let now = self.clock.now();
        let due = self.lingers.take_until(now);
        let mut queues = self.lock();
        // The time of an earlier linger may be over, and that of a later one not.
        let mut is_over = |key: &Key| {
            let queue = queues.by_key.get_mut(key);
            queue.is_some_and(|queue| queue.linger.take_if(|it| it.until <= now).is_some())
        };
        due.into_iter().map(|key| (key.clone(), is_over(&key))).collect()
    }
}
