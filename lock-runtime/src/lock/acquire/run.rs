//! Acquires a lock for the queue of a key: sends requests until the store grants it or no waiter is left.
//!
//! The task runs on the driver, so that the undo completes even if all callers are cancelled.

use std::sync::Arc;
use std::time::Duration;

use crate::base::backend_error::FailureKind;
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::exec::driver::Driver;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::lease::tracker::InFlightToken;
use crate::lock::acquire::attempt::{Answer, Attempts, Granted, Requested, is_cut_off};
use crate::lock::acquire::time_limits::time_limit;
use crate::lock::admission::AdmissionSlot;
use crate::lock::core::PoolCore;
use crate::lock::grant;
use crate::lock::undo::undo_attempts;
use crate::queue::key_queue::{WaitFor, Waiter};
use crate::queue::last_answer::LastAnswer;
use crate::queue::permit::{KeyPermit, PermitHandler};
use crate::queue::wait_queue::{AfterPass, HeadInfo};
use crate::queue::wake_signal::WakeSignal;

/// The maximum number of fencing tokens that one request reserves. Unused numbers make the counter run ahead of the clock,
/// which seeds it after a loss of the store's data. The clock counts microseconds, and a holder takes longer than one. So
/// only a few numbers may stay unused: a request reserves more than the last grant used only if that grant used all of
/// them.
const MOST_EXTRA_FENCES: usize = 1000;

/// One acquire for the queue of a key, by the owner of its permit.
struct AcquireTask {
    core: Arc<PoolCore>,
    permit: KeyPermit,
    attempts: Attempts,
    /// For a request that is due early.
    wake: Arc<WakeSignal>,
    failing_since: Option<Instant>,
    /// The last waiter with an event `contended`.
    reported: Option<u64>,
    _token: InFlightToken,
}

impl PermitHandler for PoolCore {
    fn permits_dropped(self: Arc<Self>, keys: &[Key]) {
        if self.is_inherited() {
            return;
        }
        let after = if self.driver().is_gone() {
            self.queue.reject_all(keys, &Driver::stopped_error())
        } else if !self.tracker.is_open() {
            // The shutdown is about to do so. Before that, each waiter would get the permit and end.
            self.queue.reject_all(keys, &LockError::pool_closed())
        } else {
            self.queue.pass(keys)
        };
        pass_on(&self, after);
    }
}

/// Gives permits to the waiters that `after` names.
pub(crate) fn pass_on(core: &Arc<PoolCore>, after: Vec<AfterPass>) {
    for after in after {
        match after {
            AfterPass::Queue(keys) => start(core, keys),
            // If the receiver is gone, the permit is dropped, and passes on.
            AfterPass::Permits(keys, reply) => {
                panic_boundary::answer(reply, Ok(KeyPermit::new(core.clone(), keys)));
            }
        }
    }
}

/// Acquires the lock under a new owner token. The queue has just given out its permit, for `keys`.
fn start(core: &Arc<PoolCore>, keys: Arc<[Key]>) {
    match Owner::random() {
        Ok(owner) => {
            let permit = KeyPermit::new(core.clone(), keys);
            let attempts = Attempts::new(owner, core.clock().now());
            core.run(AcquireTask::new(core, permit, attempts, None).run(None));
        }
        // This frees the permit, so there is no value that would free it again as it drops.
        Err(error) => pass_on(core, core.queue.reject_all(&keys, &error)),
    }
}

/// Continues `attempts` for the queue of `permit`. The next request is due after `pause`, or at a notification. Without a
/// waiter the attempts are undone immediately. With nothing to undo either, the permit has passed on when this returns.
/// `reported` is the waiter to which another holder was reported.
pub(crate) fn resume(
    core: &Arc<PoolCore>,
    permit: KeyPermit,
    attempts: Attempts,
    pause: Duration,
    reported: Option<u64>,
) {
    let has_waiter = core.queue.has_waiter(permit.key());
    if !has_waiter && attempts.has_no_side_effects() {
        // The permit passes on as it drops.
        return;
    }
    let task = AcquireTask::new(core, permit, attempts, reported);
    if has_waiter {
        core.run(task.run(Some(pause)));
    } else {
        core.run(task.give_up());
    }
}

impl AcquireTask {
    fn new(
        core: &Arc<PoolCore>,
        permit: KeyPermit,
        attempts: Attempts,
        reported: Option<u64>,
    ) -> Self {
        Self {
            core: core.clone(),
            // Known to the queue before the request is sent, so that no later notification is missed.
            wake: core.queue.request_as(permit.key(), attempts.owner),
            permit,
            attempts,
            failing_since: None,
            reported,
            _token: core.tracker.begin_cleanup(),
        }
    }

    async fn run(mut self, mut pause: Option<Duration>) {
        loop {
            if let Some(pause) = pause.take()
                && !self.wait(pause).await
            {
                break;
            }
            let Some(slot) = self.admit().await else { break };
            let Some(head) = self.core.queue.begin_request(self.permit.key()) else { break };
            let sent = self.core.clock().now();
            match self.request(slot, &head, sent).await {
                Requested::Granted(granted) => match self.deliver(&head, granted) {
                    None => return,
                    // The head has changed. The store knows the owner, and grants again.
                    Some(task) => self = task,
                },
                Requested::Again(after) => pause = Some(after),
            }
        }
        self.give_up().await;
    }

