//! The state machine of one lease: held, renewing, lost, transferred, released.
//!
//! It does no I/O. [`renewal`](crate::lease::renewal) polls [`Lease::poll_renewal`] and reports the answers of the store;
//! these transitions are in `renewals.rs`. [`Phase`] has the table of all transitions.
//!
//! A loss emits its event and drops the permit, so the next waiter of the process sends its request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::LeaseRef;
use crate::base::clock::{Clock, Instant};
use crate::base::fence::{ExpectedHolders, Fence, Fences};
use crate::base::jitter;
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::loss::Loss;
use crate::base::measurement::Measurement;
use crate::base::metrics::LockMetrics;
use crate::base::options::Wait;
use crate::base::owner::Owner;
use crate::base::sync::Mutex;
use crate::base::ttl::Ttl;
use crate::exec::events::{self, Origin};
use crate::lease::grant::Grant;
use crate::lease::lease_state::{Ending, Expedited, LeaseState};
use crate::lease::listeners::Listeners;
use crate::lease::offer::Offer;
use crate::lease::phase::Phase;
use crate::queue::permit::KeyPermit;
use crate::queue::permit_state::Holder;

/// When the hold of a task begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HoldTimes {
    /// When the wait began.
    pub(crate) requested_at: Instant,
    pub(crate) hold_began_at: Instant,
}

impl HoldTimes {
    /// Of a hold without a wait.
    pub(crate) fn now(clock: Clock) -> Self {
        let now = clock.now();
        Self { requested_at: now, hold_began_at: now }
    }
}

/// A thread is in the body under a lease. Nothing is marked for a body within that of another call for the lock.
pub(crate) struct RunningBody<'a>(Option<&'a Lease>);

impl RunningBody<'_> {
    /// Of a call that an outer call for the same lock polls.
    pub(crate) const fn nested() -> Self {
        Self(None)
    }

    /// From now on a thread is in the body until the lease ends.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for RunningBody<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.0 {
            lease.body_runs.store(false, Ordering::Release);
        }
    }
}

/// A grant of the store, and how long this process treats it as valid.
///
/// Validity ends by the local clock only, at the send time of the last confirmed request plus the ttl less the drift. No
/// answer is needed to end it, and [`is_held`](Self::is_held) reads nothing but the clock.
///
/// With very many leases a renewal is bound by the memory that it reads. So what it reads comes first, up to `offered_until`.
/// What `spec` has of it is copied.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Lease {
    pub(crate) id: u64,
    /// The end of validity in nanoseconds of the clock; 0 once the lease is lost, transferred or released.
    valid_until: AtomicU64,
    /// The latest time at which the store itself forgets the lease.
    stored_until: AtomicU64,
    /// The position of the lease in the queue of renewals.
    scheduled_at: AtomicU64,
    /// How long before the end of validity the body is cancelled.
    cancel_margin: Duration,
    /// When `max_hold` is over.
    limit: Option<Instant>,
    pub(crate) owner: Owner,
    pub(crate) ttl: Ttl,
    pub(crate) renew_every: Option<Duration>,
    store_keys: Arc<[Key]>,
    pub(crate) hold_began_at: Instant,
    /// When `min_hold` is over: `hold_began_at` without one.
    min_hold_until: Instant,
    pub(crate) metrics: LockMetrics,
    offer: Offer,
    state: Mutex<LeaseState>,
    clock: Clock,
    /// A grant that the caller has not picked up by then is released: the end of the wait, and not before one ttl is
    /// over.
    offered_until: Instant,
    pub(crate) pool: Arc<str>,
    pub(crate) spec: Arc<LockSpec>,
    /// Whether a thread is in the body at this moment.
    body_runs: AtomicBool,
    pub(crate) fence: Option<Fence>,
    /// When the wait began.
    requested_at: Instant,
    /// When the request was sent to which the store granted the lock. After a hand-off, earlier than `hold_began_at` by whole
    /// holds.
    pub(crate) grant_sent_at: Instant,
    /// When the store has forgotten all requests of this acquire that were never answered, if there are any.
    pub(crate) ambiguous_until: Option<Instant>,
    /// When the store has forgotten earlier grants to this owner.
    earlier_until: Instant,
    /// Notified when the renewal that a release waits for has ended.
    settles: Notify,
}

