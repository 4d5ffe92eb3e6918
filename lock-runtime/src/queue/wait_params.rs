//! The time limits of a waiter.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::options::Wait;
use crate::base::policy::Policy;
use crate::queue::last_answer::WaitEnd;

/// The time limits of a waiter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitParams {
    /// When the wait began.
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    /// What ends the wait at its deadline.
    pub(crate) end: WaitEnd,
}

impl WaitParams {
    pub(crate) fn new(since: Instant, wait: Wait) -> Self {
        let deadline = match wait {
            Wait::For(wait) => Some(since + wait),
            Wait::Forever => None,
        };
        Self { since, deadline, end: WaitEnd::Wait(wait) }
    }

    /// The limits by `policy`.
    pub(crate) fn of(since: Instant, policy: &Policy) -> Self {
        let wait = if policy.waits() { policy.wait } else { Wait::For(Duration::ZERO) };
        Self { end: WaitEnd::at_deadline(policy), ..Self::new(since, wait) }
    }

    /// Whether the acquire may not wait.
    pub(crate) fn is_single_try(&self) -> bool {
        self.deadline == Some(self.since)
    }

    /// Gives an acquire that may not wait the time of one more request, for a release of this process.
    pub(crate) fn extend_single_try(&mut self, request_timeout: Duration) {
        if self.is_single_try() {
            self.deadline = Some(self.since + request_timeout);
        }
    }
}
