//! Releases leases at the store, and retries until the store has answered or forgotten them.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{LeaseRef, ReleaseOutcome, ReleaseRequest, Successor};
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::loss::Loss;
use crate::base::measurement::{Measurement, ReleaseResult};
use crate::base::owner::Owner;
use crate::base::sync::spawn;
use crate::exec::events;
use crate::lease::lease::Lease;
use crate::lock::acquire::attempt::Attempts;
use crate::lock::acquire::run;
use crate::lock::core::PoolCore;
use crate::lock::outgoing::PendingRelease;
use crate::lock::undo::{release_once, release_within, silence, spawn_undo, undo};
use crate::lock::undo_queue::Leftover;
use crate::queue::last_answer::LastAnswer;
use crate::queue::wait_queue::AfterRelease;

/// Releases all of `batch` with one request. A release that fails continues alone. `in_flight` is dropped when it is answered.
pub(crate) async fn send_batch(
    core: Arc<PoolCore>,
    in_flight: impl Send,
    mut batch: Vec<PendingRelease>,
) {
    for pending in batch.extract_if(.., |pending| !pending.lease.may_send_release()) {
        spawn(release_after_renewal(core.clone(), pending));
    }
    if batch.is_empty() {
        return;
    }
    let began = core.clock().now();
    let requests: Vec<_> =
        batch.iter().map(|pending| request(&core, &pending.lease, began)).collect();
    let outcomes = release_first(&core, &mut batch, &requests, began).await;
    drop(in_flight);
    for ((pending, request), outcome) in batch.into_iter().zip(requests).zip(outcomes) {
        match outcome {
            Ok(outcome) => on_released(&core, pending, &request, outcome, false),
            Err(error) => spawn(retry(core.clone(), pending, request, began, error)),
        }
    }
}

/// Sends the releases of `batch`, which began at `began`.
async fn release_first(
    core: &PoolCore,
    batch: &mut [PendingRelease],
    requests: &[ReleaseRequest],
    began: Instant,
) -> Vec<Result<ReleaseOutcome, BackendError>> {
    let limit = core.store_call_timeout();
    let call = release_within(core, requests, limit);
    let answer_by = answer_by(core, began);
    // The usual call is over before that, and needs no second timer.
    if core.clock().now() + limit <= answer_by {
        call.await
    } else {
        fail_late(core, batch, answer_by, &silence(), call).await
    }
}

/// Runs `call`. If it is not over at `answer_by`, the callers of `batch` get `error`, and the call goes on.
async fn fail_late<T>(
    core: &PoolCore,
    batch: &mut [PendingRelease],
    answer_by: Instant,
    error: &BackendError,
    call: impl Future<Output = T>,
) -> T {
    let mut call = pin!(call);
    tokio::select! {
        biased;
        output = &mut call => return output,
        () = core.clock().sleep_until(answer_by) => {}
    }
    batch.iter_mut().for_each(|pending| pending.fail(error));
    call.await
}

/// The latest time at which the caller of a release gets its result. Two request timeouts are enough to detect a silent
/// connection and to try another one. The retries go on after that.
fn answer_by(core: &PoolCore, began: Instant) -> Instant {
    began + core.config.request_timeout.saturating_mul(2)
}

/// Releases a lease with a renewal in flight.
async fn release_after_renewal(core: Arc<PoolCore>, mut pending: PendingRelease) {
    let began = core.clock().now();
    wait_for_renewals(&core, std::slice::from_ref(&pending.lease)).await;
    let request = request(&core, &pending.lease, core.clock().now());
    let (one, requests) = (std::slice::from_mut(&mut pending), std::slice::from_ref(&request));
    let outcome = release_first(&core, one, requests, began).await.pop();
    match outcome.unwrap_or_else(|| Err(silence())) {
        Ok(outcome) => on_released(&core, pending, &request, outcome, false),
        Err(error) => retry(core, pending, request, began, error).await,
    }
}

