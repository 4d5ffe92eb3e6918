//! The state machine of an acquire of several keys that are never free at the same time. It takes one key at a time, by the
//! wait queue of each. It does no I/O; [`multi_key`](super::multi_key) sends its requests.
//!
//! ```text
//! optimistic ── contended ──> stepwise: queued for the next key ── granted ──> one more key
//!   ^  all keys at once           ^                                              │ it waited, or all are granted
//!   │                             └────────── contended ──── final: all keys <───┘
//!   └── back off: lost, or the store has no queue                 └── granted: the lease
//! ```
//!
//! 1. **The request for all keys decides.** Only this request makes the lease and mints the fence. The store grants it only
//!    if each key is free or the owner's. No body runs under the partial hold, so losing it only costs time.
//! 2. **One order.** Each pass begins in the order of the keys, so that two requests do not wait for each other. After a
//!    release two may, but only for the shortest time (4).
//! 3. **Only in stores with wait queues.** Elsewhere a partial hold blocks other owners, and brings the next key no nearer.
//!    An owner that is not queued after all, because its user may not use channels, backs off and stays optimistic.
//! 4. **For a limited time.** An unused partial hold blocks other owners, and the holder of the next key may wait for it.
//!    So the keys are released [`KEEP_CONTENDED`] after another owner waits for one of them. In any case they are released
//!    after one second, or after the time that eight more keys take over a slow link. The owner stays in the queue of the
//!    next key with an empty hold, and is granted that key first. The time doubles with each release, so that a slow queue
//!    is served in the end. It does not double for a hold against the order, such as a hold of only that key. With two keys
//!    in demand, owners of each would then wait in the queue of the other.
//! 5. **In no queue with the lease.** All keys are requested only while the owner is in no queue. That is in the optimistic
//!    state, or after a grant of the key that it was queued for. Otherwise its release would notify its own owner token.
//! 6. **A new owner token after each back-off.** Requests under the old token are undone like those of any acquire, even if
//!    they reach the store later.
//!
//! Interleavings:
//!
//! - The reply of a step is lost: the request is repeated under the same token. The store knows the holder or the queued
//!   owner of each key.
//! - A reply is late and no longer valid: it is treated as lost.
//! - A request arrives after the task gave up or backed off: its token is released until it has been undone.
//! - The caller is dropped, the wait ends, or the pool shuts down, in any state: all keys are released under the token, one
//!   by one. The owner leaves each queue.
//! - A key of the partial hold expires, or is deleted or taken. The next renewal reports it, or validity ends, or the
//!   request for all keys is refused when no step is left.
//! - The process is killed or frozen: its queue positions are skipped, and the partial hold ends with its ttl.
//! - A notification arrives for a key whose permit the task owns: the task sends its request. For a token that was given
//!   up, the store passes the lock on, because the queues of this process do not know the token.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{AcquireRequest, LeaseRef, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::base::ttl::Ttl;

/// The progress of one acquire of several keys.
#[derive(Debug)]
pub(crate) struct Stepwise {
    state: StepState,
    /// Releases of a partial hold that did not lead to the lease.
    releases: u32,
    /// Of the last request that was answered.
    round_trip: Duration,
}

#[derive(Debug)]
enum StepState {
    /// Nothing is held, and all keys are requested together. Stepwise from this moment on; `None` means never.
    Optimistic(Option<Instant>),
    /// Only the key `at` is requested. `has_waited` once it was contended.
    Stepwise { at: usize, hold: Option<PartialHold>, has_waited: bool },
    /// All keys are requested together, and some are held.
    Final(PartialHold),
}

/// The keys that are held so far.
#[derive(Clone, Debug)]
struct PartialHold {
    /// Positions in the key list, in the order of their grants.
    keys: Vec<usize>,
    /// When the first was granted.
    since: Instant,
    /// Until when all are valid.
    valid_until: Instant,
    renew_at: Instant,
    /// When they are released because other owners wait.
    release_at: Option<Instant>,
}

/// How long a partial hold lasts while other owners wait for it. Doubles with each release, up to 1.6 s, if the hold is in order.
const KEEP_CONTENDED: Duration = Duration::from_millis(100);

const LONGEST_KEEP: Duration = Duration::from_millis(1_600);

/// The maximum length of a partial hold.
const LONGEST_HOLD: Duration = Duration::from_secs(16);

fn keep_contended(doublings: u32) -> Duration {
    // Clocks stand still under the test scheduler.
    #[cfg(test)]
    if crate::base::sync::scheduler::is_set() {
        return Duration::ZERO;
    }
    KEEP_CONTENDED * (1 << doublings.min(4))
}

/// What follows a refused request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Wait for the store.
    Wait,
    /// Send the next request immediately.
    Request,
    BackOff(BackOff),
}

