//! Acquires several keys for one task, all or none. Lives on the driver, so that it ends in order whatever becomes
//! of the task.
//!
//! 1. **All turns, then the store.** All keys at once are asked for with the turns of all of them, which `queue` gives
//!    in one step. An answer that does not grant gives the turns back.
//! 2. **At the store like another process.** A request that has to wait there keeps the turns of the keys that it has
//!    there and of the one in whose line it stands (`climb`), if no task of this process uses them. All other tasks
//!    of this process ask the store as those of other processes do, and get the same answers.
//! 3. **The wait is kept.** The task is told at its deadline, also while an answer is awaited; only the first request
//!    gets the time that a request takes at least. What has to be undone goes on here.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::api::guard::LockGuard;
use crate::backend::{AcquireOutcome, FailureKind, LeaseRef, Owner, ReleaseRequest, WaitMode};
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::fence::Fences;
use crate::base::key::Key;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::lease::lease::{Lease, Tenure};
use crate::lease::tracker::Errand;
use crate::lock::acquire::Ask;
use crate::lock::acquire::attempt::Place;
use crate::lock::acquire::first_request::{ask_store, silence};
use crate::lock::acquire::run::time_limit;
use crate::lock::acquire::stepwise::{Climb, Fall, Next};
use crate::lock::core::Engine;
use crate::lock::release::give_back;
use crate::queue::last_answer::Word;
use crate::queue::permit::{self, Stance, Turn};
use crate::queue::wait_queue::{Entered, Newcomer};

/// How long what has to be given back may take before the task is told.
const AT_ONCE: Duration = Duration::from_millis(250);

/// One request for several keys, until it is granted or given up.
struct Several {
    engine: Arc<Engine>,
    ask: Arc<Ask>,
    newcomer: Newcomer,
    caller: Caller,
    /// The rank in the lines of this process.
    id: u64,
    place: Place,
    climb: Climb,
    turn: Option<Turn>,
    stance: Option<Stance>,
    wake: Arc<Notify>,
    word: Word,
    /// How long the last answer of the store took.
    round_trip: Duration,
    failing_since: Option<Instant>,
    /// Whether it has been told that the lock is contended.
    was_contended: bool,
    /// Whether the last answer has ended the wait.
    over: bool,
    _errand: Errand,
}

/// The task that waits for the guard, until it is told.
struct Caller(Option<oneshot::Sender<Result<LockGuard, LockError>>>);

impl Caller {
    fn is_gone(&self) -> bool {
        self.0.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// Resolves when the task does not wait any more.
    async fn gone(&mut self) {
        if let Some(reply) = &mut self.0 {
            reply.closed().await;
        }
    }

    fn refuse(&mut self, error: LockError) {
        if let Some(reply) = self.0.take() {
            panic_boundary::answer(reply, Err(error));
        }
    }
}

/// Where the turns come from.
enum Turns {
    Here(Turn),
    Awaited(oneshot::Receiver<Result<Turn, LockError>>),
}

/// A wait for the turns of all keys. Dropping it leaves the line; turns that arrive in that instant pass on.
struct Queued {
    engine: Arc<Engine>,
    id: u64,
    answer: Option<oneshot::Receiver<Result<Turn, LockError>>>,
}

impl Drop for Queued {
    fn drop(&mut self) {
        // Closed first, as with `Waiting`.
        if let Some(answer) = self.answer.take() {
            drop(answer);
            if self.engine.is_inherited() {
                return;
            }
            permit::call(&self.engine, self.engine.queue.leave_several(self.id));
        }
    }
}

/// What comes behind an answer of the store.
enum Outcome {
    Granted {
        sent: Instant,
        fences: Option<Fences>,
        contended: Option<bool>,
    },
    /// Asks again after this time, or when something happens.
    Again(Duration),
}

/// Acquires the keys of `ask` for the task that waits for `reply`.
pub(crate) fn start(
    engine: &Arc<Engine>,
    ask: Arc<Ask>,
    newcomer: Newcomer,
    errand: Errand,
    reply: oneshot::Sender<Result<LockGuard, LockError>>,
) -> Result<(), LockError> {
    let several = Several {
        engine: engine.clone(),
        newcomer,
        caller: Caller(Some(reply)),
        id: engine.queue.rank(),
        place: Place::new(Owner::random()?, newcomer.now),
        climb: Climb::new(engine, &ask),
        turn: None,
        stance: None,
        wake: Arc::default(),
        word: Word::default(),
        round_trip: Duration::ZERO,
        failing_since: None,
        was_contended: false,
        over: false,
        _errand: errand,
        ask,
    };
    let turns = several.ask_for_turns(false)?;
    engine.run(several.run(turns));
    Ok(())
}

impl Several {
    async fn run(mut self, turns: Turns) {
        let mut turns = Some(turns);
        loop {
            if self.climb.is_below() && self.turn.is_none() && !self.take_turns(&mut turns).await {
                break;
            }
            self.take_along();
            match self.attempt().await {
                Outcome::Granted { sent, fences, contended } => {
                    return self.deliver(sent, fences, contended);
                }
                Outcome::Again(pause) => {
                    if !self.wait(pause).await {
                        break;
                    }
                }
            }
            self.hold_on().await;
            if self.is_over() {
                break;
            }
        }
        self.give_up().await;
    }

