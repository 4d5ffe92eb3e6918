//! FIFO wait queues, one per key, for the tasks of this process.
//!
//! The owner of a key's [`KeyPermit`](crate::queue::permit::KeyPermit) sends the requests for this one key to the store, holds
//! the lock and releases it. All other tasks wait in the queue. This module does no I/O. Requests for several keys wait as
//! described in [`permits_wait`](crate::queue::permits_wait). One that waits at the store sends its own requests.
//!
//! Invariants, whenever the queues are unlocked: at most one permit per key is out. A waiter is in a queue whose permit
//! is out, or reserved for an earlier rank. A free permit that is not reserved has no waiters. A waiter leaves its queue
//! once: granted, rejected or cancelled.

use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;

use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::error::{ErrorKind, LockError};
use crate::base::fence::ExpectedHolders;
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::base::process::Process;
use crate::base::sync::{Mutex, MutexGuard};
use crate::exec::timer_queue::TimerQueue;
use crate::queue::key_queue::{Contention, KeyQueue, PermitsReply, QueueEntry, WaitFor, Waiter};
use crate::queue::last_answer::{LastAnswer, WaitEnd};
use crate::queue::permit_state::Holder;
use crate::queue::wait_params::WaitParams;
use crate::queue::wake_signal::WakeSignal;

/// The wait queues of a pool.
#[derive(Debug)]
pub(crate) struct WaitQueues<W> {
    queues: Mutex<Queues<W>>,
    pub(super) clock: Clock,
    /// Waiters by their deadlines.
    deadlines: TimerQueue<(Key, u64)>,
    /// Keys whose lock lingers, by its end.
    pub(super) lingers: Arc<TimerQueue<Key>>,
    pub(super) max_waiters: usize,
    /// The process of the pool.
    pub(crate) process: Process,
}

#[derive(Debug)]
pub(super) struct Queues<W> {
    /// A call looks its key up several times, so the hash is a quick one, with a random seed. Entries stay only while their
    /// key is in use.
    pub(super) by_key: HashMap<Key, KeyQueue<W>>,
    /// The queue that each request for several keys waits in.
    pub(super) positions: HashMap<u64, Key>,
    /// The last failure of any key, until the store answers again.
    pub(super) last_failure: Option<BackendError>,
    pub(super) last_id: u64,
    pub(super) closed: bool,
    /// No lock lingers any more.
    pub(super) lingers_ended: bool,
    pub(super) clock: Clock,
}

/// The position of a new waiter.
#[derive(Debug)]
pub(crate) enum Enqueued<W> {
    /// The queue was empty: the caller has the permit, and the waiter comes back.
    Head(W),
    /// The lock has lingered in this process. The caller takes the lease of this number, and the waiter comes back.
    Lingering(W, u64),
    Queued,
}

/// What follows for keys whose permits were dropped.
#[derive(Debug)]
pub(crate) enum AfterPass {
    /// The permit of this single key goes to a task that sends requests for its queue.
    Queue(Arc<[Key]>),
    /// The permits of these keys go to a request for all of them.
    Permits(Arc<[Key]>, PermitsReply),
}

/// What the release of a lock leads to in its queue.
#[derive(Clone, Debug)]
pub(crate) enum AfterRelease {
    NoWaiter,
    /// The lock is left free for clients that are in no queue.
    BargingWindow,
    /// The next waiter of this process asks for this.
    Successor(Arc<LockSpec>),
}

/// The first waiter of a queue, for the task that sends requests on its behalf.
#[derive(Debug)]
pub(crate) struct HeadInfo {
    pub(crate) id: u64,
    pub(crate) spec: Arc<LockSpec>,
    pub(crate) deadline: Option<Instant>,
    /// How many holders are expected to follow under the same grant.
    pub(crate) successors: usize,
}

impl<W: Waiter> WaitQueues<W> {
    pub(crate) fn new(max_waiters: usize, clock: Clock) -> Self {
        let queues = Queues {
            by_key: HashMap::default(),
            positions: HashMap::default(),
            last_failure: None,
            last_id: 0,
            closed: false,
            lingers_ended: false,
            clock,
        };
        Self {
            queues: Mutex::new(queues),
            clock,
            deadlines: TimerQueue::default(),
            lingers: Arc::default(),
            max_waiters,
            process: Process::current(),
        }
    }

