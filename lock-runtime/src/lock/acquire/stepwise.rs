//! How a task comes by several keys where each is handed from one process to the next and is never free:
//! one by one, as somebody who stands in the line of each.
//!
//! ```text
//! below ── busy ──> wait_mode in the line of the next key ── granted ──> it has one more
//!   ^  all at once      ^                                                 │ it waited, or that was the last
//!   │                   └────────── busy ────────── reaching for all <────┘
//!   └── come down: lost, or the store keeps no line                        └── granted: the lease
//! ```
//!
//! 1. **The claim for all keys decides.** It alone makes the lease and mints the fence, and the store grants it only
//!    if each key is free or the owner's. What was climbed before is a means to get there: nobody works under
//!    it, so to lose it costs time only.
//! 2. **One order.** Each climb begins in the order of the keys, so that two do not wait for each other. After a fall
//!    two may, but not for long (4).
//! 3. **Only where the store keeps lines.** Elsewhere a key in the hand keeps others out and brings the next one no
//!    nearer. So nobody climbs in a store that does not say that it has lines, and who is not put in line
//!    after all, as its user may not use channels any more, comes down and does not climb again.
//! 4. **Not for long.** A key in the hand that is not used keeps others out, and the holder of the next key may
//!    wait for this one. So [`KEEP_WANTED`] after others want one of them, or after a second, the keys in the hand go
//!    back. The owner stays in the line of the next key, with nothing in the hand, and then has that one first.
//!    The time doubles with each such fall, so that a slow line is served in the end.
//! 5. **In no line with the lease.** All are asked for at once only from where the owner stands in no line:
//!    below, or behind a grant of the key it stood for. Otherwise its release would call its own name.
//! 6. **A new name after each fall.** What was asked under the old one is given back like what any acquire leaves
//!    behind (`release::give_back`), also if it reaches the store later.
//!
//! What may come in between:
//!
//! - The reply of a step is lost: it is asked again under the same name; the store knows who has or awaits a key.
//! - A reply comes too late to be believed: as if it were lost.
//! - A request comes after the task gave up, or came down: its name is released until it has been met.
//! - The caller is gone, the wait is over, the pool shuts down, at any step: all keys are released under the name,
//!   each for itself, and with them its place in each line (`line.lua`).
//! - A climbed key expires, or is deleted or taken: the next renewal says so, or belief ends, or the claim for all
//!   is refused when there is nothing left to climb.
//! - The process is killed or frozen: its places are skipped, and what it had ends with the ttl, as that of a holder.
//! - A call comes for a key of which the task has the turn: it looks. For a name given up: it is passed on by
//!   `redis::ears`, as the lines of this process do not know the name any more.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{AcquireRequest, LeaseRef, LeaseStatus, Owner, WaitMode};
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::jitter;
use crate::base::options::Ttl;
use crate::base::sync::spawn;
use crate::lock::acquire::Ask;
use crate::lock::acquire::attempt::Place;
use crate::lock::core::Engine;
use crate::lock::release::give_back;

/// How far a task has come with its keys.
#[derive(Debug)]
pub(crate) struct Climb {
    stage: Stage,
    falls: u32,
}

#[derive(Debug)]
enum Stage {
    /// It has nothing and asks for all keys at once. Behind this moment it climbs; `None` is never.
    Below(Option<Instant>),
    /// It asks for the key `at` alone. `waited` once that was busy.
    Standing { at: usize, grip: Option<Grip>, waited: bool },
    /// It asks for all keys at once, and has some.
    Reaching(Grip),
}

/// The keys that a task has on its way up.
#[derive(Clone, Debug)]
struct Grip {
    /// Which of the keys, in the order in which they were had.
    had: Vec<usize>,
    /// When the first was granted.
    since: Instant,
    /// Till when all can be believed in.
    valid_until: Instant,
    renew_at: Instant,
    /// When they go back, as others want them.
    go_back_at: Option<Instant>,
}

/// How long keys in the hand are kept from others that want them: 100 ms, and up to 1.6 s after falls.
const KEEP_WANTED: Duration = Duration::from_millis(100);

const LONGEST_KEEP: Duration = Duration::from_millis(1_600);

fn keep_wanted(falls: u32) -> Duration {
    // Clocks stand still there.
    #[cfg(test)]
    if crate::base::sync::scheduler::is_set() {
        return Duration::ZERO;
    }
    KEEP_WANTED * (1 << falls.min(4))
}

