//! The wait queue of one key, and what is known about the key.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::base::backend_error::BackendError;
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::fence::ExpectedHolders;
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::exec::panic_boundary;
use crate::queue::last_answer::{self, LastAnswer, WaitEnd};
use crate::queue::permit::KeyPermit;
use crate::queue::permit_state::{Holder, PermitState};
use crate::queue::wake_signal::WakeSignal;

/// What a queue needs to know about a waiter for a lock.
pub(crate) trait Waiter {
    fn spec(&self) -> &Arc<LockSpec>;

    /// Whether the caller has stopped waiting.
    fn is_cancelled(&self) -> bool;

    /// Ends the wait with `error`.
    fn reject(self, error: LockError);
}

/// The wait queue of one key. It exists while the key's permit is out or reserved, or while a request for several keys
/// is registered.
#[derive(Debug)]
pub(super) struct KeyQueue<W> {
    pub(super) permit: PermitState,
    /// `None` if nothing has waited since the permit went out. So a lock that is only held takes less memory.
    waits: Option<Box<Waits<W>>>,
    pub(super) last_answer: LastAnswer,
    /// Whether other processes wait for the lock.
    pub(super) contention: Contention,
    /// Since when the lock has not been left free.
    pub(super) held_since: Option<Instant>,
}

/// What waits for a key, in this process and at the store.
#[derive(Debug)]
struct Waits<W> {
    /// By rank.
    entries: BTreeMap<u64, QueueEntry<W>>,
    /// The rank of the request for several keys that the permit is reserved for, ahead of all later ranks.
    reserved_for: Option<u64>,
    /// The permit is not reserved again before this moment.
    unreserved_until: Option<Instant>,
    /// Requests for several keys that ask the store for this key.
    registered: Vec<StepwiseRequest>,
    /// For the task that waits for the store on the queue's behalf, also before there is one.
    wake: Option<Arc<WakeSignal>>,
    /// How many holders of this process the next grant is expected to have, by the last one.
    expected_holders: ExpectedHolders,
}

/// Whether other processes wait for a lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Contention {
    #[default]
    None,
    /// The store does not say. It may notify the process of any other process that arrives.
    Unknown,
    Known,
}

impl Contention {
    /// The contention according to the store's answer, if it gave one.
    pub(crate) fn of_answer(contended: Option<bool>) -> Self {
        match contended {
            Some(true) => Self::Known,
            Some(false) => Self::None,
            None => Self::Unknown,
        }
    }
}

/// A request for several keys that asks the store for one of them.
#[derive(Debug)]
pub(super) struct StepwiseRequest {
    pub(super) id: u64,
    pub(super) since: Instant,
    /// The owner token of its requests.
    pub(super) owner: Owner,
    /// The same for all keys of the request.
    pub(super) wake: Arc<WakeSignal>,
    /// Whether the store says that others wait for the key.
    pub(super) contended: bool,
}

/// A waiter in a queue.
#[derive(Debug)]
pub(crate) struct QueueEntry<W> {
    pub(crate) id: u64,
    /// When the wait began.
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    /// Requests sent for this waiter.
    pub(crate) attempts: u32,
    pub(crate) wait_for: WaitFor<W>,
}

impl<W: Waiter> QueueEntry<W> {
    /// What ends its wait at its deadline.
    pub(super) fn end_at_deadline(&self) -> WaitEnd {
        match &self.wait_for {
            WaitFor::Lock(waiter) => WaitEnd::at_deadline(&waiter.spec().policy),
            WaitFor::Permits(wait) => wait.end,
        }
    }

    /// What ends its wait now, if the store has not failed.
    pub(super) fn end(&self) -> WaitEnd {
        match &self.wait_for {
            WaitFor::Lock(waiter) => WaitEnd::of(&waiter.spec().policy, self.attempts),
            WaitFor::Permits(wait) => wait.end,
        }
    }
}

/// What an entry waits for.
#[derive(Debug)]
pub(crate) enum WaitFor<W> {
    /// The lock, from the owner of the permit.
    Lock(W),
    /// The permits of several keys.
    Permits(Box<PermitsWait>),
}

