//! One grant: how long it may be believed, and what became of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{LeaseRef, Owner, Release};
use crate::clock::{Clock, Instant};
use crate::fence::Fence;
use crate::key::Key;
use crate::options::Policy;
use crate::queue::Turn;
use crate::site::Subject;

/// A grant of the store and what this process believes of it.
///
/// Belief ends by the local clock alone, at the send time of the last confirmed request plus the ttl
/// less the drift. No answer is needed to stop believing, and `is_held` reads nothing but the clock.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) id: u64,
    pub(crate) pool: Arc<str>,
    pub(crate) subject: Subject,
    /// The keys as the caller named them.
    pub(crate) keys: Arc<[Key]>,
    /// The keys as the store knows them.
    pub(crate) wire: Arc<[Key]>,
    pub(crate) owner: Owner,
    pub(crate) fence: Option<Fence>,
    pub(crate) policy: Policy,
    pub(crate) granted_at: Instant,
    /// How long the store may be holding requests of this acquire that were never answered.
    pub(crate) haunted_until: Option<Instant>,
    clock: Clock,
    /// End of belief in nanoseconds of the clock; 0 once the lease is lost or let go.
    valid_until: AtomicU64,
    /// When the store itself forgets the lease at the latest.
    stored_until: AtomicU64,
    /// Where the watchdog has filed the lease.
    filed_at: AtomicU64,
    state: Mutex<State>,
    renewed: Notify,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Why belief ended before the holder let go, if it did.
    loss: Option<Loss>,
    next_renewal: Option<Instant>,
    listeners: Vec<(u64, Waker)>,
    last_listener: u64,
    turns: Vec<Turn>,
}

/// The life of a lease. Every request to the store is sent in the phase that names it, and only one
/// place changes into that phase; so nothing can be renewed that is being released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    /// Held, with a renewal on its way.
    Renewing,
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

/// What the watchdog has to do with a lease now.
#[derive(Debug)]
pub(crate) enum Beat {
    /// Renew it, and look again at this moment.
    Renew(Instant),
    /// Nothing before this moment.
    Wait(Instant),
    /// It has just been lost.
    Lost(Loss),
    /// It needs no watchdog any more.
    Over,
}

/// What a new lease is made of.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) id: u64,
    pub(crate) pool: Arc<str>,
    pub(crate) subject: Subject,
    pub(crate) keys: Arc<[Key]>,
    pub(crate) wire: Arc<[Key]>,
    pub(crate) owner: Owner,
    pub(crate) fence: Option<Fence>,
    pub(crate) policy: Policy,
    pub(crate) haunted_until: Option<Instant>,
    pub(crate) turns: Vec<Turn>,
}

impl Lease {
    /// A lease from a grant whose request was sent at `sent`.
    pub(crate) fn new(grant: Grant, sent: Instant, clock: Clock) -> Self {
        let lease = Self {
            id: grant.id,
            pool: grant.pool,
            subject: grant.subject,
            keys: grant.keys,
            wire: grant.wire,
            owner: grant.owner,
            fence: grant.fence,
            policy: grant.policy,
            granted_at: clock.now(),
            haunted_until: grant.haunted_until,
            clock,
            valid_until: AtomicU64::new(0),
            stored_until: AtomicU64::new(0),
            filed_at: AtomicU64::new(0),
            state: Mutex::new(State {
                phase: Phase::Held,
                loss: None,
                next_renewal: grant.policy.renew_every.map(|every| sent + every),
                listeners: Vec::new(),
                last_listener: 0,
                turns: grant.turns,
            }),
            renewed: Notify::new(),
        };
        lease.believe_from(sent);
        lease
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
        LeaseRef { keys: self.wire.clone(), owner: self.owner, ttl: self.policy.ttl.get() }
    }

    /// What frees the lease: now, or at the end of its `min_hold`.
    pub(crate) fn to_release(&self) -> Release {
        let keep_for = self.policy.min_hold.saturating_sub(self.held_for());
        Release { lease: self.to_store(), keep_for }
    }

    pub(crate) fn loss(&self) -> Option<Loss> {
        self.state().loss
    }

    /// Resolves when the lease is lost. `listener` is the caller's place among the listeners, `None`
    /// at first.
    pub(crate) fn poll_lost(&self, listener: &mut Option<u64>, cx: &Context<'_>) -> Poll<Loss> {
        let mut state = self.state();
        if let Some(loss) = state.loss {
            return Poll::Ready(loss);
        }
        let known = listener.and_then(|id| state.listeners.iter_mut().find(|known| known.0 == id));
        if let Some((_, waker)) = known {
            waker.clone_from(cx.waker());
            return Poll::Pending;
        }
        state.last_listener += 1;
        let id = state.last_listener;
        state.listeners.push((id, cx.waker().clone()));
        *listener = Some(id);
        Poll::Pending
    }