    /// Joins the queue of this process for the turns of all keys.
    fn ask_for_turns(&self, comes_again: bool) -> Result<Turns, LockError> {
        let (reply, answer) = oneshot::channel();
        let (engine, keys) = (&self.engine, &self.ask.wire);
        let entered = engine.queue.enter_several(
            self.id,
            keys,
            &self.newcomer,
            &self.wake,
            reply,
            comes_again,
        )?;
        Ok(match entered {
            Entered::First(_) => Turns::Here(Turn::new(engine, keys.clone())),
            Entered::Behind => Turns::Awaited(answer),
        })
    }

    /// Waits for the turns of all keys. False if it is all over.
    async fn take_turns(&mut self, turns: &mut Option<Turns>) -> bool {
        let turns = match turns.take() {
            Some(turns) => Ok(turns),
            None => self.ask_for_turns(true),
        };
        let answer = match turns {
            Ok(Turns::Here(turn)) => {
                self.turn = Some(turn);
                return true;
            }
            Ok(Turns::Awaited(answer)) => answer,
            Err(error) => {
                self.caller.refuse(error);
                return false;
            }
        };
        let (engine, id) = (self.engine.clone(), self.id);
        let mut queued = Queued { engine: engine.clone(), id, answer: Some(answer) };
        let Newcomer { deadline, wait, .. } = self.newcomer;
        loop {
            let gives_way_at = engine.queue.gives_way_at(id);
            let until = [gives_way_at, deadline].into_iter().flatten().min();
            let Some(answer) = &mut queued.answer else { return false };
            tokio::select! {
                biased;
                () = engine.registry.closing() => return false,
                turn = answer => {
                    queued.answer = None;
                    match turn {
                        Ok(Ok(turn)) => {
                            self.turn = Some(turn);
                            return true;
                        }
                        Ok(Err(error)) => self.caller.refuse(error),
                        // Dropped without an answer, as the driver ends.
                        Err(_) => {}
                    }
                    return false;
                }
                () = self.caller.gone() => return false,
                () = self.wake.notified() => {}
                () = sleep_until(&engine, until) => {
                    let now = engine.clock.now();
                    if deadline.is_some_and(|deadline| deadline <= now) {
                        self.caller.refuse(engine.queue.verdict_of(id, wait, now));
                        return false;
                    }
                    if gives_way_at.is_some_and(|at| at <= now) {
                        permit::call(&engine, engine.queue.give_way(id));
                    }
                }
            }
        }
    }

    /// Takes the turn of the key that is asked for next, if no task of this process uses it.
    fn take_along(&mut self) {
        if let Some(at) = self.climb.step()
            && let Some(key) = self.ask.wire.get(at)
            && !self.turn.as_ref().is_some_and(|turn| turn.keys().contains(key))
        {
            let taken = self.engine.queue.take_free(std::slice::from_ref(key));
            self.add_turns(taken);
        }
    }

