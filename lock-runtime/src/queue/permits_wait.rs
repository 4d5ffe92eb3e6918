//! Waits for the permits of several keys: all of them in one step, or none.
//!
//! 1. **One position at a time.** A request waits in the queue of one key that it cannot have: the key with the permit
//!    that has been out the longest. So it keeps no key from other tasks. Its rank in each queue is its order of arrival.
//! 2. **It moves on.** If another key is missing when its turn comes, the request moves to the queue of that key. The next
//!    waiter gets the permit.
//! 3. **It reserves keys, for a while.** A request that has waited for [`RESERVE_AFTER`] reserves a free permit against
//!    later ranks, then the next missing one. So keys that are never free at the same time are served in the end. When the
//!    reservation ends, all permits are free again, and stay unreserved for as long as they were reserved. The time doubles
//!    with each reservation that fails.
//! 4. **The earlier rank wins.** A permit that is reserved for a later rank is free for an earlier one. So no two
//!    requests wait for each other.

use std::sync::Arc;
use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::exec::driver::Driver;
use crate::queue::key_queue::{
    KeyQueue, PermitsReply, PermitsWait, QueueEntry, StepwiseRequest, WaitFor, Waiter,
};
use crate::queue::last_answer::{LastAnswer, WaitEnd};
use crate::queue::permit::Attached;
use crate::queue::wait_params::WaitParams;
use crate::queue::wait_queue::{AfterPass, Queues, WaitQueues, full};
use crate::queue::wake_signal::WakeSignal;

/// How long a request waits before it reserves a key against later ranks.
const RESERVE_AFTER: Duration = Duration::from_millis(10);

fn reserve_after() -> Duration {
    // Clocks stand still under the test scheduler.
    #[cfg(test)]
    if crate::base::sync::scheduler::by_chance() {
        return Duration::ZERO;
    }
    RESERVE_AFTER
}

impl<W: Waiter> WaitQueues<W> {
    /// The rank of a new request for several keys.
    pub(crate) fn rank(&self) -> u64 {
        let mut queues = self.lock();
        queues.last_id += 1;
        queues.last_id
    }

