//! Frees what a holder lets go, and what nobody is known to hold.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::backend::{
    BackendError, FailureKind, LeaseRef, Owner, ReleaseOutcome, ReleaseRequest, Successor,
};
use crate::base::clock::Instant;
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::sync::spawn;
use crate::exec::driver::Driver;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::lease::lease::Lease;
use crate::lock::acquire::attempt::Place;
use crate::lock::acquire::first_request::Trip;
use crate::lock::acquire::run;
use crate::lock::core::Engine;
use crate::lock::hold::hand_on;
use crate::lock::undo::{Leftover, Undo};

/// How long what an acquire has left is taken back by itself.
const AT_ONCE: Duration = Duration::from_millis(250);

/// Lets `lease` go: to the next in line of this process, or at the store. It is on its way whether or not
/// the result is awaited; `None` if it was let go before.
pub(crate) fn release(engine: &Arc<Engine>, lease: &Arc<Lease>) -> Option<Releasing> {
    if hand_on(engine, lease) {
        return Some(Releasing::Done);
    }
    if !lease.let_go() {
        return None;
    }
    engine.watchdog.forget(lease);
    let (reply, answer) = oneshot::channel();
    engine.outbox.depart(engine, Departure { lease: lease.clone(), reply: Some(reply) });
    Some(Releasing::OnItsWay(answer))
}

/// A release on its way.
#[derive(Debug)]
pub(crate) enum Releasing {
    Done,
    OnItsWay(oneshot::Receiver<Result<(), LockError>>),
}

impl Future for Releasing {
    type Output = Result<(), LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Done => Poll::Ready(Ok(())),
            Self::OnItsWay(answer) => Pin::new(answer)
                .poll(cx)
                .map(|answer| answer.unwrap_or_else(|_| Err(Driver::gone()))),
        }
    }
}

/// A lease that is to be freed at the store.
#[derive(Debug)]
pub(crate) struct Departure {
    pub(crate) lease: Arc<Lease>,
    /// Who waits for it. Told once.
    pub(crate) reply: Option<oneshot::Sender<Result<(), LockError>>>,
}

impl Drop for Departure {
    fn drop(&mut self) {
        // Dropped half-way, as the driver's runtime ends: those in line must not wait for it.
        drop(self.lease.take_turns());
    }
}

impl Departure {
    fn answer(&mut self, result: Result<(), LockError>) {
        if let Some(reply) = self.reply.take() {
            panic_boundary::answer(reply, result);
        }
    }

    /// Tells the caller that the store has not freed the lease in time, and lets the next in line ask for it.
    fn answer_without_success(&mut self, error: &BackendError) {
        drop(self.lease.take_turns());
        self.answer(Err(LockError::backend(error.clone())));
    }
}

/// Frees all of `departures` in one call. Those that fail go on alone.
pub(crate) async fn depart(trip: Trip, mut ready: Vec<Departure>) {
    let engine = trip.engine();
    for departure in ready.extract_if(.., |departure| !departure.lease.is_settled()) {
        spawn(go_alone(engine.clone(), departure));
    }
    if ready.is_empty() {
        return;
    }
    let began = engine.clock.now();
    let releases: Vec<_> = ready.iter().map(|ready| to_release(&engine, &ready.lease)).collect();
    let outcomes = timeout(engine.request_patience(), engine.store.release(&releases)).await;
    drop(trip);
    let mut outcomes = outcomes.unwrap_or_default().into_iter();
    for (departure, release) in ready.into_iter().zip(releases) {
        match outcomes.next().unwrap_or_else(|| Err(silence())) {
            Ok(outcome) => arrived(&engine, departure, &release, outcome, false),
            Err(error) => {
                spawn(keep_trying(engine.clone(), departure, release, began, error));
            }
        }
    }
}

/// Frees a lease whose renewal is still on its way.
async fn go_alone(engine: Arc<Engine>, departure: Departure) {
    let began = engine.clock.now();
    settle(&engine, std::slice::from_ref(&departure.lease)).await;
    let release = to_release(&engine, &departure.lease);
    match release_once(&engine, &release).await {
        Ok(outcome) => arrived(&engine, departure, &release, outcome, false),
        Err(error) => keep_trying(engine, departure, release, began, error).await,
    }
}

