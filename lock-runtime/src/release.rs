//! Frees what a holder lets go, and what nobody is known to hold.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::backend::{BackendError, Failure, Held, LeaseRef};
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
    let work = send_release(engine.clone(), lease.clone(), Some(reply));
    engine.run(work);
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

async fn send_release(
    engine: Arc<Engine>,
    lease: Arc<Lease>,
    mut reply: Option<oneshot::Sender<Result<(), LockError>>>,
) {
    let _ = timeout(engine.patience, lease.settled()).await;
    let request = lease.to_release();
    let began = engine.clock.now();
    let mut pause = Duration::from_millis(5);
    let mut tried_before = false;
    let confirmed = loop {
        let outcome = release_once(&engine, &request).await;
        let now = engine.clock.now();
        match outcome {
            Ok(held) => {
                observe::released(&lease, held);
                // After a try without an answer, "not there" may be that try's doing.
                let result = if held == Held::Yes || tried_before { Ok(()) } else { Err(lost()) };
                answer(&mut reply, result);
                break true;
            }
            Err(error) => {
                observe::not_released(&lease, &error);
                let refused = error.failure() == Failure::Refused;
                if refused || now.since(began) >= engine.patience {
                    answer(&mut reply, Err(LockError::backend(error)));
                    lease.pass_turns();
                }
                // Past this moment the store has forgotten the lease by itself.
                if refused || now >= lease.stored_until() {
                    break false;
                }
            }
        }
        tried_before = true;
        engine.clock.sleep_until(now + pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    };
    lease.pass_turns();
    engine.registry.strike(&lease, confirmed);
    if let Some(until) = lease.haunted_until {
        clean_up(&engine, lease.to_renew(), until, usize::MAX).await;
    }
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

/// Frees what an acquire that gave up may have left behind: `unanswered` of its requests were never
/// answered and may be applied at any time, also later. Repeats the release until it has met them all,
/// or until the store would have forgotten them by itself.
pub(crate) async fn clean_up(
    engine: &Arc<Engine>,
    mut leftover: LeaseRef,
    until: Instant,
    unanswered: usize,
) {
    leftover.keep_for = Duration::ZERO;
    let _errand = engine.registry.clear_up();
    let mut met = 0;
    let mut pause = Duration::from_millis(20);
    while met < unanswered {
        if matches!(release_once(engine, &leftover).await, Ok(Held::Yes)) {
            met += 1;
            continue;
        }
        let now = engine.clock.now();
        if now >= until {
            return;
        }
        tokio::select! {
            () = engine.clock.sleep_until((now + pause).min(until)) => {}
            // A shutdown does not wait for requests that may never arrive.
            () = engine.registry.closing() => return,
        }
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

async fn release_once(engine: &Engine, request: &LeaseRef) -> Result<Held, BackendError> {
    let requests = std::slice::from_ref(request);
    let outcomes = timeout(engine.patience, engine.store.release(requests)).await;
    outcomes.unwrap_or_default().into_iter().next().unwrap_or_else(|| Err(silence()))
}

/// Frees all of `leases` in one round trip, whoever holds them. For the end of a shutdown.
pub(crate) async fn release_all(engine: &Arc<Engine>, leases: Vec<Arc<Lease>>) {
    let mut ours = Vec::new();
    for lease in leases {
        if lease.let_go() {
            engine.watchdog.forget(&lease);
            ours.push(lease);
        }
    }
    let requests: Vec<_> = ours.iter().map(|lease| lease.to_release()).collect();
    let mut outcomes = timeout(engine.patience, engine.store.release(&requests))
        .await
        .unwrap_or_default()
        .into_iter();
    for lease in &ours {
        let outcome = outcomes.next().unwrap_or_else(|| Err(silence()));
        match &outcome {
            Ok(held) => observe::released(lease, *held),
            Err(error) => observe::not_released(lease, error),
        }
        lease.pass_turns();
        engine.registry.strike(lease, outcome.is_ok());
    }
}

fn silence() -> BackendError {
    BackendError::new(Failure::Unknown, "the store did not answer a release in time")
        .remedy("the lock frees itself when its ttl is over; check the store and the network to it")
}
