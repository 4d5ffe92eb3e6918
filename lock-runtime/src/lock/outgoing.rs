//! Requests that are sent in batches: first requests of acquires, and releases.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::base::backend_error::BackendError;
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::owner::Owner;
use crate::exec::batcher::ItemBatch;
use crate::exec::panic_boundary;
use crate::lease::lease::Lease;
use crate::lock::waiter::LockWaiter;
use crate::queue::permit::KeyPermit;

#[derive(Debug)]
pub(crate) enum Outgoing {
    Acquire(FirstRequest),
    Release(PendingRelease),
}

#[derive(Debug, Default)]
pub(crate) struct OutgoingBatch {
    pub(crate) acquires: Vec<FirstRequest>,
    pub(crate) releases: Vec<PendingRelease>,
}

impl ItemBatch for OutgoingBatch {
    type Item = Outgoing;

    fn push(&mut self, item: Outgoing) {
        match item {
            Outgoing::Acquire(first) => self.acquires.push(first),
            Outgoing::Release(pending) => self.releases.push(pending),
        }
    }

    fn len(&self) -> usize {
        self.acquires.len() + self.releases.len()
    }

    fn take(&mut self, most: usize) -> Self {
        Self {
            acquires: take_first(&mut self.acquires, most),
            releases: take_first(&mut self.releases, most),
        }
    }

    fn append(&mut self, mut later: Self) {
        self.acquires.append(&mut later.acquires);
        self.releases.append(&mut later.releases);
    }
}

fn take_first<T>(items: &mut Vec<T>, most: usize) -> Vec<T> {
    // The next batch is expected to be as large as this one.
    let rest =
        if items.len() <= most { Vec::with_capacity(items.len()) } else { items.split_off(most) };
    std::mem::replace(items, rest)
}

/// The first request of an acquire that found an empty queue.
#[derive(Debug)]
pub(crate) struct FirstRequest {
    /// The rank of the waiter, if it has to wait.
    pub(crate) id: u64,
    pub(crate) permit: KeyPermit,
    pub(crate) waiter: LockWaiter,
    pub(crate) owner: Owner,
    pub(crate) since: Instant,
    pub(crate) deadline: Option<Instant>,
}

/// A lease that must be released at the store. Dropping it passes its permits to the next waiters, which must not depend on
/// it when the driver's runtime ends.
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

    /// Reports that the store has not confirmed the release in time, and passes the permit on.
    pub(crate) fn fail(&mut self, error: &BackendError) {
        drop(self.lease.take_permit());
        self.answer(Err(LockError::backend(error.clone())));
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        drop(self.lease.take_permit());
    }
}
