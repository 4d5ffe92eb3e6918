//! Acquires several keys for one task, all or none. Runs on the driver, so that the undo completes even if the task is
//! cancelled.
//!
//! 1. **All permits, then the store.** All keys are requested with the permits of all of them, which the queues give in one
//!    step. An answer that is not a grant returns the permits.
//! 2. **At the store like another process.** A request that waits there keeps only permits that no task of this process
//!    uses. They are those of the keys that it holds, and of the key that it is queued for ([`stepwise`](super::stepwise)).
//!    All other tasks send requests to the store like tasks of other processes, and get the same answers.
//! 3. **The wait is bounded.** The task gets its result at its deadline, even while an answer is awaited. Only the first
//!    request has the least time that a request needs. The undo goes on here.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{LeaseRef, LeaseStatus, ReleaseRequest};
use crate::base::backend_error::FailureKind;
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::exec::events;
use crate::lease::tracker::InFlightToken;
use crate::lock::acquire::attempt::{Answer, Attempts, Granted, Requested, is_cut_off};
use crate::lock::acquire::first_request::no_room;
use crate::lock::acquire::local_permits::LocalPermits;
use crate::lock::acquire::pending_reply::PendingReply;
use crate::lock::acquire::stepwise::{BackOff, NextStep, Stepwise, Upkeep};
use crate::lock::acquire::time_limits::{admission_ends, time_limit};
use crate::lock::admission::AdmissionSlot;
use crate::lock::core::PoolCore;
use crate::lock::grant;
use crate::lock::undo::{spawn_undo, undo_attempts};
use crate::lock::waiter::LeaseReply;
use crate::queue::key_queue::Contention;
use crate::queue::last_answer::{LastAnswer, WaitEnd};
use crate::queue::wait_params::WaitParams;

/// How long the undo of a partial hold may delay the result of the task.
const UNDO_BEFORE_ANSWER: Duration = Duration::from_millis(250);

/// One acquire of several keys, until it is granted or given up.
struct MultiKeyTask {
    core: Arc<PoolCore>,
    spec: Arc<LockSpec>,
    params: WaitParams,
    reply: PendingReply,
    permits: LocalPermits,
    attempts: Attempts,
    stepwise: Stepwise,
    last_answer: LastAnswer,
    failing_since: Option<Instant>,
    /// Whether the store has reported another holder.
    was_contended: bool,
    /// Whether the last answer ends the wait.
    answer_ends_wait: bool,
    _token: InFlightToken,
}

/// Acquires the keys of `spec` for the task that waits for `reply`.
///
/// # Errors
/// Same as [`enqueue`](crate::queue::wait_queue::WaitQueues::enqueue); `reply` is dropped then.
pub(crate) fn spawn_multi_key(
    core: &Arc<PoolCore>,
    spec: Arc<LockSpec>,
    params: WaitParams,
    token: InFlightToken,
    reply: LeaseReply,
) -> Result<(), LockError> {
    // Before the permits are requested: without a token no queue has to be left.
    let attempts = Attempts::new(Owner::random()?, params.since);
    let task = MultiKeyTask {
        core: core.clone(),
        params,
        reply: PendingReply::new(reply),
        permits: LocalPermits::request(core, spec.store_keys.clone(), params)?,
        attempts,
        // Not `core.capabilities`: the answer of a cluster depends on the servers that are open by now.
        stepwise: Stepwise::new(&spec, core.backend().capabilities().wait_queue),
        last_answer: LastAnswer::default(),
        failing_since: None,
        was_contended: false,
        answer_ends_wait: false,
        _token: token,
        spec,
    };
    core.run(task.run());
    Ok(())
}

impl MultiKeyTask {
    async fn run(mut self) {
        loop {
            let needs_permits = self.stepwise.is_optimistic();
            if needs_permits && !self.permits.take_all(&mut self.reply).await {
                break;
            }
            self.take_permit_of_step();
            match self.request().await {
                Requested::Granted(granted) => return self.deliver(granted),
                Requested::Again(pause) => {
                    if !self.wait(pause).await {
                        break;
                    }
                }
            }
            self.keep_hold().await;
            if self.is_over() {
                break;
            }
        }
        self.give_up().await;
    }