/// Repeats a release that began at `began` and failed with `error`, however long it takes.
async fn keep_trying(
    engine: Arc<Engine>,
    mut departure: Departure,
    mut release: ReleaseRequest,
    began: Instant,
    mut error: BackendError,
) {
    // Twice the request_timeout: long enough to be sure of a connection that went silent, and to try another. Then the
    // caller is told, whatever is still on its way.
    let answer_by = began + engine.request_timeout.saturating_mul(2);
    let mut pause = Duration::from_millis(5);
    let mut unanswered = false;
    loop {
        let lease = &departure.lease;
        let now = engine.clock.now();
        events::not_released(lease, &error);
        unanswered |= error.kind() == FailureKind::MaybeApplied;
        // Past this moment the store has forgotten the lease by itself.
        if now >= lease.stored_until() {
            // One of the tries without an answer may have given it to the successor.
            if let (true, Some(heir), Some(turn)) =
                (unanswered, release.successor, lease.take_turns().pop())
            {
                let place = Place::unsure(heir.owner, now, now + heir.ttl);
                run::resume(&engine, turn, place, Duration::ZERO);
            }
            engine.registry.strike(lease, false);
            departure.answer(Err(LockError::backend(error)));
            return;
        }
        if error.kind() == FailureKind::Rejected || now >= answer_by {
            departure.answer_without_success(&error);
        }
        let mut is_told = now >= answer_by;
        let outcome = {
            let lease = departure.lease.clone();
            let again = async {
                engine.clock.sleep_until(now + pause).await;
                release.free_after = lease.free_after();
                release_once(&engine, &release).await
            };
            tokio::pin!(again);
            loop {
                tokio::select! {
                    biased;
                    outcome = &mut again => break outcome,
                    () = engine.clock.sleep_until(answer_by), if !is_told => {
                        departure.answer_without_success(&error);
                        is_told = true;
                    }
                }
            }
        };
        pause = (pause * 2).min(Duration::from_secs(1));
        match outcome {
            Ok(outcome) => return arrived(&engine, departure, &release, outcome, unanswered),
            Err(again) => error = again,
        }
    }
}

/// The store has freed the lease of `departure`, or says that it was not there; `unanswered` if earlier
/// tries may have done so. First the next in line is called, then the holder told: what is done is done
/// before anybody knows.
fn arrived(
    engine: &Arc<Engine>,
    mut departure: Departure,
    release: &ReleaseRequest,
    outcome: ReleaseOutcome,
    unanswered: bool,
) {
    let lease = &departure.lease;
    events::released(lease, outcome);
    let heir = release.successor.map(|successor| successor.owner);
    let now = engine.clock.now();
    let inherited = match (outcome, heir) {
        (ReleaseOutcome::SuccessorQueued { retry_after }, Some(heir)) => {
            Some((Place::inherited(heir, now), retry_after))
        }
        (ReleaseOutcome::SuccessorGranted, Some(heir)) => {
            Some((Place::inherited(heir, now), Duration::ZERO))
        }
        // One of the tries without an answer may have put it in line.
        (ReleaseOutcome::NotHeld, Some(heir)) if unanswered => {
            Some((Place::unsure(heir, now, now + lease.ask.policy.ttl.get()), Duration::ZERO))
        }
        // Those of this process stay away from a lock that is left open, like all who stand in line.
        _ if !release.barging_window.is_zero() => {
            Owner::random().ok().map(|owner| (Place::new(owner, now), release.barging_window))
        }
        _ => None,
    };
    let mut turns = lease.take_turns();
    match (inherited, turns.pop()) {
        (Some((place, pause)), Some(turn)) => run::resume(engine, turn, place, pause),
        (Some((place, _)), None) => {
            let (engine, LeaseRef { keys, ttl, .. }) = (engine.clone(), lease.to_store());
            let errand = engine.registry.clear_up();
            spawn(async move {
                give_back(&engine, place, keys, ttl).await;
                drop(errand);
            });
        }
        (None, turn) => drop(turn),
    }
    drop(turns);
    if let Some(until) = lease.haunted_until {
        let keep_until = lease.granted_at + lease.ask.policy.min_hold;
        let leftover = lease.to_store();
        let engine = engine.clone();
        let errand = engine.registry.clear_up();
        spawn(async move {
            clean_up(&engine, leftover, keep_until, until, usize::MAX).await;
            drop(errand);
        });
    }
    // When all that follows is under way itself: in between a shutdown would see nothing, and be over.
    engine.registry.strike(lease, true);
    // After a try without an answer, "not there" may be that try's doing.
    let free = outcome != ReleaseOutcome::NotHeld || unanswered;
    departure.answer(if free { Ok(()) } else { Err(lost()) });
}

/// Gives up a place: takes back what the store may have granted to it, and its stand in the store's line.
pub(crate) async fn give_back(engine: &Arc<Engine>, place: Place, keys: Arc<[Key]>, ttl: Duration) {
    if !place.is_clean() {
        // No body has run: nothing is kept, and the store forgets what it is not told of when that is over.
        let min_hold = place.haunted_until.since(engine.clock.now());
        let leftover = LeaseRef { keys, owner: place.owner, ttl, min_hold };
        clean_up(engine, leftover, place.since, place.haunted_until, place.unanswered).await;
    }
}

