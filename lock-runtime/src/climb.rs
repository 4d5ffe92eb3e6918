//! How a task comes by several keys where each is handed from one process to the next and is never free:
//! one by one, as somebody who stands in the line of each.
//!
//! ```text
//! below ── busy ──> standing in the line of the next key ── granted ──> it has one more
//!   ^  all at once      ^                                                 │ it waited, or that was the last
//!   │                   └────────── busy ────────── reaching for all <────┘
//!   └── come down: lost, held for too long, or the store keeps no line     └── granted: the lease
//! ```
//!
//! 1. **The claim for all keys decides.** It alone makes the lease and mints the fence, and the store grants it only
//!    if each key is free or the owner's. What was climbed before is a means to get there: nobody works under
//!    it, so to lose it costs time only.
//! 2. **One order.** Everybody climbs in the order of the keys, so two who climb do not wait for each other.
//! 3. **Only where the store keeps lines.** Elsewhere a key in the hand keeps others out and brings the next one no
//!    nearer. So nobody climbs in a store that does not say that it has lines, and who is not put in line
//!    after all, as its user may not use channels any more, comes down and does not climb again.
//! 4. **Not for long.** A key in the hand that is not used keeps others out, and somebody who holds the next key
//!    may himself be waiting for this one. So after a while everything is given back, and the task rests for as
//!    long as it had held something: half of the time at least is left to others. The while doubles, so that
//!    a slow line is served in the end.
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

use crate::acquire::Ask;
use crate::backend::{Claim, Held, LeaseRef, Owner, Standing};
use crate::clock::Instant;
use crate::engine::Engine;
use crate::error::LockError;
use crate::options::Ttl;
use crate::place::Place;
use crate::release::give_back;
use crate::sync::spawn;

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
    /// It asks for the next key alone. `waited` once that was busy.
    Standing { grip: Option<Grip>, waited: bool },
    /// It asks for all keys at once, and has some.
    Reaching(Grip),
}

/// The keys that a task has on its way up: the first `count`.
#[derive(Clone, Copy, Debug)]
struct Grip {
    count: usize,
    /// When the first was granted.
    since: Instant,
    /// Till when all can be believed in.
    valid_until: Instant,
    renew_at: Instant,
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
        let climbs =
            ask.policy.waits() && ask.policy.retry_count.is_none() && engine.store.has_lines();
        Self { stage: Stage::Below(climbs.then(|| Instant::from_nanos(0))), falls: 0 }
    }

    /// What the store is asked next on behalf of `owner`.
    pub(crate) fn claim(&self, ask: &Ask, owner: Owner) -> Claim {
        let claim = ask.claim(owner);
        match &self.stage {
            Stage::Standing { grip, .. } => {
                let at = grip.map_or(0, |grip| grip.count);
                let keys = ask.wire.iter().skip(at).take(1).cloned().collect();
                Claim { keys, fencing: false, in_line: true, ..claim }
            }
            Stage::Below(_) | Stage::Reaching(_) => claim,
        }
    }

    /// Whether the next claim is for one key.
    pub(crate) fn is_step(&self) -> bool {
        matches!(self.stage, Stage::Standing { .. })
    }

    /// The next key is the owner's, by a request sent at `sent`.
    pub(crate) fn step_up(&mut self, sent: Instant, ask: &Ask) {
        let Stage::Standing { grip, waited } = &self.stage else { return };
        let ttl = ask.policy.ttl;
        let grip = match grip {
            Some(grip) => Grip { count: grip.count + 1, ..*grip },
            None => Grip {
                count: 1,
                since: sent,
                valid_until: sent + ttl.belief(),
                renew_at: renew_at(sent, ttl),
            },
        };
        // The one that was waited for may have been the only busy one.
        self.stage = if *waited || grip.count == ask.wire.len() {
            Stage::Reaching(grip)
        } else {
            Stage::Standing { grip: Some(grip), waited: false }
        };
    }

    /// Somebody else has what was asked for.
    pub(crate) fn busy(&mut self, standing: Standing, now: Instant, ask: &Ask) -> Next {
        match &mut self.stage {
            Stage::Below(Some(climb_at)) if *climb_at <= now => {
                self.stage = Stage::Standing { grip: None, waited: false };
                Next::Ask
            }
            Stage::Below(_) => Next::Wait,
            Stage::Standing { waited, .. } if matches!(standing, Standing::InLine { .. }) => {
                *waited = true;
                Next::Wait
            }
            Stage::Standing { .. } => Next::Fall(Fall::NoLine),
            Stage::Reaching(grip) if grip.count < ask.wire.len() => {
                self.stage = Stage::Standing { grip: Some(*grip), waited: false };
                Next::Ask
            }
            Stage::Reaching(_) => Next::Fall(Fall::Lost),
        }
    }

    /// Whether it has one of the keys.
    pub(crate) fn has_any(&self) -> bool {
        self.grip().is_some()
    }

    /// When to look after what it has, if it has anything.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.grip().map(|grip| grip.renew_at.min(grip.valid_until).min(self.end(grip)))
    }

    /// Keeps what it has, if it is time for that. Why it has to come down, if so.
    pub(crate) async fn hold_on(
        &mut self,
        engine: &Engine,
        ask: &Ask,
        owner: Owner,
    ) -> Option<Fall> {
        let ttl = ask.policy.ttl;
        let grip = *self.grip()?;
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
        let keys = ask.wire.iter().take(grip.count).cloned().collect();
        let lease = [LeaseRef { keys, owner, ttl: ttl.get() }];
        let patience = engine.patience.min(grip.valid_until.since(sent));
        let answers = timeout(patience, engine.store.renew(&lease)).await.unwrap_or_default();
        let now = engine.clock.now();
        let grip = match answers.into_iter().next() {
            Some(Ok(Held::No)) => return Some(Fall::Lost),
            Some(Ok(Held::Yes)) => {
                Grip { valid_until: sent + ttl.belief(), renew_at: renew_at(sent, ttl), ..grip }
            }
            // Again before belief ends. Nothing is known meanwhile, and nobody relies on it.
            Some(Err(_)) | None => Grip { renew_at: now + ttl.get() / 10, ..grip },
        };
        if now >= grip.valid_until {
            return Some(Fall::Lost);
        }
        match &mut self.stage {
            Stage::Standing { grip: known, .. } => *known = Some(grip),
            Stage::Reaching(known) => *known = grip,
            Stage::Below(_) => {}
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
        engine.queue.stand_in_all(&ask.wire, anew.owner);
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

    /// When it has kept others out for long enough: after a second, and up to 16 of them.
    fn end(&self, grip: &Grip) -> Instant {
        grip.since + Duration::from_secs(1 << self.falls.min(4))
    }
}

fn renew_at(sent: Instant, ttl: Ttl) -> Instant {
    sent + ttl.get() / 3
}