    fn add_turns(&mut self, taken: Vec<Key>) {
        let engine = &self.engine;
        self.turn.get_or_insert_with(|| Turn::new(engine, Arc::from([]))).add(taken);
    }

    /// Passes on the turns of all keys that it neither has at the store nor stands in line for.
    fn let_turns_go(&mut self) {
        let Some(mut turn) = self.turn.take() else { return };
        let (wire, climb) = (&self.ask.wire, &self.climb);
        turn.keep(|key| {
            wire.iter().position(|one| one == key).is_some_and(|at| climb.is_concerned_with(at))
        });
        if !turn.keys().is_empty() {
            self.turn = Some(turn);
        }
    }

    fn is_over(&self) -> bool {
        let Newcomer { deadline, .. } = self.newcomer;
        let now = self.engine.clock.now();
        self.over || self.caller.is_gone() || deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Waits for `pause`, or until something happens. False if it is all over.
    async fn wait(&mut self, pause: Duration) -> bool {
        if self.is_over() {
            return false;
        }
        if pause.is_zero() {
            return true;
        }
        self.let_turns_go();
        let engine = self.engine.clone();
        let asks_at = engine.clock.now() + pause;
        let mut until = self.newcomer.deadline.map_or(asks_at, |deadline| asks_at.min(deadline));
        loop {
            self.note_wishes();
            let until_due = self.climb.due().map_or(until, |due| until.min(due));
            tokio::select! {
                biased;
                () = engine.registry.closing() => return false,
                () = self.caller.gone() => return false,
                () = self.wake.notified() => {
                    let look_at = engine.queue.take_looks(&self.ask.wire, self.id);
                    until = look_at.map_or(until, |look_at| until.min(look_at));
                }
                () = engine.clock.sleep_until(until_due) => return true,
            }
        }
    }

    /// Notes whether others want what it has at the store.
    fn note_wishes(&mut self) {
        let (wire, queue) = (&self.ask.wire, &self.engine.queue);
        let had = self.climb.had().iter().filter_map(|&at| wire.get(at));
        if self.climb.has_any() && queue.is_wanted(had, self.id) {
            self.climb.wanted(self.engine.clock.now(), self.round_trip);
        }
    }

    /// Looks after the keys that it has at the store.
    async fn hold_on(&mut self) {
        let (engine, ask, owner) = (self.engine.clone(), self.ask.clone(), self.place.owner);
        if !self.climb.is_due(engine.clock.now()) {
            return;
        }
        let held = self.climb.hold_on(&engine, &ask, owner);
        let word = &self.word;
        let (caller, newcomer) = (&mut self.caller, &self.newcomer);
        let fall = in_time(&engine, caller, newcomer, newcomer.deadline, word, held).await;
        // Two requests that give way to each other are parted by their clocks. On the stage, where clocks stand still,
        // chance parts them.
        #[cfg(test)]
        if fall == Some(Fall::TooLong) && crate::base::sync::scheduler::by_chance() {
            return;
        }
        match fall {
            Some(Fall::TooLong) if self.place.unanswered == 0 && self.climb.is_standing() => {
                self.let_go().await;
            }
            Some(fall) => self.come_down(fall),
            None => {}
        }
    }

    /// Gives back the keys that it has, and goes on wait_mode in the line of the next one.
    async fn let_go(&mut self) {
        let (engine, ask) = (self.engine.clone(), self.ask.clone());
        let had = self.climb.had().iter().filter_map(|&at| ask.wire.get(at));
        let keys: Arc<[_]> = had.cloned().collect();
        let lease = LeaseRef {
            keys: keys.clone(),
            owner: self.place.owner,
            ttl: ask.policy.ttl.get(),
            // No body has run under them.
            min_hold: Duration::ZERO,
        };
        let release = [ReleaseRequest {
            lease,
            free_after: Duration::ZERO,
            successor: None,
            barging_window: Duration::ZERO,
        }];
        let releasing = timeout(engine.request_timeout, engine.store.release(&release));
        let (caller, newcomer, word) = (&mut self.caller, &self.newcomer, &self.word);
        let answers = in_time(&engine, caller, newcomer, newcomer.deadline, word, releasing).await;
        match answers.unwrap_or_default().into_iter().next() {
            Some(Ok(_)) => {
                self.climb.let_go();
                engine.queue.want_no_more(keys.iter(), self.id);
                self.let_turns_go();
            }
            // It may have been applied, or may be yet.
            Some(Err(_)) | None => self.come_down(Fall::TooLong),
        }
    }

    fn come_down(&mut self, fall: Fall) {
        let down = self.climb.come_down(&self.engine, &self.ask, &mut self.place, fall);
        match down {
            Ok(()) => self.stand(),
            // Without a new name the old one is given back at the end of it all.
            Err(_) => self.over = true,
        }
        self.turn = None;
    }

    /// Is known by its name in the lines of all keys from now on.
    fn stand(&mut self) {
        let (queue, keys, id) = (&self.engine.queue, &self.ask.wire, self.id);
        queue.stand_in_all(keys, id, self.place.owner, &self.wake);
        self.stance.get_or_insert_with(|| Stance { queue: queue.clone(), keys: keys.clone(), id });
    }

    /// One request to the store.
    async fn attempt(&mut self) -> Outcome {
        let (engine, ask) = (self.engine.clone(), self.ask.clone());
        if self.stance.is_none() {
            // Before the store is asked, so that nothing that happens behind its answer is missed.
            self.stand();
        }
        let sent = engine.clock.now();
        let is_step = self.climb.step().is_some();
        let mut claim = self.climb.claim(&ask, self.place.owner);
        // One of several keys may be the owner's from now on.
        self.place.in_line |= is_step;
        claim.attempt = self.place.attempt;
        let Newcomer { deadline, .. } = self.newcomer;
        let believable = ask.policy.ttl.validity();
        let request_timeout = time_limit(&engine, &ask.policy, deadline, sent);
        self.hear(Word::Asked(sent));
        let claims = [claim];
        let asking = ask_store(&engine, &claims, sent, request_timeout);
        // The first request gets what a request takes.
        let told_at = deadline.map(|deadline| {
            if self.place.attempt == 0 { deadline.max(sent + request_timeout) } else { deadline }
        });
        let (caller, word) = (&mut self.caller, &self.word);
        let answers = in_time(&engine, caller, &self.newcomer, told_at, word, asking).await;
        let answer = answers.into_iter().next();
        let now = engine.clock.now();
        self.round_trip = now.since(sent);
        let error = match answer.unwrap_or_else(|| Err(silence(request_timeout))) {
            Ok(AcquireOutcome::Acquired { contended, .. })
                if is_step && now < sent + believable =>
            {
                self.failing_since = None;
                self.climb.step_up(sent, &ask);
                if contended == Some(true) {
                    self.climb.wanted(now, self.round_trip);
                }
                self.place.attempt += 1;
                self.hear(Word::Taken { expires_in: None });
                return Outcome::Again(Duration::ZERO);
            }
            Ok(AcquireOutcome::Acquired { fence, reserved_fences, contended })
                if now < sent + believable =>
            {
                let fences = Fences::new(fence, reserved_fences);
                return Outcome::Granted { sent, fences, contended };
            }
            // Granted at the store, but so late that it cannot be believed any more.
            Ok(AcquireOutcome::Acquired { .. }) => silence(request_timeout),
            Ok(AcquireOutcome::Contended { expires_in, wait_mode }) => {
                self.failing_since = None;
                if !std::mem::replace(&mut self.was_contended, true) {
                    events::contended(&engine, &ask, expires_in);
                }
                let pause = self.place.busy(&ask.policy, expires_in, wait_mode);
                self.hear(Word::Taken { expires_in });
                self.give_up_on(now, false);
                return Outcome::Again(self.refused_step(wait_mode, now).unwrap_or(pause));
            }
            Err(error) => error,
        };
        let pause = self.place.failed(&error, sent + ask.policy.kept_for());
        let refused = error.kind() == FailureKind::Rejected;
        self.failing_since.get_or_insert(sent);
        self.hear(Word::Failed(error));
        self.give_up_on(now, refused);
        Outcome::Again(pause)
    }

    fn hear(&mut self, word: Word) {
        self.engine.queue.spread(&self.ask.wire, &word);
        self.word = word;
    }

    /// What it does about a busy key; when it asks again, if not as the store says.
    fn refused_step(&mut self, wait_mode: WaitMode, now: Instant) -> Option<Duration> {
        match self.climb.busy(wait_mode, now, &self.ask) {
            Next::Wait => None,
            Next::Ask => Some(Duration::ZERO),
            Next::Fall(fall) => {
                self.come_down(fall);
                None
            }
        }
    }

    /// Ends the wait if the last answer does.
    fn give_up_on(&mut self, now: Instant, refused: bool) {
        let Newcomer { now: since, deadline, .. } = self.newcomer;
        // Without a deadline an outage still has to end the wait.
        let outage = self.engine.request_timeout.saturating_mul(10);
        let is_cut_off = deadline.is_none()
            && self.failing_since.is_some_and(|failing| now.since(failing.max(since)) > outage);
        let attempts = self.place.attempt;
        let is_out_of_tries = self.ask.policy.retry_count.is_some_and(|count| attempts > count);
        self.over |= refused || is_out_of_tries || is_cut_off;
    }

    fn deliver(mut self, sent: Instant, fences: Option<Fences>, contended: Option<bool>) {
        let engine = self.engine.clone();
        // Tasks that come from now on wait in this process.
        let taken = engine.queue.take_free(&self.ask.wire);
        self.add_turns(taken);
        let (Some(turn), Some(stance)) = (self.turn.take(), self.stance.take()) else { return };
        let policy = &self.ask.policy;
        let tenure = Tenure::new(&self.place, policy, sent, fences, vec![turn.with(stance)]);
        let contended = Some(contended.unwrap_or(true));
        let guard = Lease::grant(&engine, self.ask.clone(), tenure, self.newcomer.now, contended);
        // Without a task to take it, it releases as it drops.
        if let Some(reply) = self.caller.0.take() {
            guard.deliver(reply);
        }
    }

    /// The task does not wait any more, or may not. Takes back what the store may have granted, and the places in
    /// its lines.
    async fn give_up(self) {
        let (engine, ask) = (self.engine.clone(), self.ask.clone());
        let had_any = self.climb.has_any();
        let Self { mut caller, place, turn, stance, newcomer, word, _errand, .. } = self;
        let giving_back = give_back(&engine, place, ask.wire.clone(), ask.policy.ttl.get());
        let mut giving_back = pin!(giving_back);
        // All or nothing: a task that is told that it has not got all has none, if the store can be asked.
        let is_back = had_any && timeout(AT_ONCE, &mut giving_back).await.is_ok();
        // The turns first: the task may ask for the same keys again at once.
        drop((turn, stance));
        let verdict = if engine.registry.is_open() {
            word.verdict(newcomer.wait, engine.clock.now(), engine.queue.trouble().as_ref())
        } else {
            LockError::shutdown()
        };
        caller.refuse(verdict);
        if !is_back {
            giving_back.await;
        }
    }
}

/// Awaits `work`, and tells the task at `told_at` if that comes first.
async fn in_time<T>(
    engine: &Engine,
    caller: &mut Caller,
    newcomer: &Newcomer,
    told_at: Option<Instant>,
    word: &Word,
    work: impl Future<Output = T>,
) -> T {
    let mut work = pin!(work);
    tokio::select! {
        biased;
        done = &mut work => return done,
        () = sleep_until(engine, told_at) => {
            let now = engine.clock.now();
            let trouble = engine.queue.trouble();
            caller.refuse(word.verdict(newcomer.wait, now, trouble.as_ref()));
        }
    }
    work.await
}

/// Sleeps until `moment`, for ever if there is none.
async fn sleep_until(engine: &Engine, moment: Option<Instant>) {
    match moment {
        Some(moment) => engine.clock.sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
