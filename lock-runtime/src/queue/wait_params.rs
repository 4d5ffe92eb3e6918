//! The time limits of a waiter.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::options::Wait;

/// The time limits of a waiter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitParams {
    /// When the wait began.
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) wait: Wait,
}

impl WaitParams {
    pub(crate) fn new(since: Instant, wait: Wait) -> Self {
        let deadline = match wait {
            Wait::For(wait) => Some(since + wait),
            Wait::Forever => None,
        };
        Self { since, deadline, wait }
    }

    /// Whether the acquire may not wait.
    pub(crate) fn is_single_try(&self) -> bool {
        self.wait == Wait::For(Duration::ZERO)
    }

    /// Gives an acquire that may not wait the time of one more request, for a release of this process.
    pub(crate) fn extend_single_try(&mut self, request_timeout: Duration) {
        if self.is_single_try() {
            self.deadline = Some(self.since + request_timeout);
        }
    }
}
