//! One grant: how long it may be believed, and what became of it.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::api::guard::LockGuard;
use crate::backend::{BackendError, LeaseRef, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::fence::{Fence, Fences};
use crate::base::jitter;
use crate::base::options::{Policy, Ttl, Wait};
use crate::base::process::Process;
use crate::base::sync::{Mutex, MutexGuard};
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::lock::acquire::Ask;
use crate::lock::acquire::attempt::Place;
use crate::lock::core::Engine;
use crate::queue::permit::Turn;

/// A grant of the store and what this process believes of it.
///
/// Belief ends by the local clock alone, at the send time of the last confirmed request plus the ttl
/// less the drift. No answer is needed to stop believing, and `is_held` reads nothing but the clock.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) id: u64,
    pub(crate) pool: Arc<str>,
    pub(crate) ask: Arc<Ask>,
    pub(crate) owner: Owner,
    pub(crate) fence: Option<Fence>,
    pub(crate) granted_at: Instant,
    /// As the policy says; here as well, because with very many leases each line of memory that a renewal reads
    /// counts.
    pub(crate) ttl: Ttl,
    pub(crate) renew_every: Option<Duration>,
    /// When `max_hold` is over.
    limit: Option<Instant>,
    /// How long before the end of belief the holder is told.
    notice: Duration,
    /// When the process was granted what it has at the store; before `granted_at` if it was handed on.
    pub(crate) tenure_since: Instant,
    /// How long the store may be holding requests of this acquire that were never answered.
    pub(crate) haunted_until: Option<Instant>,
    clock: Clock,
    offer: Offer,
    /// A grant that its caller has not picked up by then is given back: at the end of the wait, and not before one
    /// ttl is over.
    offered_until: Instant,
    /// End of belief in nanoseconds of the clock; 0 once the lease is lost or let go.
    valid_until: AtomicU64,
    /// When the store itself forgets the lease at the latest.
    stored_until: AtomicU64,
    /// Where the watchdog has filed the lease.
    filed_at: AtomicU64,
    state: Mutex<State>,
    renewed: Notify,
}

/// Whether the caller has picked up its grant. One exchange decides between the pick-up and the return.
#[derive(Debug, Default)]
struct Offer(AtomicU8);

impl Offer {
    const OPEN: u8 = 0;
    const PICKED_UP: u8 = 1;
    const WITHDRAWN: u8 = 2;

    fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OPEN
    }

    fn end(&self, how: u8) -> bool {
        self.0.compare_exchange(Self::OPEN, how, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Why belief ended before the holder let go, if it did.
    loss: Option<Loss>,
    next_renewal: Option<Instant>,
    /// What the store answered to the last renewal, if it did not confirm it.
    unconfirmed: Option<Box<BackendError>>,
    listeners: Listeners,
    last_listener: u64,
    /// For the holders to come.
    fences: Option<Fences>,
    turns: Vec<Turn>,
}

impl State {
    fn ending(&self) -> Option<Ending> {
        match (self.loss, self.phase) {
            (Some(loss), _) => Some(Ending::Lost(loss)),
            (None, Phase::Passed | Phase::Leaving | Phase::Releasing) => Some(Ending::Released),
            (None, Phase::Held | Phase::Renewing | Phase::Lost | Phase::LostRenewing) => None,
        }
    }
}

/// The life of a lease. Every request to the store is sent in the phase that names it, and only one
/// place changes into that phase; so nothing can be renewed that is being released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    /// Held, with a renewal on its way.
    Renewing,
    /// Let go, and what it held is another task's of this process.
    Passed,
    Lost,
    /// Lost, with a renewal still on its way.
    LostRenewing,
    /// Let go by its holder, while a renewal is still on its way. The release waits for it.
    Leaving,
    Releasing,
}

/// How a lease came to be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The store did not confirm a renewal in time.
    Expired,
    /// The store says that the key is not ours any more.
    Taken,
    /// `renew = false`, and the ttl is over.
    TtlOver,
    /// `max_hold` is over.
    MaxHold,
    /// The pool shuts down and its grace is over.
    Shutdown,
}

/// What the listeners of a lease are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Lost(Loss),
    /// The holder has let go, and nothing was lost before.
    Released,
}

/// The tasks that listen for the end of a lease, by numbers that grow. A lease that ends gives them up, and each
/// is woken once.
#[derive(Debug, Default)]
#[must_use = "a listener that is not woken waits for good"]
pub(crate) struct Listeners(Vec<(u64, Waker)>);