    /// Requests the permits of all `keys` together. Returns whether the caller has them; otherwise `reply` receives them
    /// later. `wake` is notified when [`reservation_ends_at`](Self::reservation_ends_at) changes. With `again` the request
    /// has had its permits before, and `max_waiters` does not count.
    ///
    /// # Errors
    /// Same as [`enqueue`](Self::enqueue).
    pub(crate) fn enqueue_for_permits(
        &self,
        id: u64,
        keys: &Arc<[Key]>,
        params: &WaitParams,
        wake: &Arc<WakeSignal>,
        reply: PermitsReply,
        again: bool,
    ) -> Result<bool, LockError> {
        let mut queues = self.lock();
        if queues.closed {
            return Err(LockError::pool_closed());
        }
        let now = self.clock.now();
        let Some(at) = queues.missing(id, keys, None) else {
            queues.take(id, keys, now);
            return Ok(true);
        };
        let WaitParams { since, deadline, end } = *params;
        let key = &keys[at];
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(queues.wait_error(key, end, now));
        }
        let Some(queue) = queues.by_key.get_mut(key) else {
            return Err(Driver::stopped_error());
        };
        if !again && queue.entry_count() >= self.max_waiters {
            return Err(full());
        }
        let wait_for = WaitFor::Permits(Box::new(PermitsWait {
            keys: keys.clone(),
            end,
            reply,
            wake: wake.clone(),
            reserved_since: None,
            failures: 0,
            reserve_from: since + reserve_after(),
        }));
        queue.add(QueueEntry { id, since, deadline, attempts: 0, wait_for });
        queues.positions.insert(id, key.clone());
        Ok(false)
    }

    /// When the permits that are reserved for the request are free again, if some are.
    pub(crate) fn reservation_ends_at(&self, id: u64) -> Option<Instant> {
        let queues = self.lock();
        let key = queues.positions.get(&id)?;
        match &queues.by_key.get(key)?.entry(id)?.wait_for {
            WaitFor::Permits(wait) => wait.reservation_ends_at(),
            WaitFor::Lock(_) => None,
        }
    }

    /// Ends the reservation of the request. Its keys stay unreserved for as long as they were reserved.
    pub(crate) fn end_reservation(&self, id: u64) -> Vec<AfterPass> {
        let now = self.clock.now();
        let mut queues = self.lock();
        let Queues { by_key, positions, .. } = &mut *queues;
        let Some(queue) = positions.get(&id).and_then(|key| by_key.get_mut(key)) else {
            return Vec::new();
        };
        let Some(WaitFor::Permits(wait)) = queue.entry_mut(id).map(|entry| &mut entry.wait_for)
        else {
            return Vec::new();
        };
        let Some(since) = wait.reserved_since.take() else { return Vec::new() };
        let unreserved_until = now + now.since(since);
        wait.failures += 1;
        wait.reserve_from = unreserved_until;
        let keys = wait.keys.clone();
        queues.unreserve(id, &keys, Some(unreserved_until));
        let after = queues.give_out_free(&keys);
        #[cfg(test)]
        queues.check();
        after
    }

    /// Removes a request that stopped waiting for its permits.
    pub(crate) fn cancel_permits_wait(&self, id: u64) -> Vec<AfterPass> {
        let mut queues = self.lock();
        let Some(entry) = queues.remove_permits_wait(id) else { return Vec::new() };
        let WaitFor::Permits(wait) = &entry.wait_for else { return Vec::new() };
        let after = queues.give_out_free(&wait.keys);
        #[cfg(test)]
        queues.check();
        drop(queues);
        after
    }

    /// Takes the permits of `keys` that are free.
    pub(crate) fn take_free(&self, keys: &[Key]) -> Vec<Key> {
        let now = self.clock.now();
        let mut queues = self.lock();
        let mut take = |key: &&Key| {
            let Some(queue) = queues.by_key.get_mut(*key) else {
                queues.by_key.insert((*key).clone(), KeyQueue::taken(now));
                return true;
            };
            let is_open = queue.is_open();
            if is_open {
                queue.give_out(now);
            }
            is_open
        };
        keys.iter().filter(&mut take).cloned().collect()
    }

    /// The request `id` sends requests for any of `keys` under `owner` from now on. `wake` is notified when the store
    /// says something about one of them.
    pub(crate) fn register(&self, keys: &[Key], id: u64, owner: Owner, wake: &Arc<WakeSignal>) {
        let since = self.clock.now();
        let mut queues = self.lock();
        for key in keys {
            let queue = queues.by_key.entry(key.clone()).or_default();
            queue.permit.end_linger();
            match queue.registered_mut().iter_mut().find(|entry| entry.id == id) {
                Some(entry) => entry.owner = owner,
                None => {
                    let (wake, contended) = (wake.clone(), false);
                    queue.register(StepwiseRequest { id, since, owner, wake, contended });
                }
            }
        }
    }

    /// The request `id` sends no more requests.
    fn deregister(&self, keys: &[Key], id: u64) {
        // A fork may have copied the mutex while it was locked.
        if !self.process.is_current() {
            return;
        }
        let mut queues = self.lock();
        for key in keys {
            if let Some(queue) = queues.by_key.get_mut(key) {
                queue.deregister(id);
            }
            queues.remove_if_vacant(key);
        }
    }

    /// Whether others wait for one of `keys`, which the request `id` holds at the store: other processes, or tasks of
    /// this process.
    pub(crate) fn is_contended<'a>(
        &self,
        mut keys: impl Iterator<Item = &'a Key>,
        id: u64,
    ) -> bool {
        let queues = self.lock();
        keys.any(|key| {
            queues.by_key.get(key).is_some_and(|queue| {
                queue.entry_count() > 0
                    || queue.registered().iter().any(|entry| entry.id == id && entry.contended)
            })
        })
    }

    /// The request `id` has released `keys` at the store.
    pub(crate) fn clear_contended<'a>(&self, keys: impl Iterator<Item = &'a Key>, id: u64) {
        let mut queues = self.lock();
        for key in keys {
            if let Some(queue) = queues.by_key.get_mut(key) {
                queue
                    .registered_mut()
                    .iter_mut()
                    .filter(|entry| entry.id == id)
                    .for_each(|entry| entry.contended = false);
            }
        }
    }

    /// The error of a wait for permits that ends at `now`.
    pub(crate) fn permits_wait_error(&self, id: u64, end: WaitEnd, now: Instant) -> LockError {
        let queues = self.lock();
        match queues.positions.get(&id) {
            Some(key) => queues.wait_error(key, end, now),
            None => LastAnswer::default().wait_error(end, now, queues.last_failure.as_ref()),
        }
    }

    /// Ends all reservations.
    #[cfg(test)]
    pub(crate) fn end_all_reservations(&self) -> Vec<AfterPass> {
        let ids: Vec<_> = self.lock().positions.keys().copied().collect();
        ids.into_iter().flat_map(|id| self.end_reservation(id)).collect()
    }
}

impl<W: Waiter> Queues<W> {
    /// Removes a request for several keys, and ends its reservation. The caller settles its keys.
    pub(super) fn remove_permits_wait(&mut self, id: u64) -> Option<QueueEntry<W>> {
        let key = self.positions.remove(&id)?;
        let entry = self.remove(&key, id)?;
        if let WaitFor::Permits(wait) = &entry.wait_for {
            self.unreserve(id, &wait.keys, None);
        }
        Some(entry)
    }

    /// The key of `keys` that a request of rank `id` has to wait for. Of those that it cannot have, it is the one that has
    /// been out the longest, and so most likely stays out the longest. `given` is a key that it gets now.
    fn missing(&self, id: u64, keys: &[Key], given: Option<&Key>) -> Option<usize> {
        let missing = keys.iter().enumerate().filter_map(|(at, key)| {
            let queue = self.by_key.get(key)?;
            if given == Some(key) {
                return None;
            }
            queue.missing_since(id).map(|since| (since, at))
        });
        missing.min().map(|(_, at)| at)
    }

