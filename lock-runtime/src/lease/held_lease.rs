//! A lease that ends when it is dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use crate::base::error::LockError;
use crate::base::options::ReleaseMode;
use crate::exec::driver_answer::DriverAnswer;
use crate::lease::lease::Lease;

/// Ends the leases of a pool.
pub(crate) trait EndsHolds: Send + Sync {
    /// Hands the lock off to the next waiter of the process, or releases it at the store. The release goes on whether or
    /// not the result is awaited; `mode` says what the caller intends. `None` if the lease was released before.
    fn end_hold(self: Arc<Self>, lease: &Arc<Lease>, mode: ReleaseMode) -> Option<Releasing>;
}

/// A lease on the way to its holder. Dropping it ends the hold.
pub(crate) struct HeldLease {
    lease: Arc<Lease>,
    pool: Arc<dyn EndsHolds>,
    /// Whether the hold was ended here. The drop that follows has nothing to do then.
    has_ended: AtomicBool,
}

impl HeldLease {
    pub(crate) fn new(lease: Arc<Lease>, pool: Arc<dyn EndsHolds>) -> Self {
        Self { lease, pool, has_ended: AtomicBool::new(false) }
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Ends the hold now, like [`EndsHolds::end_hold`].
    pub(crate) fn release(&self, mode: ReleaseMode) -> Option<Releasing> {
        if self.has_ended.swap(true, Ordering::Relaxed) {
            return None;
        }
        self.pool.clone().end_hold(&self.lease, mode)
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        drop(self.release(ReleaseMode::Background));
    }
}

impl std::fmt::Debug for HeldLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("HeldLease").field(&self.lease.id).finish()
    }
}

/// The end of a hold. Resolves when another owner can have the lock, or the release is known to have failed.
#[derive(Debug)]
pub(crate) enum Releasing {
    Done,
    InFlight(DriverAnswer<()>),
}

impl Future for Releasing {
    type Output = Result<(), LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Done => Poll::Ready(Ok(())),
            Self::InFlight(answer) => Pin::new(answer).poll(cx),
        }
    }
}