impl Listeners {
    fn find(&self, id: u64) -> Option<usize> {
        self.0.binary_search_by_key(&id, |listener| listener.0).ok()
    }

    /// Wakes all of them. Not under a lock: a waker is foreign code.
    pub(crate) fn wake(self) {
        for (_, waker) in self.0 {
            panic_boundary::wake(waker);
        }
    }
}

/// A place among the listeners of a lease. Dropped, it leaves no waker behind; in a process that was forked from its
/// own it leaves the lease alone.
#[derive(Debug)]
pub(crate) struct Listener {
    lease: Arc<Lease>,
    /// `None` before the first poll.
    id: Option<u64>,
    process: Process,
}

impl Listener {
    pub(crate) fn new(lease: &Arc<Lease>) -> Self {
        Self { lease: lease.clone(), id: None, process: Process::current() }
    }

    /// Resolves when the lease has ended, and then every time.
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<Ending> {
        self.lease.poll_lost(&mut self.id, cx)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.process.is_current() {
            self.lease.forget_listener(self.id);
        }
    }
}

/// What the watchdog has to do with a lease now.
#[derive(Debug)]
pub(crate) enum Beat {
    /// Renew it, and look again at `last_call`.
    Renew {
        last_call: Instant,
        /// Whether the last renewal came to nothing.
        in_doubt: bool,
    },
    /// Nothing before this moment.
    Wait(Instant),
    /// It has just been lost.
    Lost(Loss),
    /// Its caller has not picked it up in time, and cannot any more. It is to be released.
    Unclaimed(Arc<Engine>),
    /// It needs no watchdog any more.
    Over,
}

/// What the process has at the store: from a grant to the release, whoever of its tasks holds it.
#[derive(Debug)]
pub(crate) struct Tenure {
    pub(crate) owner: Owner,
    /// When the grant was asked for.
    pub(crate) since: Instant,
    /// How long the store may be holding requests of this owner that were never answered.
    pub(crate) haunted_until: Option<Instant>,
    valid_until: Instant,
    stored_until: Instant,
    /// `None` for a new grant.
    next_renewal: Option<Instant>,
    fences: Option<Fences>,
    turns: Vec<Turn>,
}

impl Tenure {
    /// From a grant whose request was sent at `sent`.
    pub(crate) fn new(
        place: &Place,
        policy: &Policy,
        sent: Instant,
        fences: Option<Fences>,
        turns: Vec<Turn>,
    ) -> Self {
        Self {
            owner: place.owner,
            since: sent,
            haunted_until: (place.unanswered > 0).then_some(place.haunted_until),
            valid_until: sent + policy.ttl.validity(),
            stored_until: sent + policy.kept_for(),
            next_renewal: None,
            fences,
            turns,
        }
    }
}

impl Lease {
    /// Makes the one who asked the holder of `tenure`. `contended` is what the store says of others, if it was
    /// asked.
    pub(crate) fn grant(
        engine: &Arc<Engine>,
        ask: Arc<Ask>,
        tenure: Tenure,
        asked_at: Instant,
        contended: Option<bool>,
    ) -> LockGuard {
        let id = engine.registry.next_id();
        let pool = engine.name().clone();
        let lease = Arc::new(Self::new(id, pool, ask, tenure, asked_at, engine.clock));
        engine.registry.enroll(&lease);
        engine.watchdog.watch(&lease);
        if let [key] = &*lease.ask.wire {
            engine.queue.hold(key, &lease, contended);
        }
        events::acquired(&lease, lease.granted_at.since(asked_at));
        LockGuard::new(engine.clone(), lease)
    }