    /// Appends `waiter` to the queue of `key`.
    ///
    /// # Errors
    /// `QueueFull` if `max_waiters` entries are queued, `PoolClosed` after [`close`](Self::close), and the error of a wait
    /// that ends immediately.
    pub(crate) fn enqueue(
        &self,
        key: &Key,
        params: &WaitParams,
        waiter: W,
    ) -> Result<(u64, Enqueued<W>), LockError> {
        let mut queues = self.lock();
        if queues.closed {
            return Err(LockError::pool_closed());
        }
        queues.last_id += 1;
        let id = queues.last_id;
        let WaitParams { since: now, deadline, end } = *params;
        let Some(queue) = queues.by_key.get_mut(key) else {
            queues.by_key.insert(key.clone(), KeyQueue::taken(now));
            return Ok((id, Enqueued::Head(waiter)));
        };
        if queue.is_open() {
            queue.give_out(now);
            return Ok((id, Enqueued::Head(waiter)));
        }
        if let Some(lease) = queue.permit.take_linger() {
            return Ok((id, Enqueued::Lingering(waiter, lease)));
        }
        if deadline.is_some_and(|deadline| deadline <= now) {
            return Err(queues.wait_error(key, end, now));
        }
        if queue.entry_count() >= self.max_waiters {
            return Err(full());
        }
        let wait_for = WaitFor::Lock(waiter);
        queue.add(QueueEntry { id, since: now, deadline, attempts: 0, wait_for });
        self.insert_deadline(key, id, deadline);
        Ok((id, Enqueued::Queued))
    }

    /// Inserts a waiter whose first request was refused at its rank, unless it was cancelled meanwhile.
    pub(crate) fn insert_at_rank(&self, key: &Key, entry: QueueEntry<W>) {
        let mut queues = self.lock();
        if queues.closed {
            drop(queues);
            return entry.wait_for.reject(LockError::pool_closed());
        }
        // A cancelled waiter takes this lock after its receiver is closed.
        if entry.wait_for.is_cancelled() {
            return;
        }
        let (id, deadline) = (entry.id, entry.deadline);
        queues.queue_of_permit(key).add(entry);
        self.insert_deadline(key, id, deadline);
    }

    /// Removes a waiter that stopped waiting.
    pub(super) fn cancel(&self, key: &Key, id: u64) {
        let mut queues = self.lock();
        let Some(entry) = queues.remove(key, id) else { return };
        drop(queues);
        self.remove_deadline(&entry);
    }

    /// The permits of `keys` were dropped.
    pub(crate) fn pass(&self, keys: &[Key]) -> Vec<AfterPass> {
        let mut queues = self.lock();
        if let [key] = keys
            && let Some((key, queue)) = queues.by_key.remove_entry(key)
        {
            // The usual case.
            if queue.has_no_waiters() {
                return Vec::new();
            }
            queues.by_key.insert(key, queue);
        }
        for key in keys {
            if let Some(queue) = queues.by_key.get_mut(key) {
                queue.on_permit_dropped();
                if queue.is_vacant() {
                    queues.by_key.remove(key);
                }
            }
        }
        let after = queues.give_out_free(keys);
        #[cfg(test)]
        queues.check();
        after
    }

    /// Rejects all waiters of `keys`, and frees their permits: no request can be sent for them. A request for several keys
    /// that moves here meanwhile has the permits next. If it cannot use them, they come back as they drop.
    pub(crate) fn reject_all(&self, keys: &[Key], error: &LockError) -> Vec<AfterPass> {
        let mut rejected = Vec::new();
        let mut after = Vec::new();
        let mut queues = self.lock();
        for key in keys {
            let Some(queue) = queues.by_key.get_mut(key) else { continue };
            for (id, entry) in queue.take_entries() {
                if let WaitFor::Permits(wait) = &entry.wait_for {
                    queues.positions.remove(&id);
                    queues.unreserve(id, &wait.keys, None);
                    after.extend(queues.give_out_free(&wait.keys));
                }
                rejected.push((entry, error.clone()));
            }
            if let Some(queue) = queues.by_key.get_mut(key) {
                queue.on_permit_dropped();
            }
        }
        after.extend(queues.give_out_free(keys));
        #[cfg(test)]
        queues.check();
        self.reject(queues, rejected);
        after
    }

    /// The first waiter for the lock, if its turn has come. Counts a request for it.
    pub(crate) fn begin_request(&self, key: &Key) -> Option<HeadInfo> {
        let mut queues = self.lock();
        let id = queues.next_candidate(key)?;
        let queue = queues.by_key.get_mut(key)?;
        let successors = queue.expected_successors();
        let entry = queue.entry_mut(id)?;
        let WaitFor::Lock(waiter) = &entry.wait_for else { return None };
        entry.attempts += 1;
        Some(HeadInfo { id, spec: waiter.spec().clone(), deadline: entry.deadline, successors })
    }