/// Repeats a release that began at `began` and failed with `error`. It ends when the store answers or has forgotten the
/// lease, or the pool is closed, and with it the store.
async fn retry(
    core: Arc<PoolCore>,
    mut pending: PendingRelease,
    mut request: ReleaseRequest,
    began: Instant,
    mut error: BackendError,
) {
    let clock = core.clock();
    let answer_by = answer_by(&core, began);
    let mut pause = Duration::from_millis(5);
    let mut may_be_applied = false;
    loop {
        let now = clock.now();
        may_be_applied |= error.kind() == FailureKind::MaybeApplied;
        pending.lease.metrics.record(Measurement::Release(ReleaseResult::Failed));
        if now >= pending.lease.forgotten_at() {
            return give_up(&core, pending, &request, may_be_applied, error);
        }
        let failed = core.failed_releases.report(now);
        events::not_released_yet(pending.lease.origin(), failed, &error);
        if pending.lease.has_permit() {
            let answer = LastAnswer::Failed(error.clone());
            core.queue.record_answer(&pending.lease.spec.store_keys, &answer);
        }
        if error.kind() == FailureKind::Rejected {
            pending.fail(&error);
        }
        let lease = pending.lease.clone();
        let again = async {
            clock.sleep_until(now + pause).await;
            request.free_after = lease.locked_after_release();
            release_once(&core, &request).await
        };
        let one = std::slice::from_mut(&mut pending);
        let outcome = tokio::select! {
            biased;
            outcome = fail_late(&core, one, answer_by, &error, again) => Some(outcome),
            () = core.tracker.closed() => None,
        };
        let Some(outcome) = outcome else {
            return give_up(&core, pending, &request, may_be_applied, error);
        };
        // A connection that is down refuses immediately. While the caller waits, a connection that is up again is used soon.
        let is_refused = error.kind() == FailureKind::NotApplied && clock.now() < answer_by;
        let longest = Duration::from_millis(if is_refused { 80 } else { 1_000 });
        pause = (pause * 2).min(longest);
        match outcome {
            Ok(outcome) => return on_released(&core, pending, &request, outcome, may_be_applied),
            Err(again) => error = again,
        }
    }
}

/// No release was answered, and none is sent any more. The store has forgotten the lease by its ttl, or will.
fn give_up(
    core: &Arc<PoolCore>,
    mut pending: PendingRelease,
    request: &ReleaseRequest,
    may_be_applied: bool,
    error: BackendError,
) {
    let lease = &pending.lease;
    let now = core.clock().now();
    report_given_up(core, lease, now, &error);
    // An unanswered release may have granted the lock to the successor.
    if may_be_applied && let Some(next) = &request.successor {
        let attempts = Attempts::for_unconfirmed_successor(next, now);
        continue_as(core, lease, attempts, Duration::ZERO);
    }
    core.tracker.remove_ended(lease, false);
    pending.answer(Err(LockError::backend(error)));
}

/// The store answered `request` with `outcome`. `may_be_applied` if earlier tries may have been applied.
///
/// The next waiter is served before the caller gets its result, so that all effects precede it.
fn on_released(
    core: &Arc<PoolCore>,
    mut pending: PendingRelease,
    request: &ReleaseRequest,
    outcome: ReleaseOutcome,
    may_be_applied: bool,
) {
    let lease = pending.lease.clone();
    let was_held = outcome != ReleaseOutcome::NotHeld;
    // After an unanswered try, "not held" may be its effect.
    let is_released = was_held || may_be_applied;
    report_released(&lease, was_held, is_released);
    let now = || core.clock().now();
    match successor_attempts(request, outcome, may_be_applied, now) {
        Some((attempts, pause)) => {
            if lease.has_permit() {
                let answer = LastAnswer::Held { expires_in: None };
                core.queue.record_answer(&lease.spec.store_keys, &answer);
            }
            continue_as(core, &lease, attempts, pause);
        }
        None => drop(lease.take_permit()),
    }
    let late_renewals = lease.late_renewals_until().filter(|_| outlives_release(core, request));
    if let Some(ambiguous_until) = lease.ambiguous_until.max(late_renewals) {
        let leftover = Leftover {
            lease: lease.to_store(),
            locked_until: now() + lease.locked_after_release(),
            ambiguous_until,
            forgotten_at: lease.forgotten_at(),
            grants: usize::MAX,
        };
        spawn(undo(core, leftover));
    }
    // After all follow-up work has its own token: a shutdown in between would find nothing in flight.
    core.tracker.remove_ended(&lease, true);
    pending.answer(if is_released { Ok(()) } else { Err(LockError::lost_before_release()) });
}

