//! Releases what ambiguous requests may have left in the store.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{LeaseRef, ReleaseOutcome, ReleaseRequest};
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::sync::spawn;
use crate::lock::acquire::attempt::Attempts;
use crate::lock::core::PoolCore;
use crate::lock::undo_queue::{LONGEST_PAUSE, Leftover, Undo, UndoScope, UndoStep};

/// How long the undo of one acquire has requests of its own, before it joins those of other acquires.
const AT_ONCE: Duration = Duration::from_millis(250);

/// How long a store keeps the queue position of an owner that sends no more requests.
const QUEUE_POSITION: Duration = Duration::from_secs(10);

/// The longest pause between two requests in which some entries fail.
const LONGEST_PAUSE_IN_PART: Duration = Duration::from_millis(100);

/// Ends the attempts of an acquire: releases what the store may have granted, and leaves its wait queue.
pub(crate) async fn undo_attempts(
    core: &Arc<PoolCore>,
    attempts: Attempts,
    keys: Arc<[Key]>,
    ttl: Duration,
) {
    if let Some(leftover) = leftover(core, &attempts, keys, ttl) {
        undo(core, leftover).await;
    }
}

/// Like [`undo_attempts`], in a task of its own, which a shutdown waits for.
pub(crate) fn spawn_undo(
    core: &Arc<PoolCore>,
    attempts: &Attempts,
    keys: Arc<[Key]>,
    ttl: Duration,
) {
    if let Some(leftover) = leftover(core, attempts, keys, ttl) {
        spawn(undo(core, leftover));
    }
}

/// What the requests of `attempts` may have left in the store.
fn leftover(
    core: &PoolCore,
    attempts: &Attempts,
    keys: Arc<[Key]>,
    ttl: Duration,
) -> Option<Leftover> {
    if attempts.has_no_side_effects() {
        return None;
    }
    let now = core.clock().now();
    // A store that keeps grants for their `min_hold` forgets them only after it. The release itself frees the keys
    // immediately, because no body has run.
    let min_hold = attempts.kept_until.since(now);
    let positions_until = now + QUEUE_POSITION;
    Some(Leftover {
        lease: LeaseRef { min_hold, ..LeaseRef::new(keys, attempts.owner, ttl) },
        locked_until: attempts.since,
        // A request that is served late may put the owner into the queue, for longer than a short ttl.
        ambiguous_until: attempts
            .ambiguous_until
            .map_or(positions_until, |it| it.max(positions_until)),
        forgotten_at: attempts.kept_until.max(positions_until),
        grants: match attempts.grants_to_undo() {
            0 => 0,
            _ if core.capabilities.applied_in_parts => usize::MAX,
            grants => grants,
        },
    })
}

/// Releases `leftover` until nothing of it can be in the store any more. A shutdown waits for it from this call on.
///
/// After [`AT_ONCE`] it goes on in the background, with the undos of other acquires.
pub(crate) fn undo(core: &Arc<PoolCore>, leftover: Leftover) -> impl Future<Output = ()> + use<> {
    let undo = Undo::new(leftover, core.tracker.begin_cleanup());
    run(core.clone(), undo)
}

async fn run(core: Arc<PoolCore>, mut undo: Undo) {
    let (clock, tracker) = (core.clock(), &core.tracker);
    let began = clock.now();
    loop {
        let request = undo.request(clock.now());
        let outcome = release_once(&core, &request).await;
        let now = clock.now();
        let Some(due) = undo.on_outcome(&request, &outcome, now) else { return };
        if now.since(began) >= AT_ONCE {
            return queue(&core, undo, due);
        }
        tokio::select! {
            () = clock.sleep_until(due) => {}
            () = tracker.closing(), if undo.is_answered() => return,
            () = tracker.closed() => return,
        }
    }
}

/// One release request, within the request timeout.
pub(crate) async fn release_once(
    core: &PoolCore,
    request: &ReleaseRequest,
) -> Result<ReleaseOutcome, BackendError> {
    let one = std::slice::from_ref(request);
    let outcome = release_within(core, one, core.store_call_timeout()).await.pop();
    outcome.unwrap_or_else(|| Err(silence()))
}

/// One call to the store, with an outcome for each request.
pub(crate) async fn release_within(
    core: &PoolCore,
    requests: &[ReleaseRequest],
    limit: Duration,
) -> Vec<Result<ReleaseOutcome, BackendError>> {
    let outcomes = timeout(limit, core.backend().release(requests)).await;
    outcomes.unwrap_or_else(|_| requests.iter().map(|_| Err(silence())).collect())
}

pub(crate) fn silence() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "the store did not answer a release in time")
        .remedy("the lock expires with its ttl; check the store and the network to it")
}

fn queue(core: &Arc<PoolCore>, undo: Undo, due: Instant) {
    if core.undo.push(undo, due) {
        core.driver().spawn(work(UndoWorker { core: core.clone(), is_over: false }));
    }
}

/// The task that works on the undos. Dropped before they are over, the next entry starts another one.
struct UndoWorker {
    core: Arc<PoolCore>,
    /// The queue knows that the task is over, and may have another one by now.
    is_over: bool,
}

impl Drop for UndoWorker {
    fn drop(&mut self) {
        if !self.is_over {
            self.core.undo.on_worker_dropped();
        }
    }
}

async fn work(mut worker: UndoWorker) {
    /// A new entry may be due before the next known one.
    const LONGEST_WAIT: Duration = Duration::from_millis(100);
    let core = worker.core.clone();
    let mut pause = Duration::ZERO;
    loop {
        let now = core.clock().now();
        match core.undo.next(now, scope(&core, !pause.is_zero())) {
            UndoStep::Over => break,
            UndoStep::WaitUntil(due) => wait_until(&core, due.min(now + LONGEST_WAIT)).await,
            UndoStep::Send(batch) => {
                pause = send(&core, batch, pause).await;
                if !pause.is_zero() {
                    wait_until(&core, core.clock().now() + pause).await;
                }
            }
        }
    }
    worker.is_over = true;
}

fn scope(core: &PoolCore, is_silent: bool) -> UndoScope {
    if core.tracker.is_closed() {
        UndoScope::None
    } else if !core.tracker.is_open() {
        UndoScope::Closing
    } else if is_silent {
        UndoScope::Silent
    } else {
        UndoScope::All
    }
}

/// Sends one batch. Returns how long to wait before the next one.
async fn send(core: &Arc<PoolCore>, batch: Vec<Undo>, pause: Duration) -> Duration {
    let now = core.clock().now();
    let requests: Vec<_> = batch.iter().map(|undo| undo.request(now)).collect();
    let outcomes = release_within(core, &requests, core.store_call_timeout()).await;
    let now = core.clock().now();
    let (count, mut failures) = (batch.len(), 0);
    for ((mut undo, request), outcome) in batch.into_iter().zip(&requests).zip(outcomes) {
        failures += usize::from(outcome.is_err());
        if let Some(due) = undo.on_outcome(request, &outcome, now) {
            queue(core, undo, due);
        }
    }
    let longest = match failures {
        0 => return Duration::ZERO,
        failures if failures == count => LONGEST_PAUSE,
        _ => LONGEST_PAUSE_IN_PART,
    };
    (pause * 2).clamp(Duration::from_millis(20), longest)
}

/// Resolves at `moment`, or when the pool enters a later phase.
async fn wait_until(core: &PoolCore, moment: Instant) {
    let tracker = &core.tracker;
    tokio::select! {
        () = core.clock().sleep_until(moment) => {}
        () = tracker.closing(), if tracker.is_open() => {}
        () = tracker.closed(), if !tracker.is_open() => {}
    }
}