    pub(crate) fn forget_listener(&self, listener: Option<u64>) {
        if let Some(id) = listener {
            self.state().listeners.retain(|known| known.0 != id);
        }
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
                for (_, waker) in listeners {
                    waker.wake();
                }
                true
            }
            Phase::Lost | Phase::LostRenewing | Phase::Leaving | Phase::Releasing => false,
        }
    }

    /// Ends belief because its time is over. The loss, if this call is the one that ended it.
    pub(crate) fn lapse(&self, now: Instant) -> Option<Loss> {
        let notice = self.policy.notice();
        let loss = match (self.policy.max_hold, self.policy.renew_every) {
            (Some(max_hold), _) if now + notice >= self.granted_at + max_hold => Loss::MaxHold,
            (_, None) => Loss::TtlOver,
            _ => Loss::Expired,
        };
        self.lose(loss).then_some(loss)
    }

    /// When the watchdog has to look at the lease next; `None` if never again.
    pub(crate) fn due(&self) -> Option<Instant> {
        let state = self.state();
        match state.phase {
            Phase::Held => {
                Some(state.next_renewal.map_or(self.last_call(), |next| next.min(self.last_call())))
            }
            Phase::Renewing => Some(self.last_call()),
            Phase::Lost | Phase::LostRenewing | Phase::Leaving | Phase::Releasing => None,
        }
    }

    /// What is to be done at `now`. [`Beat::Renew`] puts the lease into the phase in which the caller
    /// sends a renewal and then reports to [`renewed`](Self::renewed) or
    /// [`not_renewed`](Self::not_renewed).
    pub(crate) fn beat(&self, now: Instant) -> Beat {
        let Some(due) = self.due() else { return Beat::Over };
        if due > now {
            return Beat::Wait(due);
        }
        let last_call = self.last_call();
        if now >= last_call {
            return self.lapse(now).map_or(Beat::Over, Beat::Lost);
        }
        let mut state = self.state();
        if state.phase != Phase::Held {
            return Beat::Wait(last_call);
        }
        state.phase = Phase::Renewing;
        Beat::Renew(last_call)
    }

    /// A body needs a moment to end, and has to have ended when belief does.
    fn last_call(&self) -> Instant {
        self.valid_until().saturating_sub(self.policy.notice())
    }

    /// The store has confirmed a renewal that was sent at `sent`; the next one is due after `pause`.
    pub(crate) fn renewed(&self, sent: Instant, pause: Duration) {
        self.renewal_over(sent, |state| {
            self.believe_from(sent);
            state.next_renewal = Some(sent + pause);
        });
    }

    /// A renewal failed for a reason that may pass; it is tried again after `pause`.
    pub(crate) fn not_renewed(&self, now: Instant, pause: Duration) {
        self.renewal_over(now, |state| state.next_renewal = Some(now + pause));
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
            Phase::Held | Phase::Lost | Phase::Releasing => return,
        }
        self.store_until(stored_from);
    }

    /// The holder lets go. True for the one caller that has to see to the release.
    pub(crate) fn let_go(&self) -> bool {
        let mut state = self.state();
        state.phase = match state.phase {
            Phase::Held | Phase::Lost => Phase::Releasing,
            Phase::Renewing | Phase::LostRenewing => Phase::Leaving,
            Phase::Leaving | Phase::Releasing => return false,
        };
        self.valid_until.store(0, Ordering::Release);
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

    /// Gives the turns back, so that the next task of this process may ask for the keys.
    pub(crate) fn pass_turns(&self) {
        let turns = std::mem::take(&mut self.state().turns);
        drop(turns);
    }

    fn valid_until(&self) -> Instant {
        Instant::from_nanos(self.valid_until.load(Ordering::Acquire))
    }

    fn believe_from(&self, sent: Instant) {
        let mut until = sent + self.policy.ttl.belief();
        if let Some(max_hold) = self.policy.max_hold {
            until = until.min(self.granted_at + max_hold);
        }
        self.valid_until.fetch_max(until.as_nanos(), Ordering::AcqRel);
        self.store_until(sent);
    }

    fn store_until(&self, sent: Instant) {
        self.stored_until.fetch_max((sent + self.policy.ttl.get()).as_nanos(), Ordering::AcqRel);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