    fn new(
        id: u64,
        pool: Arc<str>,
        ask: Arc<Ask>,
        mut tenure: Tenure,
        asked_at: Instant,
        clock: Clock,
    ) -> Self {
        let granted_at = clock.now();
        let wait_ends = match ask.policy.wait {
            Wait::For(wait) => asked_at + wait,
            Wait::Forever => granted_at,
        };
        let offered_until = wait_ends.max(granted_at + ask.policy.ttl.get());
        let limit = ask.policy.max_hold.map(|max_hold| granted_at + max_hold);
        let valid_until = limit.map_or(tenure.valid_until, |limit| limit.min(tenure.valid_until));
        let fence =
            if ask.policy.fencing { tenure.fences.as_mut().and_then(Fences::take) } else { None };
        let first_renewal =
            || ask.policy.renew_every.map(|every| jitter::early(tenure.since, every, id));
        Self {
            id,
            pool,
            fence,
            granted_at,
            ttl: ask.policy.ttl,
            renew_every: ask.policy.renew_every,
            limit,
            notice: ask.policy.cancel_margin(),
            owner: tenure.owner,
            tenure_since: tenure.since,
            haunted_until: tenure.haunted_until,
            clock,
            offer: Offer::default(),
            offered_until,
            valid_until: AtomicU64::new(valid_until.as_nanos()),
            stored_until: AtomicU64::new(tenure.stored_until.as_nanos()),
            filed_at: AtomicU64::new(0),
            state: Mutex::new(State {
                phase: Phase::Held,
                loss: None,
                next_renewal: tenure.next_renewal.or_else(first_renewal),
                unconfirmed: None,
                listeners: Listeners::default(),
                last_listener: 0,
                fences: tenure.fences,
                turns: tenure.turns,
            }),
            renewed: Notify::new(),
            ask,
        }
    }

    /// Ends this holder's time and gives what the process has at the store to `next`, if that is as good
    /// as a new grant for it. Otherwise nothing has changed, and the lease is to be released.
    ///
    /// The caller wakes the listeners, for it may have the queue locked now.
    pub(crate) fn pass_on(&self, next: &Ask) -> Option<(Tenure, Listeners)> {
        let now = self.clock.now();
        let (mine, its) = (&self.ask.policy, &next.policy);
        // A limit on one holder's time is not for the next; and a renewal is sent under one ttl. The store has to know
        // of the next one's `min_hold` before its body begins.
        let alike = mine.renew_every.is_some()
            && mine.max_hold.is_none()
            && its.min_hold.is_zero()
            && mine.ttl == its.ttl
            && mine.renew_every == its.renew_every
            && self.haunted_until.is_none();
        let valid_until = self.valid_until();
        if !alike
            || valid_until.since(now) < its.ttl.get() / 2
            || now.since(self.granted_at) < mine.min_hold
        {
            return None;
        }
        let mut state = self.state();
        // One whose renewal is on its way is released: the answer is about this lease.
        let fenced = !its.fencing || state.fences.is_some_and(|fences| !fences.is_empty());
        if state.phase != Phase::Held || !fenced {
            return None;
        }
        state.phase = Phase::Passed;
        self.valid_until.store(0, Ordering::Release);
        let listeners = std::mem::take(&mut state.listeners);
        let tenure = Tenure {
            owner: self.owner,
            since: self.tenure_since,
            haunted_until: None,
            valid_until,
            stored_until: self.stored_until(),
            next_renewal: state.next_renewal,
            fences: state.fences,
            turns: std::mem::take(&mut state.turns),
        };
        Some((tenure, listeners))
    }

    /// The caller has its guard. False if the grant was given back before.
    pub(crate) fn pick_up(&self) -> bool {
        self.offer.end(Offer::PICKED_UP)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.clock.now() < self.valid_until()
    }

    /// Whether belief has run out without anybody having said so yet.
    pub(crate) fn is_overdue(&self) -> bool {
        let valid_until = self.valid_until();
        valid_until > Instant::from_nanos(0) && valid_until <= self.clock.now()
    }

    pub(crate) fn valid_for(&self) -> Duration {
        self.valid_until().since(self.clock.now())
    }

    pub(crate) fn held_for(&self) -> Duration {
        self.clock.now().since(self.granted_at)
    }

    pub(crate) fn stored_until(&self) -> Instant {
        Instant::from_nanos(self.stored_until.load(Ordering::Acquire))
    }

    pub(crate) fn filed_at(&self) -> Instant {
        Instant::from_nanos(self.filed_at.load(Ordering::Relaxed))
    }

    /// Notes where the watchdog files the lease; returns where it was.
    pub(crate) fn file_at(&self, due: Instant) -> Instant {
        Instant::from_nanos(self.filed_at.swap(due.as_nanos(), Ordering::Relaxed))
    }

    /// What the store knows the lease by.
    pub(crate) fn to_store(&self) -> LeaseRef {
        LeaseRef {
            keys: self.ask.wire.clone(),
            owner: self.owner,
            ttl: self.ttl.get(),
            min_hold: self.free_after(),
        }
    }

    /// How long the store is to keep the lock still after its release.
    pub(crate) fn free_after(&self) -> Duration {
        let min_hold = self.ask.policy.min_hold;
        // Most have none, and then no clock is asked.
        if min_hold.is_zero() { min_hold } else { min_hold.saturating_sub(self.held_for()) }
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        self.state().loss
    }