/// Whether a renewal that the store serves after `request` may have an effect. It extends a lock that is kept, and in some
/// stores it restores one.
fn outlives_release(core: &PoolCore, request: &ReleaseRequest) -> bool {
    !request.free_after.is_zero() || core.capabilities.renewal_restores
}

/// Continues the queue of the released key with `attempts`, or undoes them if the permit has passed on.
fn continue_as(core: &Arc<PoolCore>, lease: &Lease, attempts: Attempts, pause: Duration) {
    if let Some(permit) = lease.take_permit() {
        return run::resume(core, permit, attempts, pause, None);
    }
    let LeaseRef { keys, ttl, .. } = lease.to_store();
    spawn_undo(core, &attempts, keys, ttl);
}

pub(super) fn report_given_up(core: &PoolCore, lease: &Lease, now: Instant, error: &BackendError) {
    let failed = core.releases_given_up.report(now);
    events::not_released(lease.origin(), failed, lease.forgotten_at().since(now), error);
}

pub(super) fn report_released(lease: &Lease, was_held: bool, is_released: bool) {
    if !is_released && lease.lose_before_release() {
        lease.report_loss(Loss::FoundAtRelease);
    }
    let held_for = || lease.has_holder().then(|| lease.held_for());
    events::released(lease.origin(), held_for, was_held);
}

/// The requests of the next waiter of this process, and when the first one is due, if the release has begun them.
fn successor_attempts(
    request: &ReleaseRequest,
    outcome: ReleaseOutcome,
    may_be_applied: bool,
    now: impl FnOnce() -> Instant,
) -> Option<(Attempts, Duration)> {
    match (outcome, &request.successor) {
        (ReleaseOutcome::SuccessorQueued { retry_after }, Some(next)) => {
            Some((Attempts::for_successor(next, now()), retry_after))
        }
        (ReleaseOutcome::SuccessorGranted, Some(next)) => {
            Some((Attempts::for_successor(next, now()), Duration::ZERO))
        }
        // An unanswered try may have queued it.
        (ReleaseOutcome::NotHeld, Some(next)) if may_be_applied => {
            Some((Attempts::for_unconfirmed_successor(next, now()), Duration::ZERO))
        }
        // The waiters of this process stay away during the window, as all queued owners do.
        _ if !request.barging_window.is_zero() => {
            let owner = Owner::random().ok()?;
            Some((Attempts::new(owner, now()), request.barging_window))
        }
        _ => None,
    }
}

/// The request at `now` that frees `lease`, immediately or at the end of its `min_hold`, and names the next waiter of this
/// process.
fn request(core: &PoolCore, lease: &Lease, now: Instant) -> ReleaseRequest {
    let mut request = end_of(lease, lease.locked_after_release());
    let Some(key) = lease.spec.single_key() else { return request };
    if !request.free_after.is_zero() || !lease.has_permit() {
        return request;
    }
    let window = core.config.barging_window;
    let interval = window.map(|window| window.interval);
    match core.queue.begin_release(key, lease.id, interval, now, || lease.expected_holders()) {
        AfterRelease::NoWaiter => {}
        AfterRelease::BargingWindow => {
            request.barging_window = window.map_or(Duration::ZERO, |window| window.length);
        }
        AfterRelease::Successor(spec) => {
            request.successor = Owner::random().ok().map(|owner| {
                // Before the store knows the owner, so that its notification is not missed.
                core.queue.name_successor(key, owner);
                Successor::for_owner(&spec, owner)
            });
        }
    }
    request
}

pub(super) fn end_of(lease: &Lease, free_after: Duration) -> ReleaseRequest {
    ReleaseRequest { free_after, ..ReleaseRequest::new(lease.to_store()) }
}

/// Waits until no renewal of `leases` is in flight, at most for one request timeout.
pub(super) async fn wait_for_renewals(core: &PoolCore, leases: &[Arc<Lease>]) {
    let all = async {
        for lease in leases {
            lease.until_release_may_be_sent().await;
        }
    };
    let _ = timeout(core.config.request_timeout, all).await;
}