    /// Whether a waiter for the lock is next.
    pub(crate) fn has_waiter(&self, key: &Key) -> bool {
        self.lock().next_for_lock(key).is_some()
    }

    /// Removes the waiter `id`; if it is gone, the first waiter for the lock that `fits`.
    pub(crate) fn take_head(
        &self,
        key: &Key,
        id: u64,
        fits: impl FnOnce(&LockSpec) -> bool,
    ) -> Option<QueueEntry<W>> {
        let mut queues = self.lock();
        let is_here = queues.by_key.get(key).is_some_and(|queue| queue.entry(id).is_some());
        let id = if is_here {
            id
        } else {
            let first = queues.next_candidate(key)?;
            let waiter = queues.by_key.get(key)?.lock_head()?;
            if !fits(waiter.spec()) {
                return None;
            }
            first
        };
        let entry = queues.by_key.get_mut(key)?.remove(id)?;
        drop(queues);
        self.remove_deadline(&entry);
        Some(entry)
    }

    /// Removes the first waiter for the lock if `transfer` makes it the next holder, in one step. `transfer` receives
    /// whether other processes wait for the lock, and the time. Without a waiter the clock is not read. `None` if the lock
    /// has to be left free; see [`begin_release`](Self::begin_release).
    pub(crate) fn hand_off<T>(
        &self,
        key: &Key,
        barging_interval: Option<Duration>,
        now: impl FnOnce() -> Instant,
        transfer: impl FnOnce(&LockSpec, bool, Instant) -> Option<(Holder, T)>,
    ) -> Option<(QueueEntry<W>, Holder, T)> {
        let mut queues = self.lock();
        let mut queue = queues.by_key.get_mut(key)?;
        if queue.lock_head().is_none() {
            queues.next_candidate(key)?;
            queue = queues.by_key.get_mut(key)?;
        }
        let waiter = queue.lock_head()?;
        let now = now();
        if queue.is_barging_due(barging_interval, now) {
            return None;
        }
        let (holder, next) = transfer(waiter.spec(), queue.contention != Contention::None, now)?;
        let entry = queue.remove_first()?;
        queue.set_holder(holder);
        drop(queues);
        self.remove_deadline(&entry);
        Some((entry, holder, next))
    }

    /// A lease of this process, with the permits of `keys`, holds them, by an answer of the store.
    pub(crate) fn set_holder(&self, keys: &[Key], holder: Holder, contention: Contention) {
        let mut queues = self.lock();
        queues.last_failure = None;
        for key in keys {
            let Some(queue) = queues.by_key.get_mut(key) else { continue };
            // A notification that arrived meanwhile is newer than the answer.
            queue.contention = queue.contention.max(contention);
            queue.set_holder(holder);
        }
    }

    /// The release of `key`, which has begun, names `owner` as the next one: later requests are sent under it.
    pub(crate) fn name_successor(&self, key: &Key, owner: Owner) -> Arc<WakeSignal> {
        self.lock().queue_of_permit(key).name_successor(owner)
    }

    /// Requests for `key` are sent under `owner` from now on: no lease of this process holds the lock, and no release is in
    /// flight. Returns the signal to send one.
    pub(crate) fn request_as(&self, key: &Key, owner: Owner) -> Arc<WakeSignal> {
        self.lock().queue_of_permit(key).request_as(owner, || self.clock.now())
    }

    /// The lease of this number, with the permits of `keys`, is going to be released.
    pub(crate) fn mark_releasing(&self, keys: &[Key], lease: u64) {
        let mut queues = self.lock();
        for key in keys {
            if let Some(queue) = queues.by_key.get_mut(key) {
                queue.begin_release(lease);
            }
        }
    }

    /// Whether this process releases all of `keys` that are in use, and at least one. Nothing waits for them.
    pub(crate) fn are_being_released(&self, keys: &[Key]) -> bool {
        let queues = self.lock();
        let mut in_use = keys.iter().filter_map(|key| queues.by_key.get(key)).peekable();
        let is_being_released =
            |queue: &KeyQueue<W>| queue.is_being_released() && queue.has_no_other_waiters();
        in_use.peek().is_some() && in_use.all(is_being_released)
    }