    /// Whether what it held is another task's by now.
    pub(crate) fn is_passed_on(&self) -> bool {
        self.state().phase == Phase::Passed
    }

    /// Resolves when the lease is lost or let go. `listener` is the caller's place among the listeners, `None`
    /// at first.
    fn poll_lost(&self, listener: &mut Option<u64>, cx: &Context<'_>) -> Poll<Ending> {
        let mut state = self.state();
        if let Some(ending) = state.ending() {
            return Poll::Ready(ending);
        }
        if let Some(at) = listener.and_then(|id| state.listeners.find(id)) {
            let (_, waker) = &mut state.listeners.0[at];
            if !waker.will_wake(cx.waker()) {
                let stale = std::mem::replace(waker, cx.waker().clone());
                // The last waker of a task may drop it, and another listener with it.
                drop(state);
                drop(stale);
            }
            return Poll::Pending;
        }
        state.last_listener += 1;
        let id = state.last_listener;
        state.listeners.0.push((id, cx.waker().clone()));
        *listener = Some(id);
        Poll::Pending
    }

    fn forget_listener(&self, listener: Option<u64>) {
        let Some(id) = listener else { return };
        let mut state = self.state();
        let forgotten = state.listeners.find(id).map(|at| state.listeners.0.remove(at));
        // As above.
        drop(state);
        drop(forgotten);
    }

    /// Ends belief at once, unless the holder has let go already.
    pub(crate) fn lose(&self, loss: Loss) -> bool {
        let mut state = self.state();
        match state.phase {
            Phase::Held | Phase::Renewing => {
                let renewing = state.phase == Phase::Renewing;
                state.phase = if renewing { Phase::LostRenewing } else { Phase::Lost };
                state.loss = Some(loss);
                self.valid_until.store(0, Ordering::Release);
                let listeners = std::mem::take(&mut state.listeners);
                // From here on the store alone keeps the others out; a holder that never notices must
                // not keep them in line as well.
                let turns = std::mem::take(&mut state.turns);
                drop(state);
                drop(turns);
                listeners.wake();
                true
            }
            Phase::Passed
            | Phase::Lost
            | Phase::LostRenewing
            | Phase::Leaving
            | Phase::Releasing => false,
        }
    }

    /// Ends belief because its time is over. The loss, if this call is the one that ended it.
    pub(crate) fn lapse(&self, now: Instant) -> Option<Loss> {
        let notice = self.notice;
        let loss = match (self.limit, self.renew_every) {
            (Some(limit), _) if now + notice >= limit => Loss::MaxHold,
            (_, None) => Loss::TtlOver,
            _ => Loss::Expired,
        };
        self.lose(loss).then_some(loss)
    }