    /// Takes the permit of the key that is requested next, if no task of this process uses it.
    fn take_permit_of_step(&mut self) {
        if let Some(at) = self.stepwise.step()
            && let Some(key) = self.spec.store_keys.get(at)
        {
            self.permits.take_free(std::slice::from_ref(key));
        }
    }

    /// Drops the permits of all keys that are neither held at the store nor queued for.
    fn drop_unused_permits(&mut self) {
        let (keys, stepwise) = (&self.spec.store_keys, &self.stepwise);
        self.permits.retain(|key| {
            keys.iter().position(|one| one == key).is_some_and(|at| stepwise.involves(at))
        });
    }

    fn is_over(&self) -> bool {
        let now = self.core.clock().now();
        let is_late = self.params.deadline.is_some_and(|deadline| now >= deadline);
        self.answer_ends_wait || self.reply.is_gone() || is_late
    }

    /// Waits for `pause`, or for a notification. `false` if the wait has ended.
    async fn wait(&mut self, pause: Duration) -> bool {
        if self.is_over() {
            return false;
        }
        if pause.is_zero() {
            return true;
        }
        self.drop_unused_permits();
        let core = self.core.clone();
        let due = core.clock().now() + pause;
        let mut until = self.params.deadline.map_or(due, |deadline| due.min(deadline));
        loop {
            self.note_contention();
            let until_due = self.stepwise.due().map_or(until, |due| until.min(due));
            tokio::select! {
                biased;
                () = core.tracker.closing() => return false,
                () = self.reply.gone() => return false,
                () = self.permits.woken() => {
                    until = self.permits.take_due().map_or(until, |due| until.min(due));
                }
                () = core.clock().sleep_until(until_due) => return true,
            }
        }
    }

    /// Notes whether other owners wait for keys of the partial hold.
    fn note_contention(&mut self) {
        let held = self.stepwise.held_keys(&self.spec);
        if self.stepwise.holds_any() && self.permits.is_contended(held) {
            self.stepwise.on_wanted(self.core.clock().now());
        }
    }

    /// Renews the partial hold, or releases it, as it needs.
    async fn keep_hold(&mut self) {
        let core = self.core.clone();
        let (timeout_of_request, ttl) = (core.config.request_timeout, self.spec.policy.ttl);
        let sent = core.clock().now();
        let owner = self.attempts.owner;
        let back_off = match self.stepwise.upkeep(&self.spec, owner, sent, timeout_of_request) {
            Upkeep::None => None,
            Upkeep::BackOff(reason) => Some(reason),
            Upkeep::Renew { lease, time_limit } => {
                let lease = [lease];
                let renewing = timeout(time_limit, core.backend().renew(&lease));
                let answers = self.answer_caller_by(self.params.deadline, renewing).await;
                let is_held = match answers.unwrap_or_default().pop() {
                    Some(Ok(status)) => Some(status == LeaseStatus::Held),
                    Some(Err(_)) | None => None,
                };
                self.stepwise.on_renewed(ttl, sent, core.clock().now(), is_held)
            }
        };
        // Jitter separates two requests that wait for each other. Under the test scheduler clocks stand still, and chance
        // separates them.
        #[cfg(test)]
        if back_off == Some(BackOff::HeldTooLong) && crate::base::sync::scheduler::by_chance() {
            return;
        }
        match back_off {
            Some(BackOff::HeldTooLong)
                if self.attempts.unanswered == 0 && self.stepwise.is_queued() =>
            {
                self.release_hold().await;
            }
            Some(reason) => self.back_off(reason),
            None => {}
        }
    }