/// What a busy answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for the store.
    Wait,
    /// Ask at once for what is next.
    Ask,
    /// Let go of everything.
    Fall(Fall),
}

/// Why a task comes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fall {
    /// A key is not its own any more.
    Lost,
    /// It has kept others out for long enough.
    TooLong,
    /// The store keeps no line for it.
    NoLine,
}

impl Climb {
    pub(crate) fn new(engine: &Engine, ask: &Ask) -> Self {
        // Who counts its tries makes them for all keys.
        let climbs = ask.policy.waits()
            && ask.policy.retry_count.is_none()
            && engine.store.capabilities().wait_queue;
        Self { stage: Stage::Below(climbs.then(|| Instant::from_nanos(0))), falls: 0 }
    }

    /// What the store is asked next on behalf of `owner`.
    pub(crate) fn claim(&self, ask: &Ask, owner: Owner) -> AcquireRequest {
        let claim = ask.claim(owner);
        match &self.stage {
            Stage::Standing { at, .. } => {
                let keys = ask.wire.iter().skip(*at).take(1).cloned().collect();
                // No body runs under a single key, so none has to outlive it.
                let min_hold = Duration::ZERO;
                AcquireRequest { keys, min_hold, fencing: false, enqueue: true, ..claim }
            }
            Stage::Below(_) | Stage::Reaching(_) => claim,
        }
    }

    /// Which key the next claim is for, if for one alone.
    pub(crate) fn step(&self) -> Option<usize> {
        match self.stage {
            Stage::Standing { at, .. } => Some(at),
            Stage::Below(_) | Stage::Reaching(_) => None,
        }
    }

    /// Whether it has nothing and asks for all keys at once.
    pub(crate) fn is_below(&self) -> bool {
        matches!(self.stage, Stage::Below(_))
    }

    /// Whether it stands in the line of a key.
    pub(crate) fn is_standing(&self) -> bool {
        matches!(self.stage, Stage::Standing { waited: true, .. })
    }

    /// Whether it has the key `at`, or asks for it alone.
    pub(crate) fn is_concerned_with(&self, at: usize) -> bool {
        self.step() == Some(at) || self.had().contains(&at)
    }

    /// The next key is the owner's, by a request sent at `sent`.
    pub(crate) fn step_up(&mut self, sent: Instant, ask: &Ask) {
        let below = Stage::Below(None);
        let Stage::Standing { at, grip, waited } = std::mem::replace(&mut self.stage, below) else {
            return;
        };
        let ttl = ask.policy.ttl;
        let mut grip = grip.unwrap_or_else(|| Grip {
            had: Vec::new(),
            since: sent,
            valid_until: sent + ttl.validity(),
            renew_at: renew_at(sent, ttl),
            go_back_at: None,
        });
        grip.had.push(at);
        // The one that was waited for may have been the only busy one.
        self.stage = match grip.missing(ask) {
            Some(next) if !waited => Stage::Standing { at: next, grip: Some(grip), waited: false },
            _ => Stage::Reaching(grip),
        };
    }

    /// Somebody else has what was asked for.
    pub(crate) fn busy(&mut self, wait_mode: WaitMode, now: Instant, ask: &Ask) -> Next {
        match &mut self.stage {
            Stage::Below(Some(climb_at)) if *climb_at <= now => {
                self.stage = Stage::Standing { at: 0, grip: None, waited: false };
                Next::Ask
            }
            Stage::Below(_) => Next::Wait,
            Stage::Standing { waited, .. } if matches!(wait_mode, WaitMode::Queued { .. }) => {
                *waited = true;
                Next::Wait
            }
            Stage::Standing { .. } => Next::Fall(Fall::NoLine),
            Stage::Reaching(grip) => match grip.missing(ask) {
                Some(at) => {
                    let grip = Some(grip.clone());
                    self.stage = Stage::Standing { at, grip, waited: false };
                    Next::Ask
                }
                None => Next::Fall(Fall::Lost),
            },
        }
    }

    /// Whether it has one of the keys.
    pub(crate) fn has_any(&self) -> bool {
        self.grip().is_some()
    }

    /// Which of the keys it has.
    pub(crate) fn had(&self) -> &[usize] {
        self.grip().map_or(&[], |grip| &grip.had)
    }

    /// Others want a key that it has. `round_trip` is how long the last answer took: a few of them are needed to
    /// come by the next key.
    pub(crate) fn wanted(&mut self, now: Instant, round_trip: Duration) {
        let keep = keep_wanted(self.falls).max(round_trip.saturating_mul(8)).min(LONGEST_KEEP);
        // Of two that want what the other one has, one gives way first.
        let keep = jitter::below(keep);
        if let Some(grip) = self.grip_mut() {
            grip.go_back_at.get_or_insert(now + keep);
        }
    }