    /// When the watchdog has to look at the lease next; `None` if never again.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due_in(&self.state())
    }

    fn due_in(&self, state: &State) -> Option<Instant> {
        let last_call = self.last_call();
        match state.phase {
            Phase::Held => {
                let due = state.next_renewal.map_or(last_call, |next| next.min(last_call));
                Some(if self.offer.is_open() { due.min(self.offered_until) } else { due })
            }
            Phase::Renewing => Some(last_call),
            Phase::Passed
            | Phase::Lost
            | Phase::LostRenewing
            | Phase::Leaving
            | Phase::Releasing => None,
        }
    }

    /// What is to be done at `now`. [`Beat::Renew`] puts the lease into the phase in which the caller
    /// sends a renewal, and within half of the time that is left reports to [`renewed`](Self::renewed) or
    /// [`not_renewed`](Self::not_renewed), or [`not_there`](Self::not_there).
    pub(crate) fn beat(&self, now: Instant) -> Beat {
        let mut state = self.state();
        let Some(due) = self.due_in(&state) else { return Beat::Over };
        if due > now {
            return Beat::Wait(due);
        }
        let last_call = self.last_call();
        if now >= last_call {
            drop(state);
            return self.lapse(now).map_or(Beat::Over, Beat::Lost);
        }
        if state.phase != Phase::Held {
            return Beat::Wait(last_call);
        }
        // By its turn a lease knows the pool of the line that waits for it.
        if now >= self.offered_until
            && let Some(turn) = state.turns.first()
            && self.offer.end(Offer::WITHDRAWN)
        {
            return Beat::Unclaimed(turn.engine().clone());
        }
        state.phase = Phase::Renewing;
        Beat::Renew { last_call, in_doubt: state.unconfirmed.is_some() }
    }

    /// A body needs a moment to end, and has to have ended when belief does.
    fn last_call(&self) -> Instant {
        self.valid_until().saturating_sub(self.notice)
    }

    /// The store has confirmed a renewal that was sent at `sent`; the next one is due after `pause`.
    pub(crate) fn renewed(&self, sent: Instant, pause: Duration) {
        self.renewal_over(sent, |state| {
            // What has run out stays so: the holder may have looked, and others may have had the lock.
            if self.is_held() {
                self.believe_from(sent);
            }
            state.next_renewal = Some(jitter::early(sent, pause, self.id));
            state.unconfirmed = None;
        });
    }

    /// A renewal failed for a reason that may pass; it is tried again after a while.
    pub(crate) fn not_renewed(&self, now: Instant, error: BackendError) {
        let pause = self.ttl.get() / 24;
        self.renewal_over(now, |state| {
            state.next_renewal = Some(now + pause);
            state.unconfirmed = Some(Box::new(error));
        });
    }

    /// The store has answered a renewal by saying that there is nothing to renew.
    pub(crate) fn not_there(&self, now: Instant) {
        self.renewal_over(now, |state| state.next_renewal = Some(now));
    }

    /// Why the store has not confirmed the last renewal, if it has not.
    pub(crate) fn unconfirmed(&self) -> Option<BackendError> {
        self.state().unconfirmed.as_deref().cloned()
    }

    /// No renewal is on its way any more. It may have been applied as late as `stored_from`, also if it
    /// failed. `go_on` is for a lease that is still held.
    fn renewal_over(&self, stored_from: Instant, go_on: impl FnOnce(&mut State)) {
        let mut state = self.state();
        match state.phase {
            Phase::Renewing => {
                go_on(&mut state);
                state.phase = Phase::Held;
            }
            Phase::LostRenewing => state.phase = Phase::Lost,
            Phase::Leaving => {
                state.phase = Phase::Releasing;
                self.renewed.notify_waiters();
            }
            Phase::Held | Phase::Passed | Phase::Lost | Phase::Releasing => return,
        }
        self.store_until(stored_from);
    }

    /// The holder lets go, and the listeners are told. True for the one caller that has to see to the release.
    pub(crate) fn let_go(&self) -> bool {
        let mut state = self.state();
        state.phase = match state.phase {
            Phase::Held | Phase::Lost => Phase::Releasing,
            Phase::Renewing | Phase::LostRenewing => Phase::Leaving,
            Phase::Passed | Phase::Leaving | Phase::Releasing => return false,
        };
        self.valid_until.store(0, Ordering::Release);
        let listeners = std::mem::take(&mut state.listeners);
        drop(state);
        listeners.wake();
        true
    }

    /// Waits until no renewal is on its way, so that the release is the last thing sent.
    pub(crate) async fn settled(&self) {
        loop {
            let renewed = self.renewed.notified();
            if self.state().phase != Phase::Leaving {
                return;
            }
            renewed.await;
        }
    }

    /// Whether no renewal is on its way.
    pub(crate) fn is_settled(&self) -> bool {
        self.state().phase != Phase::Leaving
    }

    /// Whether those in line wait for this lease to go.
    pub(crate) fn has_turns(&self) -> bool {
        !self.state().turns.is_empty()
    }

    /// The turns of its keys, for whoever lets them go.
    pub(crate) fn take_turns(&self) -> Vec<Turn> {
        std::mem::take(&mut self.state().turns)
    }

    /// Has the next renewal due at `now`: something may have happened to the lease. False if it is not to
    /// be renewed.
    pub(crate) fn hurry(&self, now: Instant) -> bool {
        let mut state = self.state();
        let hurries = state.phase == Phase::Held && state.next_renewal.is_some();
        if hurries {
            state.next_renewal = Some(now);
        }
        hurries
    }

    fn valid_until(&self) -> Instant {
        Instant::from_nanos(self.valid_until.load(Ordering::Acquire))
    }

    fn believe_from(&self, sent: Instant) {
        let until = sent + self.ttl.validity();
        let until = self.limit.map_or(until, |limit| limit.min(until));
        self.valid_until.fetch_max(until.as_nanos(), Ordering::AcqRel);
        self.store_until(sent);
    }

    fn store_until(&self, sent: Instant) {
        let until = (sent + self.ttl.get()).max(self.granted_at + self.ask.policy.min_hold);
        self.stored_until.fetch_max(until.as_nanos(), Ordering::AcqRel);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