    /// Releases the partial hold, and stays in the queue of the next key.
    async fn release_hold(&mut self) {
        let core = self.core.clone();
        let keys: Arc<[_]> = self.stepwise.held_keys(&self.spec).cloned().collect();
        let ttl = self.spec.policy.ttl.stored();
        let lease = LeaseRef::new(keys.clone(), self.attempts.owner, ttl);
        let request = [ReleaseRequest::new(lease)];
        let releasing = timeout(core.config.request_timeout, core.backend().release(&request));
        let answers = self.answer_caller_by(self.params.deadline, releasing).await;
        match answers.unwrap_or_default().pop() {
            Some(Ok(_)) => {
                self.stepwise.on_hold_released();
                self.permits.clear_contended(keys.iter());
                self.drop_unused_permits();
            }
            // It may have been applied, or may be applied later.
            Some(Err(_)) | None => self.back_off(BackOff::HeldTooLong),
        }
    }

    /// Undoes all requests of the current owner token, and continues under a new one.
    fn back_off(&mut self, reason: BackOff) {
        match Owner::random() {
            Ok(owner) => {
                self.stepwise.back_off(self.core.clock().now(), reason);
                let anew = self.attempts.with_new_owner(owner);
                let old = std::mem::replace(&mut self.attempts, anew);
                let (keys, ttl) = (self.spec.store_keys.clone(), self.spec.policy.ttl.stored());
                spawn_undo(&self.core, &old, keys, ttl);
                self.permits.register(self.attempts.owner);
            }
            // Without a new token the old one is undone at the end.
            Err(_) => self.answer_ends_wait = true,
        }
        self.permits.drop_all();
    }

    /// Sends one request.
    async fn request(&mut self) -> Requested {
        let (core, spec) = (self.core.clone(), self.spec.clone());
        if !self.permits.is_registered() {
            // Before the request is sent, so that no later notification is missed.
            self.permits.register(self.attempts.owner);
        }
        let Some(slot) = self.admit().await else {
            self.answer_ends_wait = true;
            return Requested::Again(Duration::ZERO);
        };
        let sent = core.clock().now();
        let is_step = self.stepwise.step().is_some();
        let request = [self.stepwise.next_request(&spec, self.attempts.request(&spec))];
        if is_step {
            self.attempts.mark_known();
        }
        let deadline = self.params.deadline;
        let limit = time_limit(core.time_limits(), &spec.policy, deadline, sent);
        // A step requests one of the keys: its answer says nothing about the others.
        let asked = request[0].keys.clone();
        self.record(&asked, LastAnswer::Pending(sent));
        let is_first = self.attempts.count == 0;
        let answer_by = deadline.map(|by| if is_first { by.max(sent + limit) } else { by });
        let mut answers =
            self.answer_caller_by(answer_by, core.acquire(slot, &request, sent, limit)).await;
        let now = core.clock().now();
        if answers.last().is_some_and(Result::is_ok) {
            self.stepwise.on_round_trip(now.since(sent));
        }
        match self.attempts.on_answer(&spec.policy, sent, now, limit, answers.pop()) {
            Answer::Granted(granted) if is_step => {
                self.failing_since = None;
                self.stepwise.on_step_acquired(sent, &spec);
                if granted.contention == Contention::Known {
                    self.stepwise.on_wanted(now);
                }
                self.attempts.on_step_granted();
                self.record(&asked, LastAnswer::Held { expires_in: None });
                Requested::Again(Duration::ZERO)
            }
            Answer::Granted(granted) => {
                self.record(&asked, LastAnswer::Held { expires_in: None });
                Requested::Granted(granted)
            }
            Answer::Contended { expires_in, wait_mode, retry_after } => {
                self.failing_since = None;
                if !std::mem::replace(&mut self.was_contended, true) {
                    events::contended(core.origin(&spec), expires_in);
                }
                self.record(&asked, LastAnswer::Held { expires_in });
                self.end_wait_if_due(now, false);
                Requested::Again(match self.stepwise.on_contended(wait_mode, now, &spec) {
                    NextStep::Wait => retry_after,
                    NextStep::Request => Duration::ZERO,
                    NextStep::BackOff(reason) => {
                        self.back_off(reason);
                        retry_after
                    }
                })
            }
            Answer::Failed { error, retry_after } => {
                let is_rejected =
                    error.kind() == FailureKind::Rejected || core.store_status.is_refusing();
                self.failing_since.get_or_insert(sent);
                self.record(&asked, LastAnswer::Failed(error));
                self.end_wait_if_due(now, is_rejected);
                Requested::Again(retry_after)
            }
        }
    }