/// What frees `lease`: now, or at the end of its `min_hold`; and who of this process is next.
fn to_release(engine: &Engine, lease: &Lease) -> ReleaseRequest {
    let release = ReleaseRequest {
        lease: lease.to_store(),
        free_after: lease.free_after(),
        successor: None,
        barging_window: Duration::ZERO,
    };
    let [key] = &*lease.ask.wire else { return release };
    if !release.free_after.is_zero() || !lease.has_turns() {
        return release;
    }
    let now = engine.clock.now();
    if let Some(window) = engine.barging_window
        && engine.queue.is_stuffy(key, window.every, now)
    {
        engine.queue.air(key, now);
        return ReleaseRequest { barging_window: window.length, ..release };
    }
    let heir = engine.queue.heir(key).zip(Owner::random().ok());
    let successor = heir.map(|(ask, owner)| {
        // Under its name before the store knows it, so that no call is missed.
        engine.queue.stand(key, owner);
        Successor { owner, ttl: ask.policy.ttl.get() }
    });
    ReleaseRequest { successor, ..release }
}

/// Waits until no renewal of these leases is on its way.
async fn settle(engine: &Engine, leases: &[Arc<Lease>]) {
    let all = async {
        for lease in leases {
            lease.settled().await;
        }
    };
    let _ = timeout(engine.request_timeout, all).await;
}

fn lost() -> LockError {
    LockError::new(ErrorKind::Lost, "the lock was not ours any more when it was released").remedy(
        "somebody else may have been at work meanwhile: check the fence where you write, or choose a longer ttl",
    )
}

/// Frees what requests may leave behind that were never answered: `unanswered` of them may have been
/// applied, or may be applied yet. Repeats the release until it has met them all, or until the store
/// answers at a time when it would have forgotten them by itself. Until `keep_until` the keys stay taken.
///
/// What takes longer than [`AT_ONCE`] goes on with that of other acquires, in [`Undo`].
async fn clean_up(
    engine: &Arc<Engine>,
    lease: LeaseRef,
    keep_until: Instant,
    until: Instant,
    unanswered: usize,
) {
    let errand = engine.registry.clear_up();
    let began = engine.clock.now();
    let mut leftover = Leftover::new(lease, keep_until, until, unanswered, errand);
    loop {
        let release = leftover.release_at(engine.clock.now());
        let outcome = release_once(engine, &release).await;
        let now = engine.clock.now();
        let Some(due) = leftover.answered(&outcome, now) else { return };
        if now.since(began) >= AT_ONCE {
            return Undo::file(engine, leftover, due);
        }
        tokio::select! {
            () = engine.clock.sleep_until(due) => {}
            () = engine.registry.closing(), if leftover.is_answered() => return,
            () = engine.registry.closed() => return,
        }
    }
}

async fn release_once(
    engine: &Engine,
    release: &ReleaseRequest,
) -> Result<ReleaseOutcome, BackendError> {
    let one = std::slice::from_ref(release);
    let outcomes = timeout(engine.request_patience(), engine.store.release(one)).await;
    outcomes.unwrap_or_default().into_iter().next().unwrap_or_else(|| Err(silence()))
}

/// Frees all of `leases` in one round trip, whoever holds them. For the end of a shutdown.
pub(crate) async fn release_all(engine: &Arc<Engine>, mut leases: Vec<Arc<Lease>>) {
    leases.retain(|lease| lease.let_go());
    for lease in &leases {
        engine.watchdog.forget(lease);
    }
    settle(engine, &leases).await;
    let releases: Vec<_> = leases
        .iter()
        .map(|lease| ReleaseRequest {
            lease: lease.to_store(),
            free_after: lease.free_after(),
            successor: None,
            barging_window: Duration::ZERO,
        })
        .collect();
    let outcomes = timeout(engine.request_patience(), engine.store.release(&releases)).await;
    let mut outcomes = outcomes.unwrap_or_default().into_iter();
    for lease in &leases {
        match outcomes.next().unwrap_or_else(|| Err(silence())) {
            Ok(outcome) => {
                events::released(lease, outcome);
                engine.registry.strike(lease, true);
            }
            Err(error) => {
                events::not_released(lease, &error);
                engine.registry.strike(lease, false);
            }
        }
        drop(lease.take_turns());
    }
}

pub(crate) fn silence() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "the store did not answer a release in time")
        .remedy("the lock frees itself when its ttl is over; check the store and the network to it")
}