impl Lease {
    /// A lease of `grant`, number `id` of the pool.
    pub(crate) fn new(
        id: u64,
        pool: Arc<str>,
        spec: Arc<LockSpec>,
        mut grant: Grant,
        times: HoldTimes,
        clock: Clock,
    ) -> Self {
        let fences = grant.fences.as_mut().filter(|_| spec.policy.fencing);
        let fence = fences.and_then(Fences::take);
        Self::with_fence(id, pool, spec, grant, fence, times, clock)
    }

    /// A lease of `grant` that no task has: the lock of `former` lingers. It keeps the fences for later holders.
    pub(crate) fn without_holder(id: u64, former: &Self, grant: Grant) -> Self {
        let (pool, spec, clock) = (former.pool.clone(), former.spec.clone(), former.clock);
        let lease = Self::with_fence(id, pool, spec, grant, None, HoldTimes::now(clock), clock);
        Self { offer: Offer::to_no_task(), ..lease }
    }

    fn with_fence(
        id: u64,
        pool: Arc<str>,
        spec: Arc<LockSpec>,
        grant: Grant,
        fence: Option<Fence>,
        HoldTimes { requested_at, hold_began_at }: HoldTimes,
        clock: Clock,
    ) -> Self {
        let wait_ends = match spec.policy.wait {
            Wait::For(wait) => requested_at + wait,
            Wait::Forever => hold_began_at,
        };
        let offered_until = wait_ends.max(hold_began_at + spec.policy.ttl.get());
        let limit = spec.policy.max_hold.map(|max_hold| hold_began_at + max_hold);
        let valid_until = limit.map_or(grant.valid_until, |limit| limit.min(grant.valid_until));
        let first_renewal =
            || spec.policy.first_renewal.map(|pause| jitter::early(grant.sent, pause, id));
        Self {
            id,
            pool,
            body_runs: AtomicBool::new(false),
            fence,
            requested_at,
            hold_began_at,
            metrics: spec.metrics.clone(),
            store_keys: spec.store_keys.clone(),
            ttl: spec.policy.ttl,
            renew_every: spec.policy.renew_every,
            min_hold_until: hold_began_at + spec.policy.min_hold,
            limit,
            cancel_margin: spec.policy.cancel_margin(),
            owner: grant.owner,
            grant_sent_at: grant.sent,
            ambiguous_until: grant.ambiguous_until,
            earlier_until: grant.earlier_until,
            clock,
            offer: Offer::to_task(),
            offered_until,
            valid_until: AtomicU64::new(valid_until.as_nanos()),
            stored_until: AtomicU64::new(grant.stored_until.as_nanos()),
            scheduled_at: AtomicU64::new(0),
            state: Mutex::new(LeaseState {
                phase: Phase::Held,
                loss: None,
                ended_at: None,
                next_renewal: grant.next_renewal.or_else(first_renewal),
                changed_since: None,
                unconfirmed: None,
                late_renewals_until: grant.late_renewals_until,
                listeners: Listeners::default(),
                is_named: false,
                fences: grant.fences,
                permit: grant.permit,
            }),
            settles: Notify::new(),
            spec,
        }
    }

    /// Ends this hold and makes its grant available to `next`, if that is as good as a new grant for it. Otherwise nothing
    /// changes, and the lease must be released.
    ///
    /// The caller wakes the listeners, because it may have the queue locked now.
    pub(crate) fn transfer(&self, next: &LockSpec, now: Instant) -> Option<(Grant, Listeners)> {
        let (mine, its) = (&self.spec.policy, &next.policy);
        let valid_until = self.valid_until();
        if !mine.may_pass_to(its)
            || self.ambiguous_until.is_some()
            || valid_until.since(now) < its.ttl.get() / 2
            || now.since(self.hold_began_at) < mine.min_hold
        {
            return None;
        }
        let mut state = self.state.lock();
        // A lease with a renewal in flight is released instead: the answer is about this lease.
        let fenced = !its.fencing || state.fences.is_some_and(|fences| !fences.is_empty());
        if state.phase != Phase::Held || !fenced || state.is_named {
            return None;
        }
        state.phase = Phase::Transferred;
        state.ended_at = Some(now);
        self.end_validity();
        let listeners = std::mem::take(&mut state.listeners);
        let grant = Grant {
            owner: self.owner,
            sent: self.grant_sent_at,
            ambiguous_until: None,
            earlier_until: self.earlier_until,
            valid_until,
            stored_until: self.stored_until(),
            next_renewal: state.next_renewal,
            late_renewals_until: state.late_renewals_until,
            fences: state.fences,
            permit: state.permit.take(),
        };
        Some((grant, listeners))
    }

