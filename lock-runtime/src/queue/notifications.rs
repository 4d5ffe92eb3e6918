//! What the store reports about keys, without a request for them.

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::queue::key_queue::{KeyQueue, Waiter};
use crate::queue::wait_queue::WaitQueues;

impl<W: Waiter> WaitQueues<W> {
    /// `key` may have changed in the store: wakes its waiters, and returns it with the number of the lease that this process
    /// holds.
    pub(crate) fn wake(&self, key: &str) -> Option<(Key, u64)> {
        let mut queues = self.lock();
        queues.by_key.get_mut(key)?.wake();
        let (key, queue) = queues.by_key.get_key_value(key)?;
        Some((key.clone(), queue.permit.holder()?.lease))
    }

    /// Any key may have changed; otherwise like [`wake`](Self::wake).
    pub(crate) fn wake_all(&self) -> Vec<(Key, u64)> {
        let mut queues = self.lock();
        let wake = |(key, queue): (&Key, &mut KeyQueue<W>)| {
            queue.wake();
            // The notification of a waiter may have been missed.
            queue.mark_contended();
            Some((key.clone(), queue.permit.holder()?.lease))
        };
        queues.by_key.iter_mut().filter_map(wake).collect()
    }

    /// The number of the lease of this process that holds `key`.
    pub(crate) fn holder(&self, key: &Key) -> Option<u64> {
        Some(self.lock().by_key.get(key)?.permit.holder()?.lease)
    }

    /// `owner` is first in the store's wait queue: it has the lock no later than `by`. `false` if no request of this
    /// process has that owner token.
    pub(crate) fn promote(&self, key: &str, owner: &Owner, by: Instant) -> bool {
        let mut queues = self.lock();
        let Some(queue) = queues.by_key.get_mut(key) else { return false };
        if queue.permit.requests_owner() == Some(*owner) {
            queue.request_by(by);
            return true;
        }
        if let Some(entry) = queue.registered().iter().find(|entry| entry.owner == *owner) {
            entry.wake.request_by(by);
            return true;
        }
        // The holder needs no notification, and keeps the lock.
        queue.permit.holder().is_some_and(|holder| holder.owner == *owner)
    }

    /// Other processes wait for `key`.
    pub(crate) fn mark_contended(&self, key: &str) {
        if let Some(queue) = self.lock().by_key.get_mut(key) {
            queue.mark_contended();
        }
    }
}
