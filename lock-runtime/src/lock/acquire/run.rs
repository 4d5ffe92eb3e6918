//! Asks the store for a lock until it grants, as long as somebody in line wants it. Lives on the driver, so
//! that it ends in order whatever becomes of those who wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{AcquireOutcome, FailureKind, Owner};
use crate::base::clock::Instant;
use crate::base::fence::Fences;
use crate::base::options::{Policy, Wait};
use crate::exec::events;
use crate::lease::lease::{Lease, Tenure};
use crate::lease::tracker::Errand;
use crate::lock::acquire::Ask;
use crate::lock::acquire::attempt::Place;
use crate::lock::acquire::first_request::{ask_store, silence};
use crate::lock::core::Engine;
use crate::lock::release::give_back;
use crate::queue::last_answer::Word;
use crate::queue::permit::{self, Turn};
use crate::queue::wait_queue::Wish;

/// More fences than this are not set aside for those in line: numbers that nobody uses make the counter
/// run ahead of the clock that carries it over a loss of the store's data.
const MOST_SPARE_FENCES: usize = 1000;

struct Pursuit {
    engine: Arc<Engine>,
    turn: Turn,
    place: Place,
    wake: Arc<Notify>,
    failing_since: Option<Instant>,
    /// Whether it has been told that somebody holds the lock.
    was_contended: bool,
    _errand: Errand,
}

/// Pursues the lock for the line of `turn`, under a new name.
pub(crate) fn start(engine: &Arc<Engine>, turn: Turn) {
    match Owner::random() {
        Ok(owner) => {
            let place = Place::new(owner, engine.clock.now());
            run(engine, turn, place, None);
        }
        Err(error) => permit::call(engine, engine.queue.dissolve(turn.keys(), &error)),
    }
}

/// Goes on under the name of `place`, after `pause` if nothing happens before.
pub(crate) fn resume(engine: &Arc<Engine>, turn: Turn, place: Place, pause: Duration) {
    // Otherwise the turn passes on as it drops.
    if !place.is_clean() || engine.queue.heir(turn.key()).is_some() {
        run(engine, turn, place, Some(pause));
    }
}

fn run(engine: &Arc<Engine>, turn: Turn, place: Place, pause: Option<Duration>) {
    // In the line before the store is asked, so that nothing that happens behind its answer is missed.
    let wake = engine.queue.stand(turn.key(), place.owner);
    let pursuit = Pursuit {
        engine: engine.clone(),
        turn,
        place,
        wake,
        failing_since: None,
        was_contended: false,
        _errand: engine.registry.clear_up(),
    };
    engine.run(pursuit.run(pause));
}

/// The one that is asked for now.
struct Applicant {
    id: u64,
    ask: Arc<Ask>,
    behind: usize,
    deadline: Option<Instant>,
}

impl Pursuit {
    async fn run(mut self, mut pause: Option<Duration>) {
        loop {
            if let Some(pause) = pause.take()
                && !self.wait(pause).await
            {
                break;
            }
            let permit = self.engine.admit(1).await;
            let Some(applicant) = self.applicant() else { break };
            let sent = self.engine.clock.now();
            let outcome = self.attempt(&applicant, sent).await;
            if let Some(permit) = permit {
                permit.answered();
            }
            match outcome {
                Ok((fences, contended)) => {
                    match self.deliver(&applicant, sent, fences, contended) {
                        Delivered::Yes => return,
                        // Somebody else is first by now, or nobody. The store knows the owner and grants again.
                        Delivered::No(back) => self = *back,
                    }
                }
                Err(until_next) => pause = Some(until_next),
            }
        }
        self.give_up().await;
    }

    /// Waits for `pause`, or until something happens. False if it is all over.
    async fn wait(&self, pause: Duration) -> bool {
        let engine = &self.engine;
        let mut until = engine.clock.now() + pause;
        loop {
            tokio::select! {
                biased;
                () = engine.registry.closing() => return false,
                () = self.wake.notified() => {
                    let look_at = engine.queue.take_look(self.turn.key()).unwrap_or(until);
                    until = until.min(look_at);
                }
                () = engine.clock.sleep_until(until) => return true,
            }
        }
    }

    /// Who wants the lock now, if anybody does.
    fn applicant(&self) -> Option<Applicant> {
        let front = self.engine.queue.front(self.turn.key())?;
        Some(Applicant {
            id: front.id,
            ask: front.ask,
            behind: front.behind,
            deadline: front.deadline,
        })
    }

