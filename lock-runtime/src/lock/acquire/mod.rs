//! Acquires one or several keys.

pub(crate) mod attempt;
pub(crate) mod first_request;
mod local_permits;
mod multi_key;
mod pending_reply;
pub(crate) mod run;
mod stepwise;
pub(crate) mod time_limits;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::base::error::LockError;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::exec::batcher::Batcher;
use crate::exec::driver_answer::DriverAnswer;
use crate::lease::held_lease::HeldLease;
use crate::lease::tracker::InFlightToken;
use crate::lock::core::PoolCore;
use crate::lock::linger;
use crate::lock::outgoing::{FirstRequest, Outgoing};
use crate::lock::waiter::LockWaiter;
use crate::queue::permit::KeyPermit;
use crate::queue::wait_params::WaitParams;
use crate::queue::wait_queue::Enqueued;
use crate::queue::waiting::Waiting;

/// Starts the acquire of all keys of `spec`.
///
/// # Errors
/// [`PoolClosed`](crate::ErrorKind::PoolClosed), `QueueFull`, and `Backend` in an outage; nothing was sent.
pub(crate) fn acquire(
    core: &Arc<PoolCore>,
    spec: Arc<LockSpec>,
) -> Result<PendingAcquire, LockError> {
    let token = core.tracker.try_begin().ok_or_else(LockError::pool_closed)?;
    if let Some(refusal) = core.store_status.refusal_unless_trial() {
        return Err(refusal);
    }
    let mut params = WaitParams::of(core.clock().now(), &spec.policy);
    // The former body of this process may have been cancelled or dropped a moment ago.
    if params.is_single_try() && core.queue.are_being_released(&spec.store_keys) {
        params.extend_single_try(core.config.request_timeout);
    }
    if spec.single_key().is_some() {
        return acquire_one(core, spec, params, token);
    }
    if linger::make_way(core, &spec.store_keys) {
        params.extend_single_try(core.config.request_timeout);
    }
    let (reply, answer) = oneshot::channel();
    multi_key::spawn_multi_key(core, spec, params, token, reply)?;
    Ok(PendingAcquire::Several(DriverAnswer::new(answer, &core.queue.process)))
}

/// An acquire that waits for its lease.
///
/// Dropping it leaves nothing behind. It leaves the queue. The driver awaits the answer to a request in flight, and
/// releases what it may have been granted.
#[derive(Debug)]
pub(crate) enum PendingAcquire {
    One(Waiting<LockWaiter, HeldLease>),
    Several(DriverAnswer<HeldLease>),
}

impl Future for PendingAcquire {
    type Output = Result<HeldLease, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::One(waiting) => Pin::new(waiting).poll(cx),
            Self::Several(answer) => Pin::new(answer).poll(cx),
        }
    }
}

/// Enqueues the waiter. If the queue was empty, sends the first request.
fn acquire_one(
    core: &Arc<PoolCore>,
    spec: Arc<LockSpec>,
    mut params: WaitParams,
    token: InFlightToken,
) -> Result<PendingAcquire, LockError> {
    let keys = spec.store_keys.clone();
    let key = &keys[0];
    let waiting = |id, answer| {
        let answer = DriverAnswer::new(answer, &core.queue.process);
        PendingAcquire::One(Waiting::new(core.queue.clone(), key.clone(), id, answer))
    };
    let (reply, answer) = oneshot::channel();
    let mut waiter = LockWaiter { spec, reply, token: Some(token) };
    let mut unfit = None;
    let (id, enqueued) = loop {
        let (id, enqueued) = core.queue.enqueue(key, &params, waiter)?;
        // Released for this waiter, which is in the queue by now.
        drop(unfit.take());
        match enqueued {
            Enqueued::Lingering(lingered, lease) => {
                match linger::take(core, key, lease, lingered, params.since) {
                    // Nothing is asked of the store, which may be down.
                    Ok(()) => return Ok(waiting(id, answer)),
                    Err((back, lease)) => (waiter, unfit) = (back, lease),
                }
                // The release is awaited.
                params.extend_single_try(core.config.request_timeout);
            }
            enqueued => break (id, enqueued),
        }
    };
    // Dropped at a refusal, it leaves the queue.
    let waiting = waiting(id, answer);
    let Enqueued::Head(waiter) = enqueued else {
        // The waiters in front of it were rejected when the outage was seen.
        return match core.store_status.refusal_without_trial() {
            Some(refusal) => Err(refusal),
            None => Ok(waiting),
        };
    };
    let permit = KeyPermit::new(core.clone(), keys.clone());
    let owner = Owner::random()?;
    let WaitParams { since, deadline, .. } = params;
    let first = FirstRequest { id, permit, waiter, owner, since, deadline };
    if core.driver().is_gone() {
        // No renewal would keep a grant alive.
        Batcher::push_later(core, Outgoing::Acquire(first));
    } else {
        core.send_from_caller(Outgoing::Acquire(first));
    }
    Ok(waiting)
}
