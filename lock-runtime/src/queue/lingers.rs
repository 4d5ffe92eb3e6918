//! Locks that linger: their leases have no holder, and are taken by the next request of the process.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::queue::key_queue::{KeyQueue, Waiter};
use crate::queue::permit_state::{Holder, Linger};
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
        !queues.lingers_ended && queues.by_key.get(key).is_some_and(may_linger)
    }

    /// The lock of `key` lingers from now on, until `until`, with the tracked lease of this number. `false` if something waits for
    /// it by now, or the lease no longer holds it. As in [`may_linger`](Self::may_linger), the hold may have to be recent.
    pub(crate) fn begin_linger(
        &self,
        key: &Key,
        lease: u64,
        is_recent: bool,
        until: Instant,
    ) -> bool {
        let mut queues = self.lock();
        let queues = &mut *queues;
        let may_linger = |queue: &&mut KeyQueue<W>| {
            queue.permit.is_held_by(lease) && queue.may_linger(is_recent)
        };
        let Some(queue) = queues.by_key.get_mut(key).filter(may_linger) else { return false };
        if queues.lingers_ended {
            return false;
        }
        queues.last_id += 1;
        let linger = Linger::new(key.clone(), until, queues.last_id, self.lingers.clone());
        queue.permit.begin_linger(linger);
        true
    }

    /// Ends the linger of `key`, even before its time. The caller has to release or transfer the lease of this number. `None` if
    /// the lock does not linger.
    pub(crate) fn end_linger(&self, key: &Key) -> Option<u64> {
        self.lock().by_key.get_mut(key)?.permit.take_linger()
    }

    /// Like [`end_linger`](Self::end_linger), for all keys. No later linger begins.
    pub(crate) fn end_all_lingers(&self) -> Vec<u64> {
        let mut queues = self.lock();
        queues.lingers_ended = true;
        queues.by_key.values_mut().filter_map(|queue| queue.permit.take_linger()).collect()
    }

    /// Waits for the ends of lingers, by their time or because something waits. Otherwise like
    /// [`end_linger`](Self::end_linger). Cancel safe.
    pub(crate) async fn lingered(&self) -> Vec<u64> {
        self.lingers.due(self.clock).await;
        let now = self.clock.now();
        let due = self.lingers.take_until(now);
        let mut queues = self.lock();
        // The time of an earlier linger may be over, and that of a later one not.
        let mut end = |key: Key| {
            let permit = &mut queues.by_key.get_mut(&key)?.permit;
            if permit.has_lingered(now) { permit.take_linger() } else { None }
        };
        due.into_iter().filter_map(&mut end).collect()
    }
}
