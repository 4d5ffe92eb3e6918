//! Asks the store for a lock until it grants, as long as somebody in line wants it. Lives on the driver, so
//! that it ends in order whatever becomes of those who wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::acquire::Ask;
use crate::backend::{Attempt, Failure, Owner, Standing};
use crate::climb::{Climb, Fall, Next};
use crate::clock::Instant;
use crate::engine::Engine;
use crate::error::LockError;
use crate::fence::Fences;
use crate::guard::LockGuard;
use crate::key::Key;
use crate::lease::{Lease, Tenure};
use crate::observe;
use crate::options::Wait;
use crate::outbox::{ask_store, silence};
use crate::place::Place;
use crate::queue::{Newcomer, Wish};
use crate::registry::Errand;
use crate::release::give_back;
use crate::turn::Turn;
use crate::word::Word;

/// More fences than this are not set aside for those in line: numbers that nobody uses make the counter
/// run ahead of the clock that carries it over a loss of the store's data.
const MOST_SPARE_FENCES: usize = 1000;

/// How long an answer may be late for what has to be given back before.
const AT_ONCE: Duration = Duration::from_millis(250);

struct Pursuit {
    engine: Arc<Engine>,
    client: Client,
    place: Place,
    wake: Arc<Notify>,
    failing_since: Option<Instant>,
    /// Whether it has been told that somebody holds the lock.
    contended: bool,
    _errand: Errand,
}

/// On whose behalf the store is asked.
enum Client {
    /// Whoever is first in the line of one key.
    Line(Turn),
    /// One task that wants several keys.
    Task(Task),
}

struct Task {
    ask: Arc<Ask>,
    newcomer: Newcomer,
    turns: Vec<Turn>,
    reply: oneshot::Sender<Result<LockGuard, LockError>>,
    climb: Climb,
    /// Whether the last answer has ended the wait.
    over: bool,
}

/// Pursues the lock for the line of `turn`, under a new name.
pub(crate) fn start(engine: &Arc<Engine>, turn: Turn) {
    match Owner::random() {
        Ok(owner) => {
            let place = Place::new(owner, engine.clock.now());
            run(engine, Client::Line(turn), place, None);
        }
        Err(error) => engine.queue.dissolve(turn.key(), &error),
    }
}

/// Goes on under the name of `place`, after `pause` if nothing happens before.
pub(crate) fn resume(engine: &Arc<Engine>, turn: Turn, place: Place, pause: Duration) {
    // Otherwise the turn passes on as it drops.
    if !place.is_clean() || engine.queue.heir(turn.key()).is_some() {
        run(engine, Client::Line(turn), place, Some(pause));
    }
}

/// Pursues several keys for one task that has all their turns.
pub(crate) fn start_for_task(
    engine: &Arc<Engine>,
    ask: Arc<Ask>,
    newcomer: Newcomer,
    turns: Vec<Turn>,
    reply: oneshot::Sender<Result<LockGuard, LockError>>,
) -> Result<(), LockError> {
    let place = Place::new(Owner::random()?, newcomer.now);
    let climb = Climb::new(engine, &ask);
    let task = Task { ask, newcomer, turns, reply, climb, over: false };
    run(engine, Client::Task(task), place, None);
    Ok(())
}

