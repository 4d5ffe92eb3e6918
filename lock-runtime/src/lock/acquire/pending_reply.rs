//! The reply of a request for several keys, until its task has it.

use tokio::sync::oneshot;

use crate::base::error::LockError;
use crate::exec::panic_boundary;
use crate::lock::waiter::LeaseReply;

/// The reply to the task that waits for the lease, until it has its result.
pub(super) struct PendingReply(Option<LeaseReply>);

impl PendingReply {
    pub(super) const fn new(reply: LeaseReply) -> Self {
        Self(Some(reply))
    }

    pub(super) fn is_gone(&self) -> bool {
        self.0.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// Resolves when the task stops waiting.
    pub(super) async fn gone(&mut self) {
        if let Some(reply) = &mut self.0 {
            reply.closed().await;
        }
    }

    pub(super) fn reject(&mut self, error: LockError) {
        if let Some(reply) = self.0.take() {
            panic_boundary::answer(reply, Err(error));
        }
    }

    /// For the lease. `None` once the task has its result.
    pub(super) fn take_reply(&mut self) -> Option<LeaseReply> {
        self.0.take()
    }
}