/// Why everything is released and requested anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackOff {
    /// A key of the partial hold is lost.
    Lost,
    /// The partial hold has blocked other owners for its time.
    HeldTooLong,
    /// The store has no queue for the owner.
    NoQueue,
}

/// What a partial hold needs now.
#[derive(Debug)]
pub(crate) enum Upkeep {
    None,
    /// A renewal of this lease, within the time limit. Its answer goes to [`Stepwise::on_renewed`].
    Renew {
        lease: LeaseRef,
        time_limit: Duration,
    },
    BackOff(BackOff),
}

impl Stepwise {
    /// With `has_queues` the store has wait queues.
    pub(crate) fn new(spec: &LockSpec, has_queues: bool) -> Self {
        let policy = &spec.policy;
        // `retry_count` counts requests for all keys.
        let is_allowed = policy.waits() && policy.retry_count.is_none() && has_queues;
        let state = StepState::Optimistic(is_allowed.then_some(Instant::ORIGIN));
        Self { state, releases: 0, round_trip: Duration::ZERO }
    }

    /// `request` for all keys, or in its form for only the next key.
    pub(crate) fn next_request(&self, spec: &LockSpec, request: AcquireRequest) -> AcquireRequest {
        match self.step() {
            Some(at) => AcquireRequest {
                keys: spec.store_keys.iter().skip(at).take(1).cloned().collect(),
                // No body runs under a single key, so none has to outlive it.
                min_hold: Duration::ZERO,
                fencing: false,
                enqueue: true,
                ..request
            },
            None => request,
        }
    }

    /// The key that the next request is for, if it is for only one.
    pub(crate) fn step(&self) -> Option<usize> {
        match self.state {
            StepState::Stepwise { at, .. } => Some(at),
            StepState::Optimistic(_) | StepState::Final(_) => None,
        }
    }

    pub(crate) fn is_optimistic(&self) -> bool {
        matches!(self.state, StepState::Optimistic(_))
    }

    /// Whether the owner is in the store's queue of a key.
    pub(crate) fn is_queued(&self) -> bool {
        matches!(self.state, StepState::Stepwise { has_waited: true, .. })
    }

    /// Whether the key `at` is held, or is the only one requested.
    pub(crate) fn involves(&self, at: usize) -> bool {
        self.step() == Some(at) || self.held().contains(&at)
    }

    /// The store granted the next key, by a request sent at `sent`.
    pub(crate) fn on_step_acquired(&mut self, sent: Instant, spec: &LockSpec) {
        let optimistic = StepState::Optimistic(None);
        let StepState::Stepwise { at, hold, has_waited } =
            std::mem::replace(&mut self.state, optimistic)
        else {
            return;
        };
        let ttl = spec.policy.ttl;
        let mut hold = hold.unwrap_or_else(|| PartialHold {
            keys: Vec::new(),
            since: sent,
            valid_until: sent + ttl.validity(),
            renew_at: renew_at(sent, ttl),
            release_at: None,
        });
        hold.keys.push(at);
        // The awaited key may have been the only contended one.
        self.state = match hold.missing(spec) {
            Some(next) if !has_waited => {
                StepState::Stepwise { at: next, hold: Some(hold), has_waited: false }
            }
            _ => StepState::Final(hold),
        };
    }

    /// Another owner holds what was requested.
    pub(crate) fn on_contended(
        &mut self,
        wait_mode: WaitMode,
        now: Instant,
        spec: &LockSpec,
    ) -> NextStep {
        match &mut self.state {
            StepState::Optimistic(Some(from)) if *from <= now => {
                self.state = StepState::Stepwise { at: 0, hold: None, has_waited: false };
                NextStep::Request
            }
            StepState::Optimistic(_) => NextStep::Wait,
            StepState::Stepwise { has_waited, .. }
                if matches!(wait_mode, WaitMode::Queued { .. }) =>
            {
                *has_waited = true;
                NextStep::Wait
            }
            StepState::Stepwise { .. } => NextStep::BackOff(BackOff::NoQueue),
            StepState::Final(hold) => match hold.missing(spec) {
                Some(at) => {
                    let hold = Some(hold.clone());
                    self.state = StepState::Stepwise { at, hold, has_waited: false };
                    NextStep::Request
                }
                None => NextStep::BackOff(BackOff::Lost),
            },
        }
    }

    pub(crate) fn holds_any(&self) -> bool {
        self.hold().is_some()
    }

    /// The positions of the keys that are held.
    pub(crate) fn held(&self) -> &[usize] {
        self.hold().map_or(&[], |hold| &hold.keys)
    }

    /// The keys that are held.
    pub(crate) fn held_keys<'a>(&'a self, spec: &'a LockSpec) -> impl Iterator<Item = &'a Key> {
        self.held().iter().filter_map(|&at| spec.store_keys.get(at))
    }