    /// The permits of all `keys` go out to the request `id`.
    fn take(&mut self, id: u64, keys: &[Key], now: Instant) {
        for key in keys {
            match self.by_key.get_mut(key) {
                Some(queue) => {
                    queue.permit.go_out(now);
                    if queue.reserved_for() == Some(id) {
                        queue.unreserve();
                    }
                }
                None => {
                    let mut queue = KeyQueue::taken(now);
                    queue.last_answer = LastAnswer::None;
                    self.by_key.insert(key.clone(), queue);
                }
            }
        }
    }

    /// The permits that the request `id` waits for, at the head of the queue of `key`, are free for it.
    pub(super) fn take_for_waiter(&mut self, key: &Key, id: u64) -> Option<AfterPass> {
        self.positions.remove(&id);
        match self.by_key.get_mut(key)?.remove(id)?.wait_for {
            WaitFor::Permits(wait) => {
                let PermitsWait { keys, reply, .. } = *wait;
                self.take(id, &keys, self.clock.now());
                Some(AfterPass::Permits(keys, reply))
            }
            WaitFor::Lock(_) => None,
        }
    }

    /// None of `keys` is reserved for the request `id` any more, nor for another request before `unreserved_until`.
    pub(super) fn unreserve(&mut self, id: u64, keys: &[Key], unreserved_until: Option<Instant>) {
        for key in keys {
            if let Some(queue) = self.by_key.get_mut(key)
                && queue.reserved_for() == Some(id)
            {
                queue.unreserve_until(unreserved_until);
            }
        }
    }

    /// The entry that gets the permit of `key` if it is free, which is the [`head`](KeyQueue::head) then. Requests for several
    /// keys that come before it and miss another key move on.
    pub(super) fn next_candidate(&mut self, key: &Key) -> Option<u64> {
        loop {
            let queue = self.by_key.get_mut(key)?;
            let entry = queue.head()?;
            let id = entry.id;
            let WaitFor::Permits(wait) = &entry.wait_for else { return Some(id) };
            let keys = wait.keys.clone();
            match self.missing(id, &keys, Some(key)) {
                None => return Some(id),
                Some(at) => self.move_on(id, key, &keys[at], self.clock.now())?,
            }
        }
    }

    /// The request `id`, at the head of the queue of `key`, waits for `missing` from now on. It may reserve `key`
    /// meanwhile.
    fn move_on(&mut self, id: u64, key: &Key, missing: &Key, now: Instant) -> Option<()> {
        let queue = self.by_key.get_mut(key)?;
        let mut entry = queue.remove(id)?;
        if let WaitFor::Permits(wait) = &mut entry.wait_for
            && wait.reserve_from <= now
            && queue.is_reservable(id, now)
        {
            queue.reserve(id);
            if wait.reserved_since.is_none() {
                wait.reserved_since = Some(now);
                wait.wake.notify();
            }
            if let Some(queue) = self.by_key.get_mut(missing)
                && queue.is_reservable(id, now)
            {
                queue.reserve(id);
            }
        }
        self.positions.insert(id, missing.clone());
        self.by_key.get_mut(missing)?.add(entry);
        Some(())
    }

    /// Fails if an invariant of [`wait_queue`](crate::queue::wait_queue) does not hold.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for (key, queue) in &self.by_key {
            if queue.permit.is_free() {
                let are_later = |rank| queue.entries().all(|entry| rank < entry.id);
                let is_right = queue.reserved_for().map_or(queue.entry_count() == 0, are_later);
                assert!(is_right, "{key} has a free permit and waiters");
            }
            if let Some(rank) = queue.reserved_for() {
                assert!(self.positions.contains_key(&rank), "{key} is reserved for no request");
            }
        }
        for (id, key) in &self.positions {
            let entry = self.by_key.get(key).and_then(|queue| queue.entry(*id));
            let is_right = entry.is_some_and(|entry| !entry.wait_for.is_lock());
            assert!(is_right, "{key} is a position without its entry");
        }
        let permits_waits =
            |queue: &KeyQueue<W>| queue.entries().filter(|entry| !entry.wait_for.is_lock()).count();
        assert_eq!(self.by_key.values().map(permits_waits).sum::<usize>(), self.positions.len());
    }
}

/// The registration of a request for several keys in all their queues, while it sends requests and while it holds the
/// lock. Dropping it removes the request from them.
#[derive(Debug)]
pub(crate) struct Registration<W: Waiter> {
    pub(crate) queues: Arc<WaitQueues<W>>,
    pub(crate) keys: Arc<[Key]>,
    pub(crate) id: u64,
}

impl<W: Waiter + std::fmt::Debug + Send> Attached for Registration<W> {}

impl<W: Waiter> Drop for Registration<W> {
    fn drop(&mut self) {
        self.queues.deregister(&self.keys, self.id);
    }
}

#[cfg(test)]
mod tests;
