//! The state machine of one acquire: the meaning of each answer, and when to send the next request.
//!
//! It does no I/O. `first_request`, `run` and `multi_key` send its requests and report the answers.

use std::time::Duration;

use crate::backend::{AcquireOutcome, AcquireRequest, Successor, WaitMode};
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::fence::Fences;
use crate::base::jitter;
use crate::base::lock_spec::LockSpec;
use crate::base::owner::Owner;
use crate::base::policy::Policy;
use crate::base::text::rounded;
use crate::lease::grant::Grant;
use crate::queue::key_queue::Contention;
use crate::queue::permit::KeyPermit;

/// The requests of one owner token, from the first to the grant or the undo.
///
/// The token belongs to the queue and not to a task. If the head waiter gives up, the next waiter continues with the same
/// token, and keeps its position in the store's queue.
#[derive(Debug)]
pub(crate) struct Attempts {
    pub(crate) owner: Owner,
    pub(crate) since: Instant,
    /// Answered or failed requests.
    pub(crate) count: u32,
    /// Whether the store may know the owner from an answered request. The owner is in the wait queue, holds one of several
    /// keys, or has a grant that no waiter took.
    pub(crate) is_known: bool,
    /// Requests without an answer: each may have been applied, or may be applied later.
    pub(crate) unanswered: usize,
    /// When the store has forgotten the unanswered requests, if there are any.
    pub(crate) ambiguous_until: Option<Instant>,
    /// When the store has forgotten all grants to this owner, answered or not. `since` without any.
    pub(crate) kept_until: Instant,
}

/// The answer that the store has granted the lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    /// When the request was sent, or later the message of the store that the grant rests on.
    pub(crate) sent: Instant,
    pub(crate) fences: Option<Fences>,
    pub(crate) contention: Contention,
}

/// What one request led to.
pub(super) enum Requested {
    Granted(Granted),
    /// The next request is due after this time, or at a notification.
    Again(Duration),
}

/// The meaning of one answer.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The lock is the owner's, and validity has not ended yet.
    Granted(Granted),
    /// Another owner holds it. The next request is due after `retry_after`, or at a notification.
    Contended { expires_in: Option<Duration>, wait_mode: WaitMode, retry_after: Duration },
    /// The request failed, or may have been applied without a timely answer.
    Failed { error: BackendError, retry_after: Duration },
}

impl Attempts {
    pub(crate) fn new(owner: Owner, since: Instant) -> Self {
        Self {
            owner,
            since,
            count: 0,
            is_known: false,
            unanswered: 0,
            ambiguous_until: None,
            kept_until: since,
        }
    }

    /// The requests of `next`, which a release has put into the store's queue, or has granted the lock, by `now`.
    pub(crate) fn for_successor(next: &Successor, now: Instant) -> Self {
        Self { count: 1, is_known: true, kept_until: now + next.ttl, ..Self::new(next.owner, now) }
    }

    /// Like [`for_successor`](Self::for_successor), after a release without an answer.
    pub(crate) fn for_unconfirmed_successor(next: &Successor, now: Instant) -> Self {
        let successor = Self::for_successor(next, now);
        Self { unanswered: 1, ambiguous_until: Some(successor.kept_until), ..successor }
    }

    /// The requests of the same wait under a new owner token.
    pub(crate) fn with_new_owner(&self, owner: Owner) -> Self {
        Self { count: self.count, ..Self::new(owner, self.since) }
    }

    /// Whether the store can have nothing of this owner.
    pub(crate) fn has_no_side_effects(&self) -> bool {
        !self.is_known && self.unanswered == 0
    }

    /// How many grants a release has to end until no request can be applied any more. Without unanswered requests, one answered
    /// release is enough.
    pub(crate) fn grants_to_undo(&self) -> usize {
        // A queued owner may have been granted the lock by a release.
        let answered = usize::from(self.is_known);
        if self.unanswered > 0 { self.unanswered + answered } else { 0 }
    }

    /// The grant for a lease with `policy`.
    pub(crate) fn grant(&self, policy: &Policy, granted: Granted, permit: KeyPermit) -> Grant {
        let Granted { sent, fences, .. } = granted;
        Grant::new(self.owner, self.ambiguous_until, policy, sent, fences, Some(permit))
            .with_earlier_until(self.kept_until)
    }

    /// The next request.
    pub(crate) fn request(&self, spec: &LockSpec) -> AcquireRequest {
        AcquireRequest { attempt: self.count, ..AcquireRequest::for_owner(spec, self.owner) }
    }