    /// Waits until the store has room for a request. `None` if no waiter is left, or the pool closes.
    async fn admit(&self) -> Option<AdmissionSlot> {
        if !self.core.queue.has_waiter(self.permit.key()) {
            return None;
        }
        tokio::select! {
            biased;
            slot = self.core.admit(1) => Some(slot),
            () = self.core.tracker.closing() => None,
        }
    }

    /// Waits for `pause`, or for a notification. `false` if the pool closes.
    async fn wait(&self, pause: Duration) -> bool {
        let core = &self.core;
        let mut until = core.clock().now() + pause;
        loop {
            // This includes a notification that came before this task was known to the queue: the first request had no task.
            if let Some(due) = self.wake.take_due() {
                until = until.min(due);
            }
            tokio::select! {
                biased;
                () = core.tracker.closing() => return false,
                () = self.wake.notified() => {}
                () = core.clock().sleep_until(until) => return true,
            }
        }
    }

    /// Sends one request for `head`, in the room of `slot`.
    async fn request(&mut self, slot: AdmissionSlot, head: &HeadInfo, sent: Instant) -> Requested {
        let core = self.core.clone();
        let (spec, policy) = (&head.spec, &head.spec.policy);
        let mut request = self.attempts.request(spec);
        let hands_off = !core.config.local_handoff_limit.is_zero()
            && policy.renew_every.is_some()
            && policy.max_hold.is_none();
        if request.fencing && hands_off {
            let successors = u32::try_from(head.successors.min(MOST_EXTRA_FENCES)).unwrap_or(0);
            request.extra_fences = request.extra_fences.max(successors);
        }
        let limit = time_limit(core.time_limits(), policy, head.deadline, sent);
        core.queue.record_answer(&spec.store_keys, &LastAnswer::Pending(sent));
        let mut answers = core.acquire(slot, &[request], sent, limit).await;
        let now = core.clock().now();
        match self.attempts.on_answer(policy, sent, now, limit, answers.pop()) {
            Answer::Granted(granted) => Requested::Granted(granted),
            Answer::Contended { expires_in, retry_after, .. } => {
                self.failing_since = None;
                if self.reported.replace(head.id) != Some(head.id) {
                    events::contended(core.origin(spec), expires_in);
                }
                core.queue.record_answer(&spec.store_keys, &LastAnswer::Held { expires_in });
                self.reject_expired(now, false, false);
                Requested::Again(retry_after)
            }
            Answer::Failed { error, retry_after } => {
                let is_rejected = error.kind() == FailureKind::Rejected;
                self.failing_since.get_or_insert(sent);
                core.queue.record_answer(&spec.store_keys, &LastAnswer::Failed(error));
                let is_refused = core.store_status.is_refusing();
                self.reject_expired(now, is_rejected, is_refused);
                Requested::Again(retry_after)
            }
        }
    }

    /// Rejects the waiters whose wait ends with the last answer. `is_rejected`: the first one; `is_refused`: all.
    fn reject_expired(&mut self, now: Instant, is_rejected: bool, is_refused: bool) {
        let (failing_since, timeout) = (self.failing_since, self.core.config.request_timeout);
        let after = self.core.queue.reject_expired(self.permit.key(), now, |in_front, entry| {
            let is_first_out = match &entry.wait_for {
                WaitFor::Lock(waiter) if in_front == 0 => {
                    is_rejected || waiter.spec().policy.is_out_of_attempts(entry.attempts)
                }
                WaitFor::Lock(_) | WaitFor::Permits(_) => false,
            };
            is_refused
                || is_first_out
                || is_cut_off(entry.deadline, entry.since, failing_since, now, timeout)
        });
        pass_on(&self.core, after);
    }

    /// Gives the grant to `head`, or to the next waiter that it fits as well. Returns the task if no waiter takes the grant.
    fn deliver(mut self, head: &HeadInfo, granted: Granted) -> Option<Self> {
        let policy = &head.spec.policy;
        let fits = |spec: &LockSpec| spec.policy.requests_like(policy);
        let Some(entry) = self.core.queue.take_head(self.permit.key(), head.id, fits) else {
            self.attempts.mark_known();
            return Some(self);
        };
        let contention = granted.contention;
        let grant = self.attempts.grant(policy, granted, self.permit);
        if let WaitFor::Lock(waiter) = entry.wait_for {
            let lease = grant::lease(&self.core, waiter.spec, grant, entry.since, contention);
            grant::deliver(&self.core, lease, waiter.reply);
        }
        None
    }

    /// No waiter is left, or the pool closes: undoes what the store may have applied.
    async fn give_up(self) {
        let Self { core, permit, attempts, _token, .. } = self;
        let keys = Arc::from([permit.key().clone()]);
        drop(permit);
        undo_attempts(&core, attempts, keys, core.config.defaults.ttl).await;
    }
}