fn run(engine: &Arc<Engine>, client: Client, place: Place, pause: Option<Duration>) {
    // In the line before the store is asked, so that nothing that happens behind its answer is missed.
    let wake = match &client {
        Client::Line(turn) => engine.queue.stand(turn.key(), place.owner),
        Client::Task(task) => {
            let wake = Arc::default();
            engine.queue.wake_by(&task.ask.wire, &wake);
            engine.queue.stand_in_all(&task.ask.wire, place.owner);
            wake
        }
    };
    let pursuit = Pursuit {
        engine: engine.clone(),
        client,
        place,
        wake,
        failing_since: None,
        contended: false,
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
            self.hold_on().await;
            let Some(applicant) = self.applicant() else { break };
            let sent = self.engine.clock.now();
            match self.attempt(&applicant, sent).await {
                Ok((fences, wanted)) => match self.deliver(&applicant, sent, fences, wanted) {
                    Delivered::Yes => return,
                    // Somebody else is first by now, or nobody. The store knows the owner and grants again.
                    Delivered::No(back) => self = *back,
                },
                Err(until_next) => pause = Some(until_next),
            }
        }
        self.give_up().await;
    }

    /// Waits for `pause`, or until something happens. False if it is all over.
    async fn wait(&mut self, pause: Duration) -> bool {
        let engine = &self.engine;
        let mut until = engine.clock.now() + pause;
        let one;
        let (keys, gone): (&[Key], _) = match &mut self.client {
            Client::Line(turn) => {
                one = [turn.key().clone()];
                (&one, None)
            }
            Client::Task(task) => {
                until = task.newcomer.deadline.map_or(until, |deadline| until.min(deadline));
                until = task.climb.due().map_or(until, |due| until.min(due));
                (&task.ask.wire, Some(&mut task.reply))
            }
        };
        let gone = async {
            match gone {
                Some(reply) => reply.closed().await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(gone);
        loop {
            tokio::select! {
                biased;
                () = engine.registry.closing() => return false,
                () = &mut gone => return false,
                () = self.wake.notified() => {
                    let look_at = engine.queue.take_look(keys).unwrap_or(until);
                    until = until.min(look_at);
                }
                () = engine.clock.sleep_until(until) => return true,
            }
        }
    }

    /// Looks after the keys that a climbing task has.
    async fn hold_on(&mut self) {
        let Client::Task(task) = &mut self.client else { return };
        let fall = task.climb.hold_on(&self.engine, &task.ask, self.place.owner).await;
        if let Some(fall) = fall {
            self.come_down(fall);
        }
    }

    fn come_down(&mut self, fall: Fall) {
        let Client::Task(task) = &mut self.client else { return };
        let down = task.climb.come_down(&self.engine, &task.ask, &mut self.place, fall);
        // Without a new name the old one is given back at the end of it all.
        task.over |= down.is_err();
    }

    /// Who wants the lock now, if anybody does.
    fn applicant(&self) -> Option<Applicant> {
        match &self.client {
            Client::Line(turn) => {
                let front = self.engine.queue.front(turn.key())?;
                Some(Applicant {
                    id: front.id,
                    ask: front.ask,
                    behind: front.behind,
                    deadline: front.deadline,
                })
            }
            Client::Task(task) => {
                let (ask, deadline) = (task.ask.clone(), task.newcomer.deadline);
                let late = self.place.attempt > 0
                    && deadline.is_some_and(|deadline| self.engine.clock.now() >= deadline);
                let over = late || task.over || task.reply.is_closed();
                (!over).then_some(Applicant { id: 0, ask, behind: 0, deadline })
            }
        }
    }

    /// One request to the store, and what is known after it: a grant, or when to ask again.
    async fn attempt(
        &mut self,
        applicant: &Applicant,
        sent: Instant,
    ) -> Result<(Option<Fences>, Option<bool>), Duration> {
        let engine = self.engine.clone();
        let ask = &applicant.ask;
        let (mut claim, is_step) = match &self.client {
            Client::Line(_) => (ask.claim(self.place.owner), false),
            Client::Task(task) => (task.climb.claim(ask, self.place.owner), task.climb.is_step()),
        };
        // One of several keys may be the owner's from now on.
        self.place.in_line |= is_step;
        claim.attempt = self.place.attempt;
        let hands_on = !engine.handoff_slice.is_zero()
            && ask.policy.renew_every.is_some()
            && ask.policy.max_hold.is_none();
        if claim.fencing && hands_on {
            let spare = applicant.behind.min(MOST_SPARE_FENCES);
            claim.spare_fences = u32::try_from(spare).unwrap_or(0);
        }
        let believable = ask.policy.ttl.belief();
        let patience = self.patience(applicant, sent).min(believable);
        engine.queue.spread(&ask.wire, &Word::Asked(sent));
        let answers = ask_store(&engine, &[claim], sent, patience).await;
        let now = engine.clock.now();
        let error = match answers.into_iter().next().unwrap_or_else(|| Err(silence(patience))) {
            Ok(Attempt::Granted { .. }) if is_step && now < sent + believable => {
                self.failing_since = None;
                if let Client::Task(task) = &mut self.client {
                    task.climb.step_up(sent, ask);
                }
                self.place.attempt += 1;
                engine.queue.spread(&ask.wire, &Word::Taken { free_in: None });
                return Err(Duration::ZERO);
            }
            Ok(Attempt::Granted { fence, spare_fences, wanted }) if now < sent + believable => {
                return Ok((Fences::new(fence, spare_fences), wanted));
            }
            // Granted at the store, but so late that it cannot be believed any more.
            Ok(Attempt::Granted { .. }) => silence(patience),
            Ok(Attempt::Busy { free_in, standing }) => {
                self.failing_since = None;
                if !std::mem::replace(&mut self.contended, true) {
                    observe::contended(&engine, ask, free_in);
                }
                let pause = self.place.busy(&ask.policy, free_in, standing);
                engine.queue.spread(&ask.wire, &Word::Taken { free_in });
                self.refuse(now, false);
                return Err(self.refused_step(standing, now).unwrap_or(pause));
            }
            Err(error) => error,
        };
        let pause = self.place.failed(&error, sent + ask.policy.ttl.get());
        let refused = error.failure() == Failure::Refused;
        self.failing_since.get_or_insert(sent);
        engine.queue.spread(&ask.wire, &Word::Failed(error));
        self.refuse(now, refused);
        Err(pause)
    }

    /// What a task that wants several keys does about a busy one; when, if not as the store says.
    fn refused_step(&mut self, standing: Standing, now: Instant) -> Option<Duration> {
        let Client::Task(task) = &mut self.client else { return None };
        match task.climb.busy(standing, now, &task.ask) {
            Next::Wait => None,
            Next::Ask => Some(Duration::ZERO),
            Next::Fall(fall) => {
                self.come_down(fall);
                None
            }
        }
    }

    /// How long this attempt may take: the end of the wait is the limit, but for what a request takes at
    /// least. A single try gets all the patience that there is for one request.
    fn patience(&self, applicant: &Applicant, now: Instant) -> Duration {
        let patience = self.engine.patience;
        let waits = applicant.ask.policy.wait != Wait::For(Duration::ZERO);
        match applicant.deadline {
            Some(deadline) if waits => patience.min(deadline.since(now).max(self.engine.least())),
            _ => patience,
        }
    }

    /// Sends away whom the last answer ends the wait of.
    fn refuse(&mut self, now: Instant, refused: bool) {
        // Without a deadline an outage still has to end the wait.
        let outage = self.engine.patience.saturating_mul(10);
        let failing_since = self.failing_since;
        let is_cut_off = |deadline: Option<Instant>, since: Instant| {
            deadline.is_none()
                && failing_since.is_some_and(|failing| now.since(failing.max(since)) > outage)
        };
        let is_out_of_tries =
            |ask: &Ask, attempts| ask.policy.retry_count.is_some_and(|count| attempts > count);
        match &mut self.client {
            Client::Line(turn) => self.engine.queue.refuse(turn.key(), now, |at, waiter| {
                let out_of_tries = match &waiter.wish {
                    Wish::Lease { ask, .. } => is_out_of_tries(ask, waiter.attempts),
                    Wish::Turn { .. } => false,
                };
                is_cut_off(waiter.deadline, waiter.since) || (at == 0 && (refused || out_of_tries))
            }),
            Client::Task(task) => {
                let Newcomer { now: since, deadline, .. } = task.newcomer;
                task.over = refused
                    || is_out_of_tries(&task.ask, self.place.attempt)
                    || is_cut_off(deadline, since);
            }
        }
    }

    /// Gives the grant to the one that was asked for, or to whom it fits as well.
    fn deliver(
        mut self,
        applicant: &Applicant,
        sent: Instant,
        fences: Option<Fences>,
        wanted: Option<bool>,
    ) -> Delivered {
        let policy = &applicant.ask.policy;
        let wanted = Some(wanted.unwrap_or(true));
        let (waiter, turns) = match self.client {
            Client::Line(turn) => {
                let fits = |id, ask: &Ask| {
                    id == applicant.id
                        || (ask.policy.ttl == policy.ttl && ask.policy.fencing == policy.fencing)
                };
                match self.engine.queue.take_front(turn.key(), fits) {
                    Some(waiter) => (waiter, vec![turn]),
                    None => {
                        // A grant that nobody has taken is to be given back like one of an unanswered request.
                        self.place.unanswered += 1;
                        self.place.haunted_until = sent;
                        self.client = Client::Line(turn);
                        return Delivered::No(Box::new(self));
                    }
                }
            }
            Client::Task(task) => {
                let tenure = Tenure::new(&self.place, policy.ttl, sent, fences, task.turns);
                Lease::grant(&self.engine, task.ask, tenure, task.newcomer.now, wanted)
                    .deliver(task.reply);
                return Delivered::Yes;
            }
        };
        let tenure = Tenure::new(&self.place, policy.ttl, sent, fences, turns);
        if let Wish::Lease { ask, reply } = waiter.wish {
            Lease::grant(&self.engine, ask, tenure, waiter.since, wanted).deliver(reply);
        }
        Delivered::Yes
    }

    /// Nobody wants the lock any more, or nobody may. Takes back what the store may have granted, and the
    /// place in its line.
    async fn give_up(self) {
        let Self { engine, client, place, _errand, .. } = self;
        let task = match client {
            Client::Line(turn) => {
                let keys = Arc::from([turn.key().clone()]);
                drop(turn);
                return give_back(&engine, place, keys, engine.defaults.ttl).await;
            }
            Client::Task(task) => task,
        };
        let Task { ask, newcomer, turns, reply, climb, .. } = task;
        let verdict = if engine.registry.is_open() {
            engine.queue.verdict(&ask.wire[0], newcomer.wait, engine.clock.now())
        } else {
            LockError::shutdown()
        };
        let giving_back = give_back(&engine, place, ask.wire.clone(), ask.policy.ttl.get());
        tokio::pin!(giving_back);
        // All or nothing: who is told that it has not got all has none, if the store can be asked.
        let is_back = climb.has_any() && timeout(AT_ONCE, &mut giving_back).await.is_ok();
        // The turns first: the caller may ask for the same keys again at once.
        drop(turns);
        drop(reply.send(Err(verdict)));
        if !is_back {
            giving_back.await;
        }
    }
}

enum Delivered {
    Yes,
    No(Box<Pursuit>),
}