    /// The answer to a request that was sent at `sent`, or none within `time_limit`.
    pub(crate) fn on_answer(
        &mut self,
        policy: &Policy,
        sent: Instant,
        now: Instant,
        time_limit: Duration,
        answer: Option<Result<AcquireOutcome, BackendError>>,
    ) -> Answer {
        let prepared_in = match answer {
            Some(Ok(AcquireOutcome::Acquired { prepared_in, .. })) => prepared_in,
            _ => Duration::ZERO,
        };
        let sent = now.min(sent + prepared_in);
        let until = sent + policy.kept_for();
        let error = match answer.unwrap_or_else(|| Err(silence(time_limit))) {
            Ok(AcquireOutcome::Acquired { fence, reserved_fences, contended, .. }) => {
                self.kept_until = self.kept_until.max(until);
                if now < sent + policy.ttl.validity() {
                    let fences = Fences::new(fence, reserved_fences);
                    let contention = Contention::of_answer(contended);
                    return Answer::Granted(Granted { sent, fences, contention });
                }
                // Granted by the store, and no longer valid here.
                silence(now.since(sent))
            }
            Ok(AcquireOutcome::Contended { expires_in, wait_mode }) => {
                let retry_after = self.on_contended(policy, expires_in, wait_mode);
                return Answer::Contended { expires_in, wait_mode, retry_after };
            }
            Err(error) => error,
        };
        let retry_after = self.on_failure(&error, until);
        if error.is_contended() {
            return Answer::Contended { expires_in: None, wait_mode: WaitMode::Poll, retry_after };
        }
        Answer::Failed { error, retry_after }
    }

    /// The pause before the next request to a lock that another owner holds.
    fn on_contended(
        &mut self,
        policy: &Policy,
        expires_in: Option<Duration>,
        wait_mode: WaitMode,
    ) -> Duration {
        self.count += 1;
        self.is_known |= matches!(wait_mode, WaitMode::Queued { .. });
        let poll = jitter::below(policy.retry_delay.unwrap_or_else(|| self.doubling()));
        match wait_mode {
            // `retry_count` counts requests, so they are sent even where the store would notify.
            WaitMode::Queued { retry_after } | WaitMode::Watch { retry_after }
                if policy.retry_count.is_some() =>
            {
                if retry_after.is_zero() {
                    poll
                } else {
                    retry_after.min(poll)
                }
            }
            WaitMode::Queued { retry_after } | WaitMode::Watch { retry_after } => retry_after,
            // Stores round an expiry up to a millisecond.
            WaitMode::Poll if policy.retry_delay.is_none() => {
                poll.min(expires_in.map_or(poll, |it| it.saturating_add(Duration::from_millis(1))))
            }
            WaitMode::Poll => poll,
        }
    }

    /// The pause before the next request after a failure. The store has forgotten what it may have applied at `until`.
    fn on_failure(&mut self, error: &BackendError, until: Instant) -> Duration {
        self.count += 1;
        if error.kind() == FailureKind::MaybeApplied {
            self.unanswered += 1;
            self.ambiguous_until = self.ambiguous_until.max(Some(until));
            self.kept_until = self.kept_until.max(until);
        }
        // The limit is applied before the jitter, so that waiters send at different times there too.
        jitter::below(self.doubling().min(Duration::from_millis(160)))
    }

    /// The store may know the owner from now on. One of several keys is requested on its own, or no waiter took a grant.
    pub(crate) fn mark_known(&mut self) {
        self.is_known = true;
    }

    /// One of several keys was granted.
    pub(crate) fn on_step_granted(&mut self) {
        self.count += 1;
    }

    /// Doubles with each request, from 20 ms to 640 ms.
    fn doubling(&self) -> Duration {
        Duration::from_millis(20 << self.count.saturating_sub(1).min(5))
    }
}

/// Whether an outage ends a wait without a deadline: an outage of ten request timeouts, within the wait.
pub(crate) fn is_cut_off(
    deadline: Option<Instant>,
    since: Instant,
    failing_since: Option<Instant>,
    now: Instant,
    request_timeout: Duration,
) -> bool {
    let longest = request_timeout.saturating_mul(10);
    deadline.is_none()
        && failing_since.is_some_and(|failing| now.since(failing.max(since)) > longest)
}

fn silence(waited: Duration) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("the store did not answer within {:?}", rounded(waited)),
    )
    .remedy("check that the store is up and reachable; a grant that may have been made is released")
}

#[cfg(test)]
mod tests;