    /// What it has goes back, and it stands in the line of the next key with nothing.
    pub(crate) fn let_go(&mut self) {
        if let Stage::Standing { grip, .. } = &mut self.stage {
            *grip = None;
            self.falls += 1;
        }
    }

    /// When to look after what it has, if it has anything.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.grip().map(|grip| grip.renew_at.min(grip.valid_until).min(self.end(grip)))
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// Keeps what it has, if it is time for that. Why it has to come down, if so.
    pub(crate) async fn hold_on(
        &mut self,
        engine: &Engine,
        ask: &Ask,
        owner: Owner,
    ) -> Option<Fall> {
        let ttl = ask.policy.ttl;
        let grip = self.grip()?.clone();
        let sent = engine.clock.now();
        if sent >= self.end(&grip) {
            return Some(Fall::TooLong);
        }
        if sent >= grip.valid_until {
            return Some(Fall::Lost);
        }
        if sent < grip.renew_at {
            return None;
        }
        let keys = grip.had.iter().filter_map(|&at| ask.wire.get(at)).cloned().collect();
        let lease = [LeaseRef { keys, owner, ttl: ttl.get(), min_hold: Duration::ZERO }];
        let request_timeout = engine.request_timeout.min(grip.valid_until.since(sent));
        let answers =
            timeout(request_timeout, engine.store.renew(&lease)).await.unwrap_or_default();
        let now = engine.clock.now();
        let grip = match answers.into_iter().next() {
            Some(Ok(LeaseStatus::NotHeld)) => return Some(Fall::Lost),
            Some(Ok(LeaseStatus::Held)) => {
                Grip { valid_until: sent + ttl.validity(), renew_at: renew_at(sent, ttl), ..grip }
            }
            // Again before belief ends. Nothing is known meanwhile, and nobody relies on it.
            Some(Err(_)) | None => Grip { renew_at: now + ttl.get() / 10, ..grip },
        };
        if now >= grip.valid_until {
            return Some(Fall::Lost);
        }
        if let Some(known) = self.grip_mut() {
            *known = grip;
        }
        None
    }

    /// Gives back all that was asked for under the name of `place`, which is a new one from now on.
    pub(crate) fn come_down(
        &mut self,
        engine: &Arc<Engine>,
        ask: &Ask,
        place: &mut Place,
        fall: Fall,
    ) -> Result<(), LockError> {
        let now = engine.clock.now();
        let held = self.grip().map_or(Duration::ZERO, |grip| now.since(grip.since));
        let anew = place.anew(Owner::random()?);
        let old = std::mem::replace(place, anew);
        self.stage = Stage::Below(match fall {
            Fall::Lost => Some(now),
            Fall::TooLong => Some(now + held),
            Fall::NoLine => None,
        });
        self.falls += 1;
        let (engine, keys, ttl) = (engine.clone(), ask.wire.clone(), ask.policy.ttl.get());
        let errand = engine.registry.clear_up();
        spawn(async move {
            give_back(&engine, old, keys, ttl).await;
            drop(errand);
        });
        Ok(())
    }

    fn grip(&self) -> Option<&Grip> {
        match &self.stage {
            Stage::Below(_) => None,
            Stage::Standing { grip, .. } => grip.as_ref(),
            Stage::Reaching(grip) => Some(grip),
        }
    }

    fn grip_mut(&mut self) -> Option<&mut Grip> {
        match &mut self.stage {
            Stage::Below(_) => None,
            Stage::Standing { grip, .. } => grip.as_mut(),
            Stage::Reaching(grip) => Some(grip),
        }
    }

    /// When it has kept others out for long enough: soon after it was told of any, and in any case after a second,
    /// and up to 16 of them.
    fn end(&self, grip: &Grip) -> Instant {
        let end = grip.since + Duration::from_secs(1 << self.falls.min(4));
        grip.go_back_at.map_or(end, |go_back_at| go_back_at.min(end))
    }
}

impl Grip {
    /// The first key that it has not.
    fn missing(&self, ask: &Ask) -> Option<usize> {
        (0..ask.wire.len()).find(|at| !self.had.contains(at))
    }
}

fn renew_at(sent: Instant, ttl: Ttl) -> Instant {
    sent + ttl.get() / 3
}