/// A wait for the permits of several keys.
#[derive(Debug)]
pub(crate) struct PermitsWait {
    pub(super) keys: Arc<[Key]>,
    pub(super) end: WaitEnd,
    pub(super) reply: PermitsReply,
    /// Notified when some of the keys are reserved for it.
    pub(super) wake: Arc<WakeSignal>,
    /// Since when some are.
    pub(super) reserved_since: Option<Instant>,
    /// Reservations that ended without all permits.
    pub(super) failures: u32,
    /// No key is reserved before this moment.
    pub(super) reserve_from: Instant,
}

/// Receives the permits of several keys.
pub(crate) type PermitsReply = oneshot::Sender<Result<KeyPermit, LockError>>;

impl<W: Waiter> WaitFor<W> {
    pub(super) fn reject(self, error: LockError) {
        match self {
            Self::Lock(waiter) => waiter.reject(error),
            Self::Permits(wait) => panic_boundary::answer(wait.reply, Err(error)),
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        match self {
            Self::Lock(waiter) => waiter.is_cancelled(),
            Self::Permits(wait) => wait.reply.is_closed(),
        }
    }

    pub(crate) fn is_lock(&self) -> bool {
        matches!(self, Self::Lock(_))
    }
}

impl<W> Default for KeyQueue<W> {
    fn default() -> Self {
        Self {
            permit: PermitState::Free,
            waits: None,
            last_answer: LastAnswer::None,
            contention: Contention::None,
            held_since: None,
        }
    }
}

impl<W> Default for Waits<W> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            reserved_for: None,
            unreserved_until: None,
            registered: Vec::new(),
            wake: None,
            expected_holders: ExpectedHolders::default(),
        }
    }
}

impl<W> Waits<W> {
    fn is_empty(&self) -> bool {
        self.reserved_for.is_none() && self.entries.is_empty() && self.registered.is_empty()
    }
}

impl<W> KeyQueue<W> {
    /// A queue whose permit goes out.
    pub(super) fn taken(now: Instant) -> Self {
        let mut queue = Self::default();
        queue.give_out(now);
        queue
    }

    /// The permit, which was free, goes out for a request. The lock has been left free until now.
    pub(super) fn give_out(&mut self, now: Instant) {
        self.permit.go_out(now);
        self.last_answer = LastAnswer::Pending(now);
        self.held_since = Some(now);
    }

    /// Whether the next task to arrive gets the permit.
    pub(super) fn is_open(&self) -> bool {
        self.permit.is_free() && self.reserved_for().is_none()
    }

    pub(super) fn is_vacant(&self) -> bool {
        self.permit.is_free() && self.has_no_waiters()
    }

    pub(super) fn has_no_waiters(&self) -> bool {
        self.waits.as_ref().is_none_or(|waits| waits.is_empty())
    }

    fn waits(&mut self) -> &mut Waits<W> {
        self.waits.get_or_insert_default()
    }

    /// The entries, by rank.
    pub(super) fn entries(&self) -> impl Iterator<Item = &QueueEntry<W>> {
        self.waits.iter().flat_map(|waits| waits.entries.values())
    }

    /// The first entry, unless the permit is reserved for an earlier rank.
    pub(super) fn head(&self) -> Option<&QueueEntry<W>> {
        let waits = self.waits.as_deref()?;
        let (&id, entry) = waits.entries.first_key_value()?;
        waits.reserved_for.is_none_or(|rank| rank >= id).then_some(entry)
    }

    /// The [`head`](Self::head), if it waits for the lock.
    pub(super) fn lock_head(&self) -> Option<&W> {
        match &self.head()?.wait_for {
            WaitFor::Lock(waiter) => Some(waiter),
            WaitFor::Permits(_) => None,
        }
    }

    pub(super) fn remove_first(&mut self) -> Option<QueueEntry<W>> {
        self.waits.as_mut()?.entries.pop_first().map(|(_, entry)| entry)
    }

    pub(super) fn entry_count(&self) -> usize {
        self.waits.as_ref().map_or(0, |waits| waits.entries.len())
    }

    pub(super) fn entry(&self, id: u64) -> Option<&QueueEntry<W>> {
        self.waits.as_ref()?.entries.get(&id)
    }