    /// The release of the lease of this number, which holds `key`, begins at `now`. Returns what it leads to. If the lock has
    /// not been left free for `barging_interval`, a barging window begins. The next grant is expected to have
    /// `expected_holders`; without waiters the closure is not called.
    pub(crate) fn begin_release(
        &self,
        key: &Key,
        lease: u64,
        barging_interval: Option<Duration>,
        now: Instant,
        expected_holders: impl FnOnce() -> ExpectedHolders,
    ) -> AfterRelease {
        let mut queues = self.lock();
        let Some(queue) = queues.by_key.get_mut(key) else { return AfterRelease::NoWaiter };
        queue.begin_release(lease);
        queue.note_expected_holders(expected_holders);
        if queue.is_barging_due(barging_interval, now) {
            queue.held_since = Some(now);
            return AfterRelease::BargingWindow;
        }
        if queue.has_no_waiters() {
            return AfterRelease::NoWaiter;
        }
        let next = queues.next_for_lock(key);
        next.map_or(AfterRelease::NoWaiter, |waiter| AfterRelease::Successor(waiter.spec().clone()))
    }

    /// The store gave `answer` for `keys`.
    pub(crate) fn record_answer(&self, keys: &[Key], answer: &LastAnswer) {
        let mut queues = self.lock();
        match answer {
            LastAnswer::Held { .. } => queues.last_failure = None,
            // A rejection may be about this key only.
            LastAnswer::Failed(error) if error.kind() != FailureKind::Rejected => {
                queues.last_failure = Some(error.clone());
            }
            LastAnswer::None | LastAnswer::Pending(_) | LastAnswer::Failed(_) => {}
        }
        for key in keys {
            if let Some(queue) = queues.by_key.get_mut(key) {
                queue.last_answer = answer.clone();
            }
        }
    }

    /// Rejects the waiters of `key` that `is_due` picks, with the error of the last answer. `is_due` receives how many
    /// waiters for the lock are in front.
    pub(crate) fn reject_expired(
        &self,
        key: &Key,
        now: Instant,
        is_due: impl Fn(usize, &QueueEntry<W>) -> bool,
    ) -> Vec<AfterPass> {
        let mut queues = self.lock();
        let Some(queue) = queues.by_key.get_mut(key) else { return Vec::new() };
        let mut in_front = 0;
        let mut due = Vec::new();
        for entry in queue.entries() {
            if is_due(in_front, entry) {
                due.push(entry.id);
            }
            in_front += usize::from(entry.wait_for.is_lock());
        }
        let mut rejected = Vec::new();
        let mut after = Vec::new();
        for id in due {
            let entry = if queues.positions.contains_key(&id) {
                queues.remove_permits_wait(id)
            } else {
                queues.by_key.get_mut(key).and_then(|queue| queue.remove(id))
            };
            let Some(entry) = entry else { continue };
            if let WaitFor::Permits(wait) = &entry.wait_for {
                after.extend(queues.give_out_free(&wait.keys));
            }
            let error = queues.wait_error(key, entry.end(), now);
            rejected.push((entry, error));
        }
        // Without waiters the permit passes on immediately, not at the next request.
        if let Some(queue) = queues.by_key.get_mut(key)
            && queue.has_no_waiters()
        {
            queue.wake();
        }
        self.reject(queues, rejected);
        after
    }

    /// The error of a wait for `key` that ends at `now`.
    pub(crate) fn wait_error(&self, key: &Key, end: WaitEnd, now: Instant) -> LockError {
        self.lock().wait_error(key, end, now)
    }

    /// The store has answered.
    pub(crate) fn clear_failure(&self) {
        self.lock().last_failure = None;
    }

    /// The last failure of any key, until the store answers again.
    pub(crate) fn last_failure(&self) -> Option<BackendError> {
        self.lock().last_failure.clone()
    }

