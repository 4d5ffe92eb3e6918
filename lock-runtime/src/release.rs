//! Frees what a holder lets go, and what nobody is known to hold.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::backend::{BackendError, Failure, Held, LeaseRef, Release};
use crate::clock::Instant;
use crate::driver::Driver;
use crate::engine::Engine;
use crate::error::{ErrorKind, LockError};
use crate::lease::Lease;
use crate::observe;

/// Lets `lease` go. The release is on its way whether or not the result is awaited; `None` if it was
/// let go before.
pub(crate) fn release(engine: &Arc<Engine>, lease: &Arc<Lease>) -> Option<Releasing> {
    if !lease.let_go() {
        return None;
    }
    engine.watchdog.forget(lease);
    let (reply, answer) = oneshot::channel();
    engine.run(send_release(engine.clone(), lease.clone(), reply));
    Some(Releasing(answer))
}

/// A release on its way.
#[derive(Debug)]
pub(crate) struct Releasing(oneshot::Receiver<Result<(), LockError>>);

impl Future for Releasing {
    type Output = Result<(), LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|answer| answer.unwrap_or_else(|_| Err(Driver::gone())))
    }
}

/// Frees `lease` at the store, however long it takes, and then calls the next in line. In this order: what
/// is done is done before the holder is told.
async fn send_release(
    engine: Arc<Engine>,
    lease: Arc<Lease>,
    reply: oneshot::Sender<Result<(), LockError>>,
) {
    settle(&engine, std::slice::from_ref(&lease)).await;
    let mut reply = Some(reply);
    let began = engine.clock.now();
    let mut pause = Duration::from_millis(5);
    let mut unanswered = false;
    loop {
        let outcome = release_once(&engine, lease.to_release()).await;
        let now = engine.clock.now();
        let error = match &outcome {
            Ok(held) => {
                finish(&engine, &lease, &outcome);
                // After a try without an answer, "not there" may be that try's doing.
                let free = *held == Held::Yes || unanswered;
                answer(&mut reply, if free { Ok(()) } else { Err(lost()) });
                break;
            }
            // Past this moment the store has forgotten the lease by itself.
            Err(error) if now >= lease.stored_until() => {
                finish(&engine, &lease, &outcome);
                answer(&mut reply, Err(LockError::backend(error.clone())));
                break;
            }
            Err(error) => error,
        };
        observe::not_released(&lease, error);
        unanswered |= error.failure() == Failure::Unknown;
        // Twice the patience: long enough to be sure of a connection that went silent, and to try another.
        let enough = engine.patience.saturating_mul(2);
        if error.failure() == Failure::Refused || now.since(began) >= enough {
            lease.pass_turns();
            answer(&mut reply, Err(LockError::backend(error.clone())));
        }
        engine.clock.sleep_until(now + pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
    if let Some(until) = lease.haunted_until {
        let keep_until = lease.granted_at + lease.policy.min_hold;
        clean_up(&engine, lease.to_store(), keep_until, until, usize::MAX).await;
    }
}

/// Waits until no renewal of these leases is on its way.
async fn settle(engine: &Engine, leases: &[Arc<Lease>]) {
    let all = async {
        for lease in leases {
            lease.settled().await;
        }
    };
    let _ = timeout(engine.patience, all).await;
}

/// Nothing more will be done about `lease`.
fn finish(engine: &Engine, lease: &Arc<Lease>, outcome: &Result<Held, BackendError>) {
    match outcome {
        Ok(held) => observe::released(lease, *held),
        Err(error) => observe::not_released(lease, error),
    }
    lease.pass_turns();
    engine.registry.strike(lease, outcome.is_ok());
}

fn answer(
    reply: &mut Option<oneshot::Sender<Result<(), LockError>>>,
    result: Result<(), LockError>,
) {
    if let Some(reply) = reply.take() {
        let _ = reply.send(result);
    }
}

fn lost() -> LockError {
    LockError::new(ErrorKind::Lost, "the lock was not ours any more when it was released").remedy(
        "somebody else may have been at work meanwhile: check the fence where you write, or choose a longer ttl",
    )
}

/// Frees what requests may leave behind that were never answered: `unanswered` of them may have been
/// applied, or may be applied yet. Repeats the release until it has met them all, or until the store
/// answers at a time when it would have forgotten them by itself. Until `keep_until` the keys stay taken.
pub(crate) async fn clean_up(
    engine: &Arc<Engine>,
    leftover: LeaseRef,
    keep_until: Instant,
    until: Instant,
    unanswered: usize,
) {
    let _errand = engine.registry.clear_up();
    let mut met = 0;
    let mut answered = false;
    let mut pause = Duration::from_millis(20);
    while met < unanswered {
        let keep_for = keep_until.since(engine.clock.now());
        let outcome = release_once(engine, Release { lease: leftover.clone(), keep_for }).await;
        let now = engine.clock.now();
        match outcome {
            Ok(_) if now >= until => return,
            Ok(Held::Yes) if keep_for.is_zero() => met += 1,
            Ok(_) | Err(_) => {}
        }
        answered |= outcome.is_ok();
        tokio::select! {
            () = engine.clock.sleep_until(now + pause) => {}
            // A shutdown waits for what has arrived at the store, not for requests that may never arrive.
            () = engine.registry.closing(), if answered => return,
            () = engine.registry.closed() => return,
        }
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

async fn release_once(engine: &Engine, release: Release) -> Result<Held, BackendError> {
    let outcomes = timeout(engine.patience, engine.store.release(&[release])).await;
    outcomes.unwrap_or_default().into_iter().next().unwrap_or_else(|| Err(silence()))
}

/// Frees all of `leases` in one round trip, whoever holds them. For the end of a shutdown.
pub(crate) async fn release_all(engine: &Arc<Engine>, mut leases: Vec<Arc<Lease>>) {
    leases.retain(|lease| lease.let_go());
    for lease in &leases {
        engine.watchdog.forget(lease);
    }
    settle(engine, &leases).await;
    let releases: Vec<_> = leases.iter().map(|lease| lease.to_release()).collect();
    let outcomes = timeout(engine.patience, engine.store.release(&releases)).await;
    let mut outcomes = outcomes.unwrap_or_default().into_iter();
    for lease in &leases {
        finish(engine, lease, &outcomes.next().unwrap_or_else(|| Err(silence())));
    }
}

fn silence() -> BackendError {
    BackendError::new(Failure::Unknown, "the store did not answer a release in time")
        .remedy("the lock frees itself when its ttl is over; check the store and the network to it")
}