    pub(super) fn entry_mut(&mut self, id: u64) -> Option<&mut QueueEntry<W>> {
        self.waits.as_mut()?.entries.get_mut(&id)
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<QueueEntry<W>> {
        self.waits.as_mut()?.entries.remove(&id)
    }

    pub(super) fn take_entries(&mut self) -> BTreeMap<u64, QueueEntry<W>> {
        self.waits.as_mut().map(|waits| std::mem::take(&mut waits.entries)).unwrap_or_default()
    }

    /// The rank of the request for several keys that the permit is reserved for.
    pub(super) fn reserved_for(&self) -> Option<u64> {
        self.waits.as_ref()?.reserved_for
    }

    /// Reserves the permit for the request of rank `id`, ahead of all later ranks.
    pub(super) fn reserve(&mut self, id: u64) {
        self.waits().reserved_for = Some(id);
    }

    /// Ends the reservation.
    pub(super) fn unreserve(&mut self) {
        if let Some(waits) = &mut self.waits {
            waits.reserved_for = None;
        }
    }

    /// Ends the reservation. The permit is not reserved again before `until`.
    pub(super) fn unreserve_until(&mut self, until: Option<Instant>) {
        self.unreserve();
        if let Some(waits) = &mut self.waits {
            waits.unreserved_until = until;
        }
    }

    /// Requests for several keys that ask the store for this key.
    pub(super) fn registered(&self) -> &[StepwiseRequest] {
        self.waits.as_ref().map_or(&[], |waits| &waits.registered)
    }

    pub(super) fn registered_mut(&mut self) -> &mut [StepwiseRequest] {
        self.waits.as_mut().map_or(&mut [], |waits| &mut waits.registered)
    }

    pub(super) fn register(&mut self, request: StepwiseRequest) {
        self.waits().registered.push(request);
    }

    pub(super) fn deregister(&mut self, id: u64) {
        if let Some(waits) = &mut self.waits {
            waits.registered.retain(|request| request.id != id);
        }
    }

    /// The queue sends its requests under `owner`, which the release that has begun names. Returns the signal to send one.
    pub(super) fn name_successor(&mut self, owner: Owner) -> Arc<WakeSignal> {
        self.permit.name_successor(owner);
        self.on_next_owner()
    }

    /// The queue sends its requests under `owner`: no lease of this process holds the lock, and no release is in flight. Returns
    /// the signal to send one.
    pub(super) fn request_as(
        &mut self,
        owner: Owner,
        now: impl FnOnce() -> Instant,
    ) -> Arc<WakeSignal> {
        self.permit.request_as(owner, now);
        self.on_next_owner()
    }

    fn on_next_owner(&mut self) -> Arc<WakeSignal> {
        self.contention = Contention::None;
        self.waits().wake.get_or_insert_default().clone()
    }

    /// A lease of this process holds the lock, unless it has passed its permit on.
    pub(super) fn set_holder(&mut self, holder: Holder) {
        if !self.permit.hold(holder) {
            return;
        }
        self.last_answer = LastAnswer::Held { expires_in: None };
        // No request is under way, and none is due: the next one is sent after the release.
        if let Some(waits) = &mut self.waits {
            waits.wake = None;
        }
    }

    /// The release of the lease of this number begins, if it holds the lock.
    pub(super) fn begin_release(&mut self, lease: u64) {
        if self.permit.begin_release(lease) {
            self.last_answer = LastAnswer::None;
        }
    }

    /// Whether nothing waits for the lock but the lease that holds it, which may have several keys.
    pub(super) fn has_no_other_waiters(&self) -> bool {
        let owner = self.permit.holder().map(|holder| holder.owner);
        self.reserved_for().is_none()
            && self.entry_count() == 0
            && self.registered().iter().all(|request| Some(request.owner) == owner)
    }

    /// Whether this process releases the lock, and no try has failed.
    pub(super) fn is_being_released(&self) -> bool {
        self.permit.is_releasing() && matches!(self.last_answer, LastAnswer::None)
    }

    /// The error of a wait that ends at `now`. `last_failure` is the last failure of any key.
    pub(super) fn wait_error(
        &self,
        end: WaitEnd,
        now: Instant,
        last_failure: Option<&BackendError>,
    ) -> LockError {
        match (&self.last_answer, last_failure) {
            (LastAnswer::Held { .. }, _) if self.permit.is_held() => {
                last_answer::held_in_process(end)
            }
            (LastAnswer::None, None) if self.permit.is_releasing() => {
                last_answer::still_releasing(end)
            }
            (LastAnswer::None, None) if self.permit.is_requesting() => {
                last_answer::requested_in_process(end)
            }
            (last_answer, _) => last_answer.wait_error(end, now, last_failure),
        }
    }

    /// Records how many holders the next grant is expected to have, by the last one, if the queue has waiters.
    pub(super) fn note_expected_holders(&mut self, holders: impl FnOnce() -> ExpectedHolders) {
        if let Some(waits) = self.waits.as_mut().filter(|waits| !waits.is_empty()) {
            waits.expected_holders = holders();
        }
    }

    /// How many holders are expected to follow the next one under its grant.
    pub(super) fn expected_successors(&self) -> usize {
        let successors = |waits: &Waits<W>| waits.expected_holders.successors(waits.entries.len());
        self.waits.as_deref().map_or(0, successors)
    }

    /// Whether the lock has not been left free for `interval`.
    pub(super) fn is_barging_due(&self, interval: Option<Duration>, now: Instant) -> bool {
        let held_for = self.held_since.map(|since| now.since(since));
        interval.zip(held_for).is_some_and(|(interval, held_for)| held_for >= interval)
    }

    /// Since when a request of rank `id` cannot have the permit; `None` if it can.
    pub(super) fn missing_since(&self, id: u64) -> Option<Instant> {
        let is_reserved = || self.reserved_for().is_some_and(|rank| rank < id);
        self.permit.out_since().or_else(|| is_reserved().then_some(Instant::NEVER))
    }

    /// Whether the permit may be reserved for a request of rank `id`.
    pub(super) fn is_reservable(&self, id: u64, now: Instant) -> bool {
        self.waits.as_ref().is_none_or(|waits| {
            waits.reserved_for.is_none_or(|rank| rank >= id)
                && waits.unreserved_until.is_none_or(|until| until <= now)
        })
    }

    pub(super) fn add(&mut self, entry: QueueEntry<W>) {
        self.waits().entries.insert(entry.id, entry);
        self.permit.end_linger();
        // A request for several keys that holds this one releases it sooner.
        for registered in self.registered() {
            registered.wake.notify();
        }
    }

    /// The permit is free again.
    pub(super) fn on_permit_dropped(&mut self) {
        self.permit = PermitState::Free;
        if let Some(waits) = &mut self.waits {
            waits.wake = None;
        }
        self.contention = Contention::None;
    }

    /// Whether the lock may linger: nothing waits for it, as far as the store says. If it does not say, the hold must have
    /// begun soon after the grant (`is_recent`).
    pub(super) fn may_linger(&self, is_recent: bool) -> bool {
        let may_linger = match self.contention {
            Contention::None => true,
            Contention::Unknown => is_recent,
            Contention::Known => false,
        };
        may_linger && self.has_no_waiters()
    }

    /// Has the store asked immediately.
    pub(super) fn wake(&mut self) {
        self.request_by(Instant::ORIGIN);
        for registered in self.registered() {
            registered.wake.request_by(Instant::ORIGIN);
        }
    }

    /// Has the store asked no later than `moment`, if a request can be due.
    pub(super) fn request_by(&mut self, moment: Instant) {
        if self.permit.may_request() {
            self.waits().wake.get_or_insert_default().request_by(moment);
        }
    }

    pub(super) fn mark_contended(&mut self) {
        self.contention = Contention::Known;
        self.permit.end_linger();
        for registered in self.registered_mut() {
            registered.contended = true;
            registered.wake.notify();
        }
    }
}

impl PermitsWait {
    /// When the keys that are reserved for it are free again, if some are.
    pub(super) fn reservation_ends_at(&self) -> Option<Instant> {
        self.reserved_since.map(|since| since + permit_reservation(self.failures))
    }
}

/// How long keys stay reserved for a request while others are missing, after `failures` failed reservations. It is from
/// 50 ms to 1.6 s, less than the default wait for a single key.
fn permit_reservation(failures: u32) -> Duration {
    Duration::from_millis(50 << failures.min(5))
}