    /// Rejects all waiters, and all later ones.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.reject_waiting(&LockError::pool_closed());
    }

    /// Rejects all waiters, even those behind a holder of this process. Later ones may wait again.
    pub(crate) fn reject_waiting(&self, error: &LockError) {
        let mut queues = self.lock();
        queues.positions.clear();
        let mut rejected = Vec::new();
        queues.by_key.retain(|_, queue| {
            let entries = queue.take_entries().into_values();
            rejected.extend(entries.map(|entry| (entry, error.clone())));
            queue.unreserve();
            // What waits at the store sends a request, and ends.
            queue.wake();
            !queue.is_vacant()
        });
        self.reject(queues, rejected);
    }

    /// Rejects waiters whose deadline has passed. Runs on the driver for the life of the pool.
    pub(crate) async fn expire(self: Arc<Self>) {
        loop {
            self.deadlines.due(self.clock).await;
            for (key, id) in self.deadlines.take_until(self.clock.now()) {
                let mut queues = self.lock();
                let Some(entry) = queues.remove(&key, id) else { continue };
                let error = queues.wait_error(&key, entry.end_at_deadline(), self.clock.now());
                drop(queues);
                entry.wait_for.reject(error);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().by_key.is_empty()
    }

    fn insert_deadline(&self, key: &Key, id: u64, deadline: Option<Instant>) {
        if let Some(deadline) = deadline {
            self.deadlines.insert(deadline, id, (key.clone(), id));
        }
    }

    fn remove_deadline(&self, entry: &QueueEntry<W>) {
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(deadline, entry.id);
        }
    }

    /// Unlocks the queues and ends the waits that were removed from them. The end of a wait wakes its task, so it must not happen
    /// under the mutex.
    fn reject(&self, queues: MutexGuard<'_, Queues<W>>, rejected: Vec<(QueueEntry<W>, LockError)>) {
        drop(queues);
        for (entry, error) in rejected {
            self.remove_deadline(&entry);
            entry.wait_for.reject(error);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queues<W>> {
        self.queues.lock()
    }
}

impl<W: Waiter> Queues<W> {
    pub(super) fn wait_error(&self, key: &Key, end: WaitEnd, now: Instant) -> LockError {
        let last_failure = self.last_failure.as_ref();
        match self.by_key.get(key) {
            Some(queue) => queue.wait_error(end, now, last_failure),
            None => LastAnswer::default().wait_error(end, now, last_failure),
        }
    }

    /// The queue of `key`, whose permit the caller has.
    fn queue_of_permit(&mut self, key: &Key) -> &mut KeyQueue<W> {
        self.by_key.entry(key.clone()).or_insert_with(|| KeyQueue::taken(self.clock.now()))
    }

    pub(super) fn remove(&mut self, key: &Key, id: u64) -> Option<QueueEntry<W>> {
        let queue = self.by_key.get_mut(key)?;
        let entry = queue.remove(id)?;
        // Requests are sent for the first waiter for the lock. If this was the first one, the next one is served immediately.
        let is_earlier = |entry: &&QueueEntry<W>| entry.id < id;
        if !queue.entries().take_while(is_earlier).any(|entry| entry.wait_for.is_lock()) {
            queue.wake();
        }
        Some(entry)
    }

    /// The waiter that gets the permit of `key` next, if it waits for the lock.
    fn next_for_lock(&mut self, key: &Key) -> Option<&W> {
        self.next_candidate(key)?;
        self.by_key.get(key)?.lock_head()
    }

    pub(super) fn remove_if_vacant(&mut self, key: &Key) {
        if self.by_key.get(key).is_some_and(KeyQueue::is_vacant) {
            self.by_key.remove(key);
        }
    }

    /// Gives the free permits of `keys` to the entries that wait for them.
    pub(super) fn give_out_free(&mut self, keys: &[Key]) -> Vec<AfterPass> {
        let first = |key: &Key| {
            let first = self.by_key.get(key).and_then(|queue| queue.entries().next());
            first.map_or(u64::MAX, |entry| entry.id)
        };
        let mut order: Vec<_> = keys.iter().map(|key| (first(key), key)).collect();
        order.sort_unstable_by_key(|(rank, _)| *rank);
        order.into_iter().filter_map(|(_, key)| self.give_out_one(key)).collect()
    }

    fn give_out_one(&mut self, key: &Key) -> Option<AfterPass> {
        if !self.by_key.get(key)?.permit.is_free() {
            return None;
        }
        let Some(id) = self.next_candidate(key) else {
            self.remove_if_vacant(key);
            return None;
        };
        let queue = self.by_key.get_mut(key)?;
        let Some(waiter) = queue.lock_head() else { return self.take_for_waiter(key, id) };
        let keys = waiter.spec().store_keys.clone();
        queue.permit.go_out(self.clock.now());
        Some(AfterPass::Queue(keys))
    }
}

#[cold]
pub(super) fn full() -> LockError {
    LockError::new(ErrorKind::QueueFull, "the queue of this process for the lock is full")
        .remedy("shed load before this call, or raise `max_waiters` on the pool")
}

#[cfg(test)]
pub(super) mod tests;
