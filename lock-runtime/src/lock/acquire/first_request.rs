//! The first request of an acquire that found an empty queue.
//!
//! Most acquires end here: the lock is free. All others continue in [`run`](super::run).

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::backend::{AcquireOutcome, AcquireRequest};
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::exec::events;
use crate::lock::acquire::attempt::{Answer, Attempts};
use crate::lock::acquire::run;
use crate::lock::acquire::time_limits::{admission_ends, left_for_request};
use crate::lock::admission::AdmissionSlot;
use crate::lock::core::PoolCore;
use crate::lock::grant;
use crate::lock::outgoing::FirstRequest;
use crate::queue::key_queue::{QueueEntry, WaitFor, Waiter};
use crate::queue::last_answer::{LastAnswer, WaitEnd};

/// Sends `batch` as one request, within `time_limit`. `in_flight` is dropped when it is answered.
pub(crate) async fn send_batch(
    core: Arc<PoolCore>,
    in_flight: impl Send,
    time_limit: Duration,
    mut batch: Vec<FirstRequest>,
) {
    let slot = admit(&core, &mut batch).await;
    if batch.is_empty() {
        return;
    }
    let request = |first: &FirstRequest| AcquireRequest::for_owner(&first.waiter.spec, first.owner);
    let requests: Vec<_> = batch.iter().map(request).collect();
    let sent = core.clock().now();
    let time_limit = time_limit.min(remaining_wait(&core, &batch, sent));
    let mut answers = core.acquire(slot, &requests, sent, time_limit).await.into_iter();
    drop(in_flight);
    // One reading for all: the clock is read again when a lease is picked up.
    let now = core.clock().now();
    for first in batch {
        on_answer(&core, first, sent, now, time_limit, answers.next());
    }
}

/// Waits until the store has room for `batch`, and rejects the requests if their wait ends or the pool closes before that.
async fn admit(core: &Arc<PoolCore>, batch: &mut Vec<FirstRequest>) -> AdmissionSlot {
    let mut admission = pin!(core.admit(batch.len()));
    if let Poll::Ready(slot) = poll_once(admission.as_mut()).await {
        return slot;
    }
    let ends = |first: &FirstRequest| {
        let policy = &first.waiter.spec.policy;
        admission_ends(policy, first.since, first.deadline, core.config.request_timeout)
    };
    loop {
        let next = batch.iter().filter_map(ends).min();
        let slot = tokio::select! {
            biased;
            // Before the room, which the batches ahead may have left for the same reason.
            () = core.tracker.closing() => {
                reject_all(batch);
                return AdmissionSlot::default();
            }
            slot = &mut admission => Some(slot),
            () = core.clock().sleep_until_due(next) => None,
        };
        batch.retain(|first| !first.waiter.is_cancelled());
        let now = core.clock().now();
        let is_over = |first: &mut FirstRequest| ends(first).is_some_and(|end| now >= end);
        for first in batch.extract_if(.., is_over) {
            let error = no_room(now.since(first.since));
            on_answer(core, first, now, now, Duration::ZERO, Some(Err(error)));
        }
        if let Some(slot) = slot {
            return slot;
        }
        if batch.is_empty() {
            return AdmissionSlot::default();
        }
    }
}

/// No request of `batch` was sent, and the pool closes.
fn reject_all(batch: &mut Vec<FirstRequest>) {
    for FirstRequest { permit, waiter, .. } in batch.drain(..) {
        // The permit first: its queue is closed as well.
        drop(permit);
        waiter.reject(LockError::pool_closed());
    }
}

async fn poll_once<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// The longest time that a wait of `batch` leaves for a request at `now`.
fn remaining_wait(core: &PoolCore, batch: &[FirstRequest], now: Instant) -> Duration {
    let remaining = |first: &FirstRequest| {
        let left = first.deadline.map(|deadline| deadline.since(now));
        left_for_request(core.time_limits(), &first.waiter.spec.policy, left)
    };
    batch.iter().map(remaining).max().unwrap_or(Duration::MAX)
}

/// The error of a request if its wait has ended before the store had room for it.
#[cold]
pub(super) fn no_room(waited: Duration) -> BackendError {
    let text = format!("other acquires of this process were ahead of this one for {waited:?}");
    BackendError::new(FailureKind::NotApplied, text).remedy(
        "the store answers more slowly than locks are requested: raise `wait`, shed load, or spread the locks over more stores",
    )
}

/// The answer arrived at `now`. The lease goes to the caller; otherwise the caller joins the queue, and its permit goes on to [`run`].
fn on_answer(
    core: &Arc<PoolCore>,
    first: FirstRequest,
    sent: Instant,
    now: Instant,
    time_limit: Duration,
    answer: Option<Result<AcquireOutcome, BackendError>>,
) {
    let FirstRequest { id, permit, mut waiter, owner, since, deadline } = first;
    // Counts the acquire until its answer is dealt with. In the queue, the task that sends its requests is counted.
    let _token = waiter.token.take();
    let spec = waiter.spec.clone();
    let mut attempts = Attempts::new(owner, since);
    let mut reported = None;
    let (answer, is_rejected, pause) =
        match attempts.on_answer(&spec.policy, sent, now, time_limit, answer) {
            Answer::Granted(granted) => {
                let contention = granted.contention;
                let grant = attempts.grant(&spec.policy, granted, permit);
                let lease = grant::lease(core, spec, grant, since, contention);
                return grant::deliver(core, lease, waiter.reply);
            }
            Answer::Contended { expires_in, retry_after, .. } => {
                reported = Some(id);
                events::contended(core.origin(&spec), expires_in);
                (LastAnswer::Held { expires_in }, false, retry_after)
            }
            Answer::Failed { error, retry_after } => {
                let is_rejected =
                    error.kind() == FailureKind::Rejected || core.store_status.is_refusing();
                (LastAnswer::Failed(error), is_rejected, retry_after)
            }
        };
    core.queue.record_answer(&spec.store_keys, &answer);
    let is_over = deadline.is_some_and(|deadline| now >= deadline);
    if is_rejected || is_over || spec.policy.is_out_of_attempts(1) {
        let error = core.queue.wait_error(permit.key(), WaitEnd::of(&spec.policy, 1), now);
        // The permit first: the caller may try the same key again immediately.
        run::resume(core, permit, attempts, pause, reported);
        waiter.reject(error);
    } else {
        let wait_for = WaitFor::Lock(waiter);
        let entry = QueueEntry { id, since, deadline, attempts: 1, wait_for };
        core.queue.insert_at_rank(permit.key(), entry);
        run::resume(core, permit, attempts, pause, reported);
    }
}
