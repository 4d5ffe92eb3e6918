//! How first requests and releases leave. One that is alone goes to the store from the thread of its caller, which
//! does not have to wait until the driver wakes up. While others are on their way it goes by the driver: what that
//! finds in one wake-up leaves in one call, and so in one write.

use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::api::guard::LockGuard;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::fence::Fences;
use crate::base::options::Wait;
use crate::base::sync::{Mutex, MutexGuard, spawn};
use crate::exec::panic_boundary;
use crate::lease::lease::{Lease, Tenure};
use crate::lease::tracker::Errand;
use crate::lock::acquire::Ask;
use crate::lock::acquire::attempt::Place;
use crate::lock::acquire::run;
use crate::lock::admission::Permit;
use crate::lock::core::Engine;
use crate::lock::release::{self, Departure};
use crate::queue::last_answer::Word;
use crate::queue::permit::Turn;
use crate::queue::wait_queue::{Waiter, Wish};

/// The first request of an acquire that found nobody in line.
#[derive(Debug)]
pub(crate) struct FirstAsk {
    /// The caller's place, should it have to wait.
    pub(crate) id: u64,
    pub(crate) turn: Turn,
    pub(crate) ask: Arc<Ask>,
    pub(crate) claim: AcquireRequest,
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) errand: Errand,
    pub(crate) reply: oneshot::Sender<Result<LockGuard, LockError>>,
}

#[derive(Debug, Default)]
pub(crate) struct Outbox(Mutex<Letters>);

#[derive(Debug, Default)]
struct Letters {
    /// Those that wait for the driver to look.
    asks: Vec<FirstAsk>,
    departures: Vec<Departure>,
    /// Whether the driver has been told to look.
    announced: bool,
    /// Those under way.
    trips: usize,
}

impl Outbox {
    /// Sends `ask`: at once, or with what else is there by the time the driver looks.
    pub(crate) fn ask(&self, engine: &Arc<Engine>, ask: FirstAsk) {
        // Without the driver nobody would renew what is granted.
        if !engine.driver.is_gone()
            && let Some(trip) = self.at_once(engine)
        {
            let request_timeout = time_limit(engine, engine.least(), &ask.ask);
            return engine.driver.begin(first_requests(trip, request_timeout, vec![ask]));
        }
        let mut letters = self.letters();
        letters.asks.push(ask);
        Self::announce(engine, letters);
    }

    pub(crate) fn depart(&self, engine: &Arc<Engine>, departure: Departure) {
        if let Some(trip) = self.at_once(engine) {
            return engine.driver.begin(release::depart(trip, vec![departure]));
        }
        let mut letters = self.letters();
        letters.departures.push(departure);
        Self::announce(engine, letters);
    }

    /// A trip for the caller to begin, if the store is here or nothing else is under way.
    fn at_once(&self, engine: &Arc<Engine>) -> Option<Trip> {
        if engine.store.capabilities().local {
            return Some(Trip { engine: engine.clone(), is_counted: false });
        }
        let mut letters = self.letters();
        let is_alone = !letters.announced && letters.trips == 0;
        is_alone.then(|| Trip::begin(engine, &mut letters))
    }

    fn announce(engine: &Arc<Engine>, mut letters: MutexGuard<'_, Letters>) {
        if !std::mem::replace(&mut letters.announced, true) {
            drop(letters);
            let post = Post { engine: engine.clone(), is_done: false };
            engine.driver.spawn(post.carry());
        }
    }

    /// The next batch. If there is none, the next letter is announced.
    fn take(&self) -> Option<(Vec<FirstAsk>, Vec<Departure>)> {
        let mut letters = self.letters();
        letters.announced = !letters.asks.is_empty() || !letters.departures.is_empty();
        letters
            .announced
            .then(|| (take_batch(&mut letters.asks), take_batch(&mut letters.departures)))
    }

    fn empty(&self) {
        let mut letters = self.letters();
        letters.announced = false;
        let (asks, departures) =
            (std::mem::take(&mut letters.asks), std::mem::take(&mut letters.departures));
        drop(letters);
        // Their callers come back for more.
        drop((asks, departures));
    }

    fn letters(&self) -> MutexGuard<'_, Letters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call to the store, until it is answered or given up.
pub(crate) struct Trip {
    engine: Arc<Engine>,
    is_counted: bool,
}

impl Trip {
    fn begin(engine: &Arc<Engine>, letters: &mut Letters) -> Self {
        letters.trips += 1;
        Self { engine: engine.clone(), is_counted: true }
    }

