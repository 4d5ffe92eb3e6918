//! A task that waits for a lock.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::base::error::LockError;
use crate::base::lock_spec::LockSpec;
use crate::exec::panic_boundary;
use crate::lease::held_lease::HeldLease;
use crate::lease::tracker::InFlightToken;
use crate::queue::key_queue::Waiter;

/// What a task waits for, and where it receives the lease.
#[derive(Debug)]
pub(crate) struct LockWaiter {
    pub(crate) spec: Arc<LockSpec>,
    pub(crate) reply: LeaseReply,
    /// Counts the acquire until it is answered, whether or not its task is polled. `None` after the answer to a first request.
    pub(crate) token: Option<InFlightToken>,
}

/// Receives the lease of an acquire.
pub(crate) type LeaseReply = oneshot::Sender<Result<HeldLease, LockError>>;

impl Waiter for LockWaiter {
    fn spec(&self) -> &Arc<LockSpec> {
        &self.spec
    }

    fn is_cancelled(&self) -> bool {
        self.reply.is_closed()
    }

    fn reject(self, error: LockError) {
        panic_boundary::answer(self.reply, Err(error));
    }
}
