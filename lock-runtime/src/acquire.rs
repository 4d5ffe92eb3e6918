//! One acquire: the turn among the tasks of this process, then attempts at the store until it grants,
//! the wait is over, or the caller is gone.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::backend::{Attempt, BackendError, Changed, Claim, Failure, LeaseRef, Owner};
use crate::clock::Instant;
use crate::driver::Driver;
use crate::engine::Engine;
use crate::error::{ErrorKind, LockError};
use crate::fence::Fence;
use crate::guard::LockGuard;
use crate::key::Key;
use crate::lease::{Grant, Lease};
use crate::options::{Policy, Wait};
use crate::queue::{NoTurn, Turn, Word};
use crate::registry::Errand;
use crate::release::clean_up;
use crate::site::Subject;
use crate::{jitter, observe};

/// What one acquire is asked for.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) subject: Subject,
    /// Sorted and distinct.
    pub(crate) keys: Arc<[Key]>,
    pub(crate) policy: Policy,
}

/// Acquires all keys of `ask`.
///
/// Dropping the future at any await leaves nothing behind: a turn goes to the next in line, a request
/// that is on its way is awaited by the driver, and what it may have been granted is released.
pub(crate) async fn acquire(engine: &Arc<Engine>, ask: Ask) -> Result<LockGuard, LockError> {
    let policy = ask.policy;
    let errand = engine.registry.admit().ok_or_else(LockError::shutdown)?;
    let began = engine.clock.now();
    let deadline = match policy.wait {
        Wait::For(wait) => Some(began + wait),
        Wait::Forever => None,
    };
    let wire: Arc<[Key]> = if engine.prefix.is_empty() {
        ask.keys.clone()
    } else {
        ask.keys.iter().map(|key| key.prefixed(&engine.prefix)).collect()
    };
    let mut turns = Vec::with_capacity(wire.len());
    for key in wire.iter() {
        let turn = engine.queue.turn(key, deadline, engine.clock).await;
        turns.push(turn.map_err(|reason| no_turn(reason, policy.wait))?);
    }
    let claim = Claim {
        keys: wire,
        owner: Owner::random()?,
        ttl: policy.ttl.get(),
        fencing: policy.fencing,
        attempt: 0,
    };
    let pursuit = Pursuit {
        engine: engine.clone(),
        ask,
        claim,
        began,
        deadline,
        turns,
        unanswered: 0,
        haunted_until: began,
        _errand: errand,
    };
    let (reply, answer) = oneshot::channel();
    engine.run(pursuit.run(reply));
    let guard = answer.await.unwrap_or_else(|_| Err(Driver::gone()))?;
    // The grant may have run out on its way here, while this thread was blocked or the machine slept.
    guard.unless_lost()
}

#[cold]
fn no_turn(reason: NoTurn, wait: Wait) -> LockError {
    match reason {
        NoTurn::Full => LockError::new(
            ErrorKind::QueueFull,
            "too many tasks of this process wait for the lock already",
        )
        .remedy("shed load before this call, or raise `max_waiters` on the pool"),
        NoTurn::Closed => LockError::shutdown(),
        // Those in front of us did not get through to the store: it is not known who holds the lock.
        NoTurn::Expired { doubt: Some(error) } => LockError::backend(error),
        NoTurn::Expired { doubt: None } => conflict(wait, None),
    }
}

#[cold]
fn conflict(wait: Wait, free_in: Option<Duration>) -> LockError {
    let waited = match wait {
        Wait::For(Duration::ZERO) => "somebody else holds the lock".to_owned(),
        Wait::For(wait) => {
            format!("somebody else holds the lock and did not let go within {wait:?}")
        }
        Wait::Forever => "somebody else holds the lock".to_owned(),
    };
    let cause = match free_in {
        Some(free_in) => format!("{waited}; unless renewed it is free in {free_in:?}"),
        None => waited,
    };
    LockError::new(ErrorKind::Conflict, cause)
        .remedy("try again later, raise `wait`, or answer the request with a conflict")
}

/// The part of an acquire that talks to the store. Lives on the driver, so that it ends in order
/// whatever becomes of the caller.
struct Pursuit {
    engine: Arc<Engine>,
    ask: Ask,
    claim: Claim,
    began: Instant,
    deadline: Option<Instant>,
    turns: Vec<Turn>,
    /// Requests without an answer: each may have been applied, or may yet be.
    unanswered: usize,
    haunted_until: Instant,
    _errand: Errand,
}

/// Why an attempt did not end the pursuit.
enum Setback {
    Busy { free_in: Option<Duration> },
    Failed(BackendError),
}

impl Pursuit {
    async fn run(mut self, mut reply: oneshot::Sender<Result<LockGuard, LockError>>) {
        let outcome = self.pursue(&mut reply).await;
        let failed = outcome.is_err();
        // Before the caller knows: it may ask for the same key again at once.
        self.turns.clear();
        // A guard that nobody receives comes back and releases as it drops.
        drop(reply.send(outcome));
        if failed && self.unanswered > 0 {
            let Claim { keys, owner, ttl, .. } = self.claim;
            let leftover = LeaseRef { keys, owner, ttl };
            let until = self.haunted_until;
            clean_up(&self.engine, leftover, self.began, until, self.unanswered).await;
        }
    }