    /// How long the last request took, which was answered.
    pub(crate) fn on_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = round_trip;
    }

    /// Other owners wait for a key that is held. The next key takes some round trips.
    pub(crate) fn on_wanted(&mut self, now: Instant) {
        let keep = keep_contended(self.doublings()).max(self.round_trip.saturating_mul(8));
        // Of two requests that wait for each other, jitter makes one release first.
        let keep = jitter::below(keep.min(LONGEST_KEEP));
        if let Some(hold) = self.hold_mut() {
            hold.release_at.get_or_insert(now + keep);
        }
    }

    /// The partial hold is released. The owner stays in the queue of the next key.
    pub(crate) fn on_hold_released(&mut self) {
        if let StepState::Stepwise { hold, .. } = &mut self.state {
            *hold = None;
            self.releases += 1;
        }
    }

    /// When to call [`upkeep`](Self::upkeep), if anything is held.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.hold().map(|hold| hold.renew_at.min(hold.valid_until).min(self.release_at(hold)))
    }

    /// What the partial hold needs at `now`.
    pub(crate) fn upkeep(
        &self,
        spec: &LockSpec,
        owner: Owner,
        now: Instant,
        request_timeout: Duration,
    ) -> Upkeep {
        let Some(hold) = self.hold() else { return Upkeep::None };
        if now >= self.release_at(hold) {
            return Upkeep::BackOff(BackOff::HeldTooLong);
        }
        if now >= hold.valid_until {
            return Upkeep::BackOff(BackOff::Lost);
        }
        if now < hold.renew_at {
            return Upkeep::None;
        }
        let keys: Arc<[_]> = self.held_keys(spec).cloned().collect();
        let lease = LeaseRef::new(keys, owner, spec.policy.ttl.stored());
        let time_limit = request_timeout.min(hold.valid_until.since(now));
        Upkeep::Renew { lease, time_limit }
    }

    /// The answer at `now` to a renewal that was sent at `sent`: whether the keys are held; `None` for no answer.
    pub(crate) fn on_renewed(
        &mut self,
        ttl: Ttl,
        sent: Instant,
        now: Instant,
        is_held: Option<bool>,
    ) -> Option<BackOff> {
        let hold = self.hold_mut()?;
        match is_held {
            Some(false) => return Some(BackOff::Lost),
            Some(true) => {
                hold.valid_until = sent + ttl.validity();
                hold.renew_at = renew_at(sent, ttl);
            }
            // Once more before validity ends. No body relies on it meanwhile.
            None => hold.renew_at = now + ttl.get() / 10,
        }
        (now >= hold.valid_until).then_some(BackOff::Lost)
    }

    /// All keys are released under the current owner token, and requested together under a new one.
    pub(crate) fn back_off(&mut self, now: Instant, reason: BackOff) {
        let held_for = self.hold().map_or(Duration::ZERO, |hold| now.since(hold.since));
        self.state = StepState::Optimistic(match reason {
            BackOff::Lost => Some(now),
            BackOff::HeldTooLong => Some(now + held_for),
            BackOff::NoQueue => None,
        });
        self.releases += 1;
    }

    fn hold(&self) -> Option<&PartialHold> {
        match &self.state {
            StepState::Optimistic(_) => None,
            StepState::Stepwise { hold, .. } => hold.as_ref(),
            StepState::Final(hold) => Some(hold),
        }
    }

    fn hold_mut(&mut self) -> Option<&mut PartialHold> {
        match &mut self.state {
            StepState::Optimistic(_) => None,
            StepState::Stepwise { hold, .. } => hold.as_mut(),
            StepState::Final(hold) => Some(hold),
        }
    }

    /// How many times the time of the partial hold has doubled.
    fn doublings(&self) -> u32 {
        if self.hold().is_some_and(PartialHold::is_in_order) { self.releases } else { 0 }
    }

    /// When the hold is released: soon after another owner waits for it, and after 1 s, up to 16 s, in any case. Each key is a
    /// round trip, so the time grows with the keys that are held.
    fn release_at(&self, hold: &PartialHold) -> Instant {
        let trips = u32::try_from(hold.keys.len() + 8).unwrap_or(u32::MAX);
        let longest = Duration::from_secs(1 << self.doublings().min(4));
        let keys_take = self.round_trip.saturating_mul(trips).min(LONGEST_HOLD);
        let longest = hold.since + longest.max(keys_take);
        hold.release_at.map_or(longest, |release_at| release_at.min(longest))
    }
}

impl PartialHold {
    /// Whether all keys before the last that is held are held too.
    fn is_in_order(&self) -> bool {
        self.keys.iter().all(|&at| at < self.keys.len())
    }

    /// The first key that is not held.
    fn missing(&self, spec: &LockSpec) -> Option<usize> {
        (0..spec.store_keys.len()).find(|at| !self.keys.contains(at))
    }
}

fn renew_at(sent: Instant, ttl: Ttl) -> Instant {
    sent + ttl.get() / 3
}

#[cfg(test)]
mod tests;
