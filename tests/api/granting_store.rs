//! A store that implements no more than it has to.

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, LeaseRef, LeaseStatus, ReleaseOutcome,
    ReleaseRequest, Warning,
};

/// Grants each lock, and drops this value as it is dropped.
pub(crate) struct GrantsAlways<T>(pub(crate) T);

impl<T: Send + Sync + 'static> Backend for GrantsAlways<T> {
    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        requests.iter().map(|_| Ok(AcquireOutcome::acquired(None))).collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        leases.iter().map(|_| Ok(LeaseStatus::Held)).collect()
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        requests.iter().map(|_| Ok(ReleaseOutcome::Freed)).collect()
    }

    async fn is_held(&self, _: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(LeaseStatus::Held)
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}
