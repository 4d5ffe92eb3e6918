//! The name under which a line asks the store, and what that may have left there.

use std::time::Duration;

use crate::backend::{BackendError, FailureKind, Owner, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::options::Policy;

/// An owner token from its first request to its grant, or until it is given up. It stays with the line:
/// when the one that was first gives up waiting, the next asks on under the same name and keeps the place
/// in the store's line.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) owner: Owner,
    pub(crate) since: Instant,
    /// Counts requests.
    pub(crate) attempt: u32,
    /// Whether the owner may stand in the store's line, or have one of several keys.
    pub(crate) in_line: bool,
    /// Requests without an answer: each may have been applied, or may yet be.
    pub(crate) unanswered: usize,
    pub(crate) haunted_until: Instant,
}

impl Place {
    pub(crate) fn new(owner: Owner, since: Instant) -> Self {
        Self {
            owner,
            since,
            attempt: 0,
            in_line: false,
            unanswered: 0,
            haunted_until: Instant::from_nanos(0),
        }
    }

    /// The place of a successor that a release has put in line, or may have.
    pub(crate) fn inherited(owner: Owner, since: Instant) -> Self {
        Self { attempt: 1, in_line: true, ..Self::new(owner, since) }
    }

    /// As [`inherited`](Self::inherited), by a release that was not answered.
    pub(crate) fn unsure(owner: Owner, since: Instant, until: Instant) -> Self {
        Self { unanswered: 1, haunted_until: until, ..Self::inherited(owner, since) }
    }

    /// The place of the same claim under another name.
    pub(crate) fn anew(&self, owner: Owner) -> Self {
        Self { attempt: self.attempt, ..Self::new(owner, self.since) }
    }

    /// Nothing of it can be in the store.
    pub(crate) fn is_clean(&self) -> bool {
        !self.in_line && self.unanswered == 0
    }

    /// The store says that somebody holds the lock. When to ask again if nothing else happens.
    pub(crate) fn busy(
        &mut self,
        policy: &Policy,
        expires_in: Option<Duration>,
        wait_mode: WaitMode,
    ) -> Duration {
        self.attempt += 1;
        self.in_line |= matches!(wait_mode, WaitMode::Queued { .. });
        let poll = policy.retry_delay.map_or_else(|| self.poll(), jitter::below);
        match wait_mode {
            // Who counts its attempts makes them, also where the store would wake it.
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

    /// The store did not do what it was asked; what it may have done is forgotten there at `until`. When
    /// to ask again.
    pub(crate) fn failed(&mut self, error: &BackendError, until: Instant) -> Duration {
        self.attempt += 1;
        if error.kind() == FailureKind::MaybeApplied {
            self.unanswered += 1;
            self.haunted_until = self.haunted_until.max(until);
        }
        // Below the limit too they are not to go in step.
        jitter::below(self.doubling().min(Duration::from_millis(160)))
    }

    /// Doubles with every attempt, from 20 ms to 640 ms.
    fn doubling(&self) -> Duration {
        Duration::from_millis(20 << self.attempt.saturating_sub(1).min(5))
    }

    fn poll(&self) -> Duration {
        jitter::below(self.doubling())
    }
}
