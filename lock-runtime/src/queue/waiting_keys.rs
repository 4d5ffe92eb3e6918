//! The keys that tasks of this process wait for.

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::queue::key_queue::Waiter;
use crate::queue::wait_queue::WaitQueues;

/// A key, as the store knows it, and the waits for it.
#[derive(Debug)]
pub(crate) struct KeyWaits {
    pub(crate) key: Key,
    /// How many entries its queue has.
    pub(crate) queued: usize,
    /// When the first of these waits began.
    pub(crate) since: Option<Instant>,
    /// Requests for several keys that ask the store for this one, or hold it by now: since when, and under which token.
    pub(crate) requests: Vec<(Instant, Owner)>,
}

impl<W: Waiter> WaitQueues<W> {
    /// All keys with waits. One pass over the keys of the process, which copies only what has waits.
    pub(crate) fn waits(&self) -> Vec<KeyWaits> {
        let queues = self.lock();
        let with_waits = queues
            .by_key
            .iter()
            .filter(|(_, queue)| queue.entry_count() > 0 || !queue.registered().is_empty());
        let waits = with_waits.map(|(key, queue)| KeyWaits {
            key: key.clone(),
            queued: queue.entry_count(),
            // Ranks are in the order of arrival.
            since: queue.entries().next().map(|entry| entry.since),
            requests: queue.registered().iter().map(|it| (it.since, it.owner)).collect(),
        });
        waits.collect()
    }
}