    async fn pursue(
        &mut self,
        reply: &mut oneshot::Sender<Result<LockGuard, LockError>>,
    ) -> Result<LockGuard, LockError> {
        let engine = self.engine.clone();
        let mut contended = false;
        let mut failing_since = None;
        loop {
            // Before the attempt, so that a change right behind its answer is not missed.
            let changed = engine.store.changed(&self.claim.keys);
            let sent = engine.clock.now();
            let setback = match self.attempt(sent).await {
                Ok(guard) if engine.registry.is_open() => return Ok(guard),
                // Too late to begin something; the guard releases as it drops.
                Ok(_) => return Err(LockError::shutdown()),
                Err(setback) => setback,
            };
            self.claim.attempt += 1;
            let now = engine.clock.now();
            let mut wake_at = self.next_attempt(now, &setback);
            match &setback {
                Setback::Busy { free_in } => {
                    failing_since = None;
                    if !contended {
                        contended = true;
                        observe::contended(&engine, &self.ask, *free_in);
                    }
                }
                Setback::Failed(_) => {
                    // Without a deadline an outage still has to end the wait.
                    let since = *failing_since.get_or_insert(sent);
                    if self.deadline.is_none()
                        && now.since(since) > engine.patience.saturating_mul(10)
                    {
                        return Err(self.defeat(setback));
                    }
                }
            }
            let tries_left =
                self.ask.policy.retry_count.is_none_or(|count| self.claim.attempt <= count);
            let refused =
                matches!(&setback, Setback::Failed(error) if error.failure() == Failure::Refused);
            if refused || !tries_left || self.deadline.is_some_and(|deadline| now >= deadline) {
                return Err(self.defeat(setback));
            }
            if let Some(deadline) = self.deadline {
                wake_at = wake_at.min(deadline);
            }
            let busy = matches!(setback, Setback::Busy { .. });
            tokio::select! {
                () = engine.clock.sleep_until(wake_at) => {}
                () = maybe(changed), if busy => {}
                () = engine.registry.closing() => return Err(LockError::shutdown()),
                () = reply.closed() => return Err(self.defeat(setback)),
            }
        }
    }

    /// One request to the store, and what is known after it.
    async fn attempt(&mut self, sent: Instant) -> Result<LockGuard, Setback> {
        let engine = self.engine.clone();
        let believable = self.ask.policy.ttl.belief();
        let patience = self.patience(sent).min(believable);
        self.spread(&Word::Asked(sent));
        let outcome = match timeout(patience, engine.store.acquire(&self.claim)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(silence(patience)),
        };
        let failure = match outcome {
            Ok(Attempt::Granted { fence }) if engine.clock.now() < sent + believable => {
                self.spread(&Word::Answered);
                return Ok(self.grant(sent, fence));
            }
            // Granted at the store, but so late that it cannot be believed any more.
            Ok(Attempt::Granted { .. }) => silence(patience),
            Ok(Attempt::Busy { free_in }) => {
                self.spread(&Word::Answered);
                return Err(Setback::Busy { free_in });
            }
            Err(failure) => failure,
        };
        if failure.failure() == Failure::Unknown {
            self.unanswered += 1;
            self.haunted_until = sent + self.ask.policy.ttl.get();
        }
        self.spread(&Word::Failed(failure.clone()));
        Err(Setback::Failed(failure))
    }

    fn spread(&self, word: &Word) {
        for turn in &self.turns {
            turn.spread(word.clone());
        }
    }

    /// How long this attempt may take. A single try gets all the patience that there is for one request;
    /// while waiting, the end of the wait is the limit, but for what a request takes at least.
    fn patience(&self, now: Instant) -> Duration {
        const LEAST: Duration = Duration::from_millis(250);
        let waits = self.ask.policy.wait != Wait::For(Duration::ZERO);
        match self.deadline {
            Some(deadline) if waits => self.engine.patience.min(deadline.since(now).max(LEAST)),
            _ => self.engine.patience,
        }
    }

    fn grant(&mut self, sent: Instant, fence: Option<Fence>) -> LockGuard {
        let engine = &self.engine;
        let grant = Grant {
            id: engine.registry.next_id(),
            pool: engine.name().clone(),
            subject: self.ask.subject.clone(),
            keys: self.ask.keys.clone(),
            wire: self.claim.keys.clone(),
            owner: self.claim.owner,
            fence,
            policy: self.ask.policy,
            haunted_until: (self.unanswered > 0).then_some(self.haunted_until),
            turns: std::mem::take(&mut self.turns),
        };
        let lease = Arc::new(Lease::new(grant, sent, engine.clock));
        engine.registry.enroll(&lease);
        engine.watchdog.watch(&lease);
        observe::acquired(&lease, lease.granted_at.since(self.began));
        LockGuard::new(engine.clone(), lease)
    }

    /// When to try again if nothing else happens.
    fn next_attempt(&self, now: Instant, setback: &Setback) -> Instant {
        if let Some(delay) = self.ask.policy.retry_delay {
            return now + jitter::below(delay);
        }
        // Doubles with every attempt, from 20 ms to 640 ms.
        let poll = Duration::from_millis(20 << self.claim.attempt.saturating_sub(1).min(5));
        let poll_at = now + jitter::below(poll);
        match setback {
            // Stores round an expiry up to a millisecond.
            Setback::Busy { free_in: Some(free_in) } => {
                poll_at.min(now + *free_in + Duration::from_millis(1))
            }
            Setback::Busy { free_in: None } => poll_at,
            Setback::Failed(_) => now + jitter::below(poll.min(Duration::from_millis(160))),
        }
    }

    #[cold]
    fn defeat(&self, setback: Setback) -> LockError {
        match setback {
            Setback::Busy { free_in } => conflict(self.ask.policy.wait, free_in),
            Setback::Failed(error) => LockError::backend(error),
        }
    }
}

async fn maybe(changed: Option<Changed>) {
    match changed {
        Some(changed) => changed.await,
        None => std::future::pending().await,
    }
}

fn silence(patience: Duration) -> BackendError {
    BackendError::new(Failure::Unknown, format!("the store did not answer within {patience:?}"))
        .remedy("check that the store is up and reachable; a grant that may have been made is taken back")
}