    /// How many holders of this process the next grant of the lock is expected to have, by the fences of this one.
    pub(crate) fn expected_holders(&self) -> ExpectedHolders {
        self.state.lock().fences.map(Fences::expected_holders).unwrap_or_default()
    }

    /// From now on the lease ends with a release at the store, not with a hand-off, so that its owner token names only this
    /// hold. `false` if the hold has ended.
    pub(crate) fn name_owner(&self) -> bool {
        let mut state = self.state.lock();
        let is_held = matches!(state.phase, Phase::Held | Phase::Renewing);
        state.is_named |= is_held;
        is_held
    }

    /// Whether a task has it, or will get it: the lock does not linger.
    pub(crate) fn has_holder(&self) -> bool {
        !self.offer.is_to_no_task()
    }

    /// A thread polls the body, or drops it, until the returned value is dropped, also by a panic. Before a poll, the validity
    /// of the lease is checked after this call. So a shutdown that ends validity sees that the body runs, or the body does not
    /// run.
    pub(crate) fn enter_body(&self) -> RunningBody<'_> {
        self.body_runs.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        RunningBody(Some(self))
    }

    /// Whether a thread is in the body. After a loss no further poll begins, so a body that runs long after it blocks its thread.
    pub(crate) fn body_runs(&self) -> bool {
        fence(Ordering::SeqCst);
        self.body_runs.load(Ordering::Acquire)
    }

    /// The caller has the lease. `false` if the grant was withdrawn before.
    pub(crate) fn pick_up(&self) -> bool {
        self.offer.pick_up()
    }

    /// Withdraws the grant. `false` if the caller has it, or it was withdrawn before.
    pub(crate) fn withdraw(&self) -> bool {
        self.offer.withdraw()
    }

    /// Whether no holder will release it when it is lost. The lock lingers, or the grant was not picked up and is withdrawn
    /// by this call.
    pub(crate) fn withdraw_if_unclaimed(&self) -> bool {
        self.offer.is_to_no_task() || self.withdraw()
    }

    pub(crate) fn is_held(&self) -> bool {
        self.is_held_at(self.clock.now())
    }

    /// Whether the lease is valid, at a moment that was read just now.
    pub(crate) fn is_held_at(&self, now: Instant) -> bool {
        now < self.valid_until()
    }

    /// Whether validity has run out without a transition to lost.
    pub(crate) fn is_overdue(&self) -> bool {
        let valid_until = self.valid_until();
        valid_until > Instant::ORIGIN && valid_until <= self.clock.now()
    }

    pub(crate) fn valid_for(&self) -> Duration {
        self.valid_until().since(self.clock.now())
    }

    /// From the start of the hold to its end, or to now.
    pub(crate) fn held_for(&self) -> Duration {
        let ended_at = self.state.lock().ended_at;
        ended_at.unwrap_or_else(|| self.clock.now()).since(self.hold_began_at)
    }

    /// From the call to the start of the hold.
    pub(crate) fn waited(&self) -> Duration {
        self.hold_began_at.since(self.requested_at)
    }

    /// When the store has forgotten the owner, even if no release reaches it.
    pub(crate) fn forgotten_at(&self) -> Instant {
        self.stored_until().max(self.earlier_until)
    }

    pub(crate) fn stored_until(&self) -> Instant {
        Instant::from_nanos(self.stored_until.load(Ordering::Acquire))
    }

    /// Records the position in the queue of renewals; returns the former one.
    pub(crate) fn schedule_at(&self, due: Instant) -> Instant {
        Instant::from_nanos(self.scheduled_at.swap(due.as_nanos(), Ordering::Relaxed))
    }

    /// The lease, as the store knows it.
    pub(crate) fn to_store(&self) -> LeaseRef {
        LeaseRef {
            keys: self.store_keys.clone(),
            owner: self.owner,
            ttl: self.ttl.stored(),
            min_hold: self.remaining_min_hold(),
        }
    }

    /// What is left of the `min_hold`.
    pub(crate) fn remaining_min_hold(&self) -> Duration {
        // Without a `min_hold` the clock is not read.
        if self.min_hold_until == self.hold_began_at {
            return Duration::ZERO;
        }
        self.min_hold_until.since(self.clock.now())
    }

    /// How long the store keeps the keys locked after a release by the holder. It is what is left of the `min_hold` if a
    /// body may have begun. After a loss it is what is left of the `lock_delay`. The end of a pool is no loss: the lease
    /// was valid until the holder ended.
    pub(crate) fn locked_after_release(&self) -> Duration {
        self.locked_after(|loss| loss != Loss::PoolClosed)
    }

    /// Like [`locked_after_release`](Self::locked_after_release), for a release without the holder, which may go on.
    pub(crate) fn locked_beside_holder(&self) -> Duration {
        self.locked_after(|_| true)
    }

    fn locked_after(&self, delays: impl FnOnce(Loss) -> bool) -> Duration {
        // No body has begun under it.
        if !self.offer.is_picked_up() {
            return Duration::ZERO;
        }
        let min_hold = self.remaining_min_hold();
        if self.ttl.delay().is_zero() || !self.loss().is_some_and(delays) {
            return min_hold;
        }
        min_hold.max(self.stored_until().since(self.clock.now()))
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        self.state.lock().loss
    }

    /// Whether another task of this process holds the lock by now.
    pub(crate) fn is_transferred(&self) -> bool {
        self.state.lock().phase == Phase::Transferred
    }

    /// Whether the hold was released, and not lost before.
    pub(crate) fn is_released(&self) -> bool {
        self.state.lock().ending() == Some(Ending::Released)
    }

    /// Resolves when the lease is lost or released. `listener` is the caller's number among the listeners, `None` at
    /// first.
    pub(super) fn poll_ended(&self, listener: &mut Option<u64>, cx: &Context<'_>) -> Poll<Ending> {
        let mut state = self.state.lock();
        if let Some(ending) = state.ending() {
            return Poll::Ready(ending);
        }
        let replaced = state.listeners.register(listener, cx.waker());
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    pub(super) fn forget_listener(&self, listener: Option<u64>) {
        let Some(id) = listener else { return };
        let mut state = self.state.lock();
        let removed = state.listeners.remove(id);
        drop(state);
        drop(removed);
    }

    /// Ends validity immediately, unless the lease is released already. Returns whether this call did.
    pub(crate) fn lose(&self, loss: Loss) -> bool {
        let mut state = self.state.lock();
        match state.phase {
            Phase::Held | Phase::Renewing => {
                let renewing = state.phase == Phase::Renewing;
                state.phase = if renewing { Phase::LostRenewing } else { Phase::Lost };
                state.loss = Some(loss);
                state.ended_at = Some(self.clock.now());
                self.end_validity();
                let listeners = std::mem::take(&mut state.listeners);
                // From here on only the store excludes other owners. A holder that never notices must not block the queue
                // of this process.
                let permit = state.permit.take();
                drop(state);
                // Before the listeners are woken: a release follows.
                self.report_loss(loss);
                drop(permit);
                self.on_hold_ended();
                if self.has_holder() {
                    self.metrics.record(Measurement::Lost(loss));
                }
                listeners.wake();
                true
            }
            Phase::Transferred
            | Phase::Lost
            | Phase::LostRenewing
            | Phase::ReleasePending
            | Phase::Releasing => false,
        }
    }

    /// Emits the event of `loss`. Not for a lock that lingers, which no task holds.
    pub(crate) fn report_loss(&self, loss: Loss) {
        if self.has_holder() {
            events::lost(self.origin(), self.owner.tag(), self.held_for(), loss);
        }
    }

    /// The store has answered the release with "not held". Returns whether this is the first sign of a loss.
    pub(crate) fn lose_before_release(&self) -> bool {
        let mut state = self.state.lock();
        let is_new = self.has_holder() && state.loss.is_none();
        if is_new {
            state.loss = Some(Loss::FoundAtRelease);
        }
        drop(state);
        if is_new {
            self.metrics.record(Measurement::Lost(Loss::FoundAtRelease));
        }
        is_new
    }

    /// Ends validity because its time is over. Returns whether this call did.
    pub(crate) fn expire(&self, now: Instant) -> bool {
        let cancel_margin = self.cancel_margin;
        let loss = match (self.limit, self.renew_every) {
            (Some(limit), _) if now + cancel_margin >= limit => Loss::MaxHold,
            (_, None) => Loss::TtlOver,
            _ => Loss::Expired,
        };
        self.lose(loss)
    }

    /// When to call [`poll_renewal`](Self::poll_renewal) next; `None` if never again.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due_in(&self.state.lock())
    }

    fn due_in(&self, state: &LeaseState) -> Option<Instant> {
        let cancel_at = self.cancel_at();
        match state.phase {
            Phase::Held => {
                let due = state.next_renewal.map_or(cancel_at, |next| next.min(cancel_at));
                Some(if self.offer.is_open() { due.min(self.offered_until) } else { due })
            }
            Phase::Renewing => Some(cancel_at),
            Phase::Transferred
            | Phase::Lost
            | Phase::LostRenewing
            | Phase::ReleasePending
            | Phase::Releasing => None,
        }
    }

    /// The body is cancelled `cancel_margin` before the lease expires, so that it has stopped by then.
    fn cancel_at(&self) -> Instant {
        self.valid_until().saturating_sub(self.cancel_margin)
    }

    /// Ends the hold and wakes the listeners. `true` for the one caller that has to send the release.
    pub(crate) fn begin_release(&self) -> bool {
        let mut state = self.state.lock();
        let was_lost = state.ended_at.is_some();
        state.phase = match state.phase {
            Phase::Held | Phase::Lost => Phase::Releasing,
            Phase::Renewing | Phase::LostRenewing => Phase::ReleasePending,
            Phase::Transferred | Phase::ReleasePending | Phase::Releasing => return false,
        };
        state.ended_at.get_or_insert_with(|| self.clock.now());
        self.end_validity();
        let listeners = std::mem::take(&mut state.listeners);
        drop(state);
        if !was_lost {
            self.on_hold_ended();
        }
        listeners.wake();
        true
    }

    /// After [`begin_release`](Self::begin_release): waits until no renewal is in flight, so that the release is the last request.
    pub(crate) async fn until_release_may_be_sent(&self) {
        loop {
            let settles = self.settles.notified();
            if self.state.lock().phase != Phase::ReleasePending {
                return;
            }
            settles.await;
        }
    }

    /// After [`begin_release`](Self::begin_release): whether no renewal is in flight.
    pub(crate) fn may_send_release(&self) -> bool {
        self.state.lock().phase != Phase::ReleasePending
    }

    /// Whether waiters of this process depend on the release.
    pub(crate) fn has_permit(&self) -> bool {
        self.state.lock().permit.is_some()
    }

    /// The keys that it has the permits of.
    pub(crate) fn permit_keys(&self) -> Option<Arc<[Key]>> {
        self.state.lock().permit.as_ref().map(|permit| permit.shared_keys().clone())
    }

    /// The permit of its keys, for the task that releases them.
    pub(crate) fn take_permit(&self) -> Option<KeyPermit> {
        self.state.lock().permit.take()
    }

    /// Makes the next renewal due at `now`: the key may have changed. It immediately follows a renewal that is in flight.
    pub(crate) fn expedite(&self, now: Instant) -> Expedited {
        let mut state = self.state.lock();
        match state.phase {
            Phase::Held if state.next_renewal.is_some() => {
                state.next_renewal = Some(now);
                Expedited::Due
            }
            Phase::Renewing => {
                state.changed_since = Some(now);
                Expedited::NotDue
            }
            Phase::Transferred => Expedited::Transferred,
            Phase::Held
            | Phase::Lost
            | Phase::LostRenewing
            | Phase::ReleasePending
            | Phase::Releasing => Expedited::NotDue,
        }
    }

    /// The lease as the holder of its key.
    pub(crate) fn holder(&self) -> Holder {
        Holder { lease: self.id, owner: self.owner, since: self.hold_began_at }
    }

    /// The call and the pool, for events.
    pub(crate) fn origin(&self) -> Origin<'_> {
        let LockSpec { label, span, .. } = &*self.spec;
        Origin { label, pool: &self.pool, span, metrics: &self.metrics }
    }

    /// Measures the end of the hold. Not for a lock that lingers, which no task holds.
    pub(crate) fn on_hold_ended(&self) {
        if self.has_holder() && self.metrics.is_on() {
            self.metrics.record(Measurement::HoldEnded(self.held_for()));
        }
    }

    /// From now on the lease is neither valid nor overdue.
    fn end_validity(&self) {
        self.valid_until.store(Instant::ORIGIN.as_nanos(), Ordering::Release);
    }

    fn valid_until(&self) -> Instant {
        Instant::from_nanos(self.valid_until.load(Ordering::Acquire))
    }

    fn extend_validity(&self, sent: Instant) {
        let until = sent + self.ttl.validity();
        let until = self.limit.map_or(until, |limit| limit.min(until));
        self.valid_until.fetch_max(until.as_nanos(), Ordering::AcqRel);
        self.store_until(sent);
    }

    fn store_until(&self, sent: Instant) {
        let until = (sent + self.ttl.stored()).max(self.min_hold_until);
        self.stored_until.fetch_max(until.as_nanos(), Ordering::AcqRel);
    }
}

mod renewals;
#[cfg(test)]
pub(crate) mod tests;