    /// One request to the store, and what is known after it: a grant, or when to ask again.
    async fn attempt(
        &mut self,
        applicant: &Applicant,
        sent: Instant,
    ) -> Result<(Option<Fences>, Option<bool>), Duration> {
        let engine = self.engine.clone();
        let ask = &applicant.ask;
        let mut claim = ask.claim(self.place.owner);
        claim.attempt = self.place.attempt;
        let hands_on = !engine.local_handoff_limit.is_zero()
            && ask.policy.renew_every.is_some()
            && ask.policy.max_hold.is_none();
        if claim.fencing && hands_on {
            let spare = applicant.behind.min(MOST_SPARE_FENCES);
            claim.extra_fences = u32::try_from(spare).unwrap_or(0);
        }
        let believable = ask.policy.ttl.validity();
        let request_timeout = time_limit(&engine, &ask.policy, applicant.deadline, sent);
        engine.queue.spread(&ask.wire, &Word::Asked(sent));
        let answers = ask_store(&engine, &[claim], sent, request_timeout).await;
        let now = engine.clock.now();
        let error =
            match answers.into_iter().next().unwrap_or_else(|| Err(silence(request_timeout))) {
                Ok(AcquireOutcome::Acquired { fence, reserved_fences, contended })
                    if now < sent + believable =>
                {
                    return Ok((Fences::new(fence, reserved_fences), contended));
                }
                // Granted at the store, but so late that it cannot be believed any more.
                Ok(AcquireOutcome::Acquired { .. }) => silence(request_timeout),
                Ok(AcquireOutcome::Contended { expires_in, wait_mode }) => {
                    self.failing_since = None;
                    if !std::mem::replace(&mut self.was_contended, true) {
                        events::contended(&engine, ask, expires_in);
                    }
                    let pause = self.place.busy(&ask.policy, expires_in, wait_mode);
                    engine.queue.spread(&ask.wire, &Word::Taken { expires_in });
                    self.refuse(now, false);
                    return Err(pause);
                }
                Err(error) => error,
            };
        let pause = self.place.failed(&error, sent + ask.policy.kept_for());
        let refused = error.kind() == FailureKind::Rejected;
        self.failing_since.get_or_insert(sent);
        engine.queue.spread(&ask.wire, &Word::Failed(error));
        self.refuse(now, refused);
        Err(pause)
    }

    /// Sends away whom the last answer ends the wait of.
    fn refuse(&mut self, now: Instant, refused: bool) {
        // Without a deadline an outage still has to end the wait.
        let outage = self.engine.request_timeout.saturating_mul(10);
        let failing_since = self.failing_since;
        let is_cut_off = |deadline: Option<Instant>, since: Instant| {
            deadline.is_none()
                && failing_since.is_some_and(|failing| now.since(failing.max(since)) > outage)
        };
        let is_out_of_tries =
            |ask: &Ask, attempts| ask.policy.retry_count.is_some_and(|count| attempts > count);
        let nexts = self.engine.queue.refuse(self.turn.key(), now, |in_front, waiter| {
            let out_of_tries = match &waiter.wish {
                Wish::Lease { ask, .. } => is_out_of_tries(ask, waiter.attempts),
                Wish::Several(_) => false,
            };
            let is_first = in_front == 0 && matches!(waiter.wish, Wish::Lease { .. });
            is_cut_off(waiter.deadline, waiter.since) || (is_first && (refused || out_of_tries))
        });
        permit::call(&self.engine, nexts);
    }

    /// Gives the grant to the one that was asked for, or to whom it fits as well.
    fn deliver(
        mut self,
        applicant: &Applicant,
        sent: Instant,
        fences: Option<Fences>,
        contended: Option<bool>,
    ) -> Delivered {
        let policy = &applicant.ask.policy;
        let contended = Some(contended.unwrap_or(true));
        let fits = |ask: &Ask| {
            ask.policy.ttl == policy.ttl
                && ask.policy.min_hold == policy.min_hold
                && ask.policy.fencing == policy.fencing
        };
        let waiter = self.engine.queue.take_front(self.turn.key(), applicant.id, fits);
        let Some(waiter) = waiter else {
            // A grant that no waiter has taken is to be given back like one of an unanswered request.
            self.place.unanswered += 1;
            self.place.haunted_until = sent;
            return Delivered::No(Box::new(self));
        };
        let tenure = Tenure::new(&self.place, policy, sent, fences, vec![self.turn]);
        if let Wish::Lease { ask, reply } = waiter.wish {
            Lease::grant(&self.engine, ask, tenure, waiter.since, contended).deliver(reply);
        }
        Delivered::Yes
    }

    /// Nobody wants the lock any more, or nobody may. Takes back what the store may have granted, and the
    /// place in its line.
    async fn give_up(self) {
        let Self { engine, turn, place, _errand, .. } = self;
        let keys = Arc::from([turn.key().clone()]);
        drop(turn);
        give_back(&engine, place, keys, engine.defaults.ttl).await;
    }
}

enum Delivered {
    Yes,
    No(Box<Pursuit>),
}

/// How long an attempt may take that is made at `now`: the end of the wait is the limit, but for what a request
/// takes at least. A single try gets all the request_timeout that there is for one request.
pub(crate) fn time_limit(
    engine: &Engine,
    policy: &Policy,
    deadline: Option<Instant>,
    now: Instant,
) -> Duration {
    let waits = policy.wait != Wait::For(Duration::ZERO);
    let request_timeout = match deadline {
        Some(deadline) if waits => {
            engine.request_patience().min(deadline.since(now).max(engine.least()))
        }
        _ => engine.request_patience(),
    };
    request_timeout.min(policy.ttl.validity())
}
