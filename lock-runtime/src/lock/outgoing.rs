//! Requests that are sent in batches: first requests of acquires, and releases.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::backend::AcquireRequest;
use crate::base::backend_error::BackendError;
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::exec::panic_boundary;
use crate::lease::lease::Lease;
use crate::lease::tracker::InFlightToken;
use crate::lock::waiter::LockWaiter;
use crate::queue::permit::KeyPermit;

#[derive(Debug)]
pub(crate) enum Outgoing {
    Acquire(FirstRequest),
    Release(PendingRelease),
}

impl Outgoing {
    pub(crate) fn acquire(self) -> Option<FirstRequest> {
        match self {
            Self::Acquire(first) => Some(first),
            Self::Release(_) => None,
        }
    }

    pub(crate) fn release(self) -> Option<PendingRelease> {
        match self {
            Self::Release(pending) => Some(pending),
            Self::Acquire(_) => None,
        }
    }
}

/// The first request of an acquire that found an empty queue.
#[derive(Debug)]
pub(crate) struct FirstRequest {
    /// The rank of the waiter, if it has to wait.
    pub(crate) id: u64,
    pub(crate) permit: KeyPermit,
    pub(crate) waiter: LockWaiter,
    pub(crate) request: AcquireRequest,
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) token: InFlightToken,
}

/// A lease that is to be released at the store. Dropping it passes its permits to the next waiters, which must not
/// depend on it when the driver's runtime ends.
#[derive(Debug)]
pub(crate) struct PendingRelease {
    pub(crate) lease: Arc<Lease>,
    /// Receives the result, once.
    reply: Option<oneshot::Sender<Result<(), LockError>>>,
}

impl PendingRelease {
    pub(crate) fn new(lease: Arc<Lease>, reply: oneshot::Sender<Result<(), LockError>>) -> Self {
        Self { lease, reply: Some(reply) }
    }

    pub(crate) fn answer(&mut self, result: Result<(), LockError>) {
        if let Some(reply) = self.reply.take() {
            panic_boundary::answer(reply, result);
        }
    }

    /// Reports that the store has not confirmed the release in time, and passes the permits on.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        drop(self.lease.take_permits());
        self.answer(Err(LockError::backend(error.clone())));
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        drop(self.lease.take_permits());
    }
}