    /// Waits until the store has room for a request. `None` if the wait has ended.
    async fn admit(&mut self) -> Option<AdmissionSlot> {
        // Nothing renews a partial hold meanwhile.
        if self.stepwise.holds_any() {
            return Some(AdmissionSlot::default());
        }
        let core = self.core.clone();
        let WaitParams { since, deadline, .. } = self.params;
        let ends = admission_ends(&self.spec.policy, since, deadline, core.config.request_timeout);
        tokio::select! {
            biased;
            // Before the room, which the acquires ahead may have left for the same reason.
            () = core.tracker.closing() => {}
            slot = core.admit(1) => return Some(slot),
            () = self.reply.gone() => {}
            () = core.clock().sleep_until_due(ends) => {
                // Later the last answer of the store says why.
                if self.attempts.count == 0 {
                    let (keys, now) = (self.spec.store_keys.clone(), core.clock().now());
                    self.record(&keys, LastAnswer::Failed(no_room(now.since(since))));
                }
            }
        }
        None
    }

    fn record(&mut self, keys: &[Key], answer: LastAnswer) {
        self.core.queue.record_answer(keys, &answer);
        self.last_answer = answer;
    }

    /// Ends the wait if the last answer does.
    fn end_wait_if_due(&mut self, now: Instant, is_rejected: bool) {
        let WaitParams { since, deadline, .. } = self.params;
        let request_timeout = self.core.config.request_timeout;
        self.answer_ends_wait |= is_rejected
            || self.spec.policy.is_out_of_attempts(self.attempts.count)
            || is_cut_off(deadline, since, self.failing_since, now, request_timeout);
    }

    fn deliver(mut self, granted: Granted) {
        let core = self.core.clone();
        // Tasks that arrive from now on wait in this process.
        self.permits.take_free(&self.spec.store_keys);
        let (permit, contention) = (self.permits.into_permit(), granted.contention);
        let grant = self.attempts.grant(&self.spec.policy, granted, permit);
        let lease = grant::lease(&core, self.spec.clone(), grant, self.params.since, contention);
        // Without a task to take it, the lease is released as it drops.
        if let Some(reply) = self.reply.take_reply() {
            grant::deliver(&core, lease, reply);
        }
    }

    /// The wait has ended: undoes what the store may have applied.
    async fn give_up(self) {
        let (core, spec) = (self.core.clone(), self.spec.clone());
        let held_any = self.stepwise.holds_any();
        let end = WaitEnd::of(&spec.policy, self.attempts.count);
        let Self { mut reply, permits, attempts, last_answer, _token, .. } = self;
        let keys = spec.store_keys.clone();
        let mut undoing = pin!(undo_attempts(&core, attempts, keys, spec.policy.ttl.stored()));
        // All or nothing: partial holds are released before the error is returned, if the store is reachable.
        let is_undone = held_any && timeout(UNDO_BEFORE_ANSWER, &mut undoing).await.is_ok();
        // The permits first: the task may request the same keys again immediately.
        drop(permits);
        let error = if core.tracker.is_open() {
            let last_failure = core.queue.last_failure();
            last_answer.wait_error(end, core.clock().now(), last_failure.as_ref())
        } else {
            LockError::pool_closed()
        };
        reply.reject(error);
        if !is_undone {
            undoing.await;
        }
    }

    /// Awaits `work`. If it takes longer than `answer_by`, the task gets its error then.
    async fn answer_caller_by<T>(
        &mut self,
        answer_by: Option<Instant>,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = self.core.clock().sleep_until_due(answer_by) => {
                let last_failure = self.core.queue.last_failure();
                let now = self.core.clock().now();
                let end = self.params.end;
                self.reply.reject(self.last_answer.wait_error(end, now, last_failure.as_ref()));
            }
        }
        work.await
    }
}