    pub(crate) fn engine(&self) -> Arc<Engine> {
        self.engine.clone()
    }
}

impl Drop for Trip {
    fn drop(&mut self) {
        if self.is_counted {
            self.engine.outbox.letters().trips -= 1;
        }
    }
}

/// Takes the outbox to the store. Dropped without having done so, as the driver's runtime ends, it
/// drops the letters: their callers are told that nobody will answer.
struct Post {
    engine: Arc<Engine>,
    is_done: bool,
}

impl Post {
    async fn carry(mut self) {
        while let Some((mut asks, departures)) = self.engine.outbox.take() {
            if !departures.is_empty() {
                spawn(release::depart(self.trip(), departures));
            }
            let least = self.engine.least();
            while let Some(first) = asks.first() {
                // Usually all of them. One that has less request_timeout must not cut the others' short.
                let its = time_limit(&self.engine, least, &first.ask);
                let differs = |ask: &mut FirstAsk| time_limit(&self.engine, least, &ask.ask) != its;
                let others = asks.extract_if(.., differs).collect();
                spawn(first_requests(self.trip(), its, std::mem::replace(&mut asks, others)));
            }
            // The server is at work on this batch while the next is made.
            yield_now().await;
        }
        self.is_done = true;
    }

    fn trip(&self) -> Trip {
        Trip::begin(&self.engine, &mut self.engine.outbox.letters())
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        if !self.is_done {
            self.engine.outbox.empty();
        }
    }
}

/// One call to the store is answered as a whole. Of many requests the first are answered while the store
/// still works on the last.
const BATCH: usize = 128;

fn take_batch<T>(all: &mut Vec<T>) -> Vec<T> {
    if all.len() <= BATCH {
        return std::mem::take(all);
    }
    let rest = all.split_off(BATCH);
    std::mem::replace(all, rest)
}

/// How long a first request may take. A single try gets all the request_timeout that there is for one request; a longer
/// one ends with the wait, and has at least what a request takes: the wait bounds when another one may begin.
fn time_limit(engine: &Engine, least: Duration, ask: &Ask) -> Duration {
    let waits = match ask.policy.wait {
        Wait::For(Duration::ZERO) | Wait::Forever => Duration::MAX,
        Wait::For(wait) => wait.max(least),
    };
    engine.request_patience().min(waits).min(ask.policy.ttl.validity())
}

async fn first_requests(trip: Trip, request_timeout: Duration, mut firsts: Vec<FirstAsk>) {
    let engine = trip.engine();
    let permit = admitted(&engine, &mut firsts).await;
    if firsts.is_empty() {
        return;
    }
    let claims: Vec<_> = firsts.iter().map(|first| first.claim.clone()).collect();
    let sent = engine.clock.now();
    let request_timeout = request_timeout.min(left(&engine, &firsts, sent));
    let mut answers = ask_store(&engine, &claims, sent, request_timeout).await.into_iter();
    drop(trip);
    if let (1.., Some(permit)) = (answers.len(), permit) {
        permit.answered();
    }
    for first in firsts {
        let answer = answers.next().unwrap_or_else(|| Err(silence(request_timeout)));
        answered(&engine, first, sent, answer);
    }
}

/// Puts `claims` to the store at `sent`, and learns from it how long that takes. Nothing if they are not answered
/// within `request_timeout`.
pub(crate) async fn ask_store(
    engine: &Engine,
    claims: &[AcquireRequest],
    sent: Instant,
    request_timeout: Duration,
) -> Vec<Result<AcquireOutcome, BackendError>> {
    match timeout(request_timeout, engine.store.acquire(claims)).await {
        Ok(answers) => {
            if answers.iter().any(Result::is_ok) {
                engine.round_trip.answered(engine.clock.now().since(sent));
            }
            answers
        }
        Err(_) => {
            engine.round_trip.silent(request_timeout);
            Vec::new()
        }
    }
}

/// Waits until the store has time for `firsts`, and answers those that have no time left before.
async fn admitted(engine: &Arc<Engine>, firsts: &mut Vec<FirstAsk>) -> Option<Permit> {
    let mut admission = pin!(engine.admit(firsts.len()));
    // Without this there is nothing to wait for.
    if let Poll::Ready(permit) = poll_once(admission.as_mut()).await {
        return permit;
    }
    // A single try gets all the request_timeout that there is for one request.
    let ends = |first: &FirstAsk| match first.ask.policy.wait {
        Wait::For(Duration::ZERO) => Some(first.since + engine.request_timeout),
        Wait::For(_) | Wait::Forever => first.deadline,
    };
    loop {
        let next = firsts.iter().filter_map(ends).min();
        let over = async {
            match next {
                Some(next) => engine.clock.sleep_until(next).await,
                None => pending().await,
            }
        };
        let permit = tokio::select! {
            biased;
            permit = &mut admission => Some(permit),
            () = over => None,
        };
        // Their callers are gone.
        firsts.retain(|first| !first.reply.is_closed());
        let now = engine.clock.now();
        let is_over = |first: &mut FirstAsk| ends(first).is_some_and(|end| now >= end);
        for first in firsts.extract_if(.., is_over) {
            let error = crowded(now.since(first.since));
            answered(engine, first, now, Err(error));
        }
        if let Some(permit) = permit {
            return permit;
        }
        if firsts.is_empty() {
            return None;
        }
    }
}

async fn poll_once<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// What the waits of `firsts` leave for a request that is sent at `now`; of several the longest.
fn left(engine: &Engine, firsts: &[FirstAsk], now: Instant) -> Duration {
    let left = |first: &FirstAsk| match (first.ask.policy.wait, first.deadline) {
        (Wait::For(Duration::ZERO), _) | (_, None) => Duration::MAX,
        (_, Some(deadline)) => deadline.since(now).max(engine.least()),
    };
    firsts.iter().map(left).max().unwrap_or(Duration::MAX)
}

#[cold]
fn crowded(waited: Duration) -> BackendError {
    let text = format!("other claims of this process were before this one for {waited:?}");
    BackendError::new(FailureKind::NotApplied, text).remedy(
        "the store answers more slowly than locks are asked for: raise `wait`, shed load, or spread the locks over more stores",
    )
}

fn answered(
    engine: &Arc<Engine>,
    first: FirstAsk,
    sent: Instant,
    answer: Result<AcquireOutcome, BackendError>,
) {
    // Counted in until the answer is dealt with.
    let FirstAsk { id, turn, ask, claim, since, deadline, errand: _errand, reply } = first;
    let now = engine.clock.now();
    let mut place = Place::new(claim.owner, since);
    let answer = match answer {
        // Granted at the store, but so late that it cannot be believed any more.
        Ok(AcquireOutcome::Acquired { .. }) if now >= sent + ask.policy.ttl.validity() => {
            Err(silence(now.since(sent)))
        }
        answer => answer,
    };
    let (word, pause) = match answer {
        Ok(AcquireOutcome::Acquired { fence, reserved_fences, contended }) => {
            let fences = Fences::new(fence, reserved_fences);
            let tenure = Tenure::new(&place, &ask.policy, sent, fences, vec![turn]);
            let contended = Some(contended.unwrap_or(true));
            return Lease::grant(engine, ask, tenure, since, contended).deliver(reply);
        }
        Ok(AcquireOutcome::Contended { expires_in, wait_mode }) => {
            let pause = place.busy(&ask.policy, expires_in, wait_mode);
            (Word::Taken { expires_in }, pause)
        }
        Err(error) => {
            let pause = place.failed(&error, sent + ask.policy.kept_for());
            (Word::Failed(error), pause)
        }
    };
    let refused = matches!(&word, Word::Failed(error) if error.kind() == FailureKind::Rejected);
    engine.queue.spread(&ask.wire, &word);
    let tries_left = ask.policy.retry_count.is_none_or(|count| count > 0);
    if refused || !tries_left || deadline.is_some_and(|deadline| now >= deadline) {
        let verdict = engine.queue.verdict(turn.key(), ask.policy.wait, now);
        panic_boundary::answer(reply, Err(verdict));
    } else {
        let wish = Wish::Lease { ask, reply };
        engine.queue.join_front(turn.key(), Waiter { id, since, deadline, attempts: 1, wish });
    }
    run::resume(engine, turn, place, pause);
}

pub(crate) fn silence(request_timeout: Duration) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("the store did not answer within {request_timeout:?}"),
    )
    .remedy(
        "check that the store is up and reachable; a grant that may have been made is taken back",
    )
}
