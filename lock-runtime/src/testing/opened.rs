//! A built-in backend by its URL, to be tested or wrapped.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    self, Attempt, Backend, BackendError, Bell, Claim, Held, LeaseRef, Release, Released, Setting,
    Store, Warning,
};
use crate::base::clock::Clock;
use crate::base::error::LockError;

/// The backend behind a URL; see [`LockPool::connect`](crate::LockPool::connect).
pub struct Opened(Arc<dyn Store>);

/// Opens the backend of `url` on the tokio runtime of the caller.
///
/// # Errors
/// As [`LockPool::connect`](crate::LockPool::connect).
pub async fn open(url: &str) -> Result<Opened, LockError> {
    let (clock, patience) = (Clock::runtime(), Duration::from_secs(1));
    let connect_timeout = Duration::from_secs(5);
    let setting = Setting {
        prefix: "",
        clock,
        patience,
        connect_timeout,
        node_patience: None,
        credentials: None,
        sentinel_credentials: None,
    };
    backend::connect(url, setting).await.map(Opened)
}

impl Backend for Opened {
    fn attach(&self, bell: Bell) {
        self.0.attach(bell);
    }

    async fn acquire(&self, claims: &[Claim]) -> Vec<Result<Attempt, BackendError>> {
        self.0.acquire(claims).await
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<Held, BackendError>> {
        self.0.renew(leases).await
    }

    async fn release(&self, releases: &[Release]) -> Vec<Result<Released, BackendError>> {
        self.0.release(releases).await
    }

    async fn holds(&self, lease: &LeaseRef) -> Result<Held, BackendError> {
        self.0.holds(lease).await
    }

    fn in_place(&self) -> bool {
        self.0.in_place()
    }

    fn has_lines(&self) -> bool {
        self.0.has_lines()
    }

    fn is_paced(&self) -> bool {
        self.0.is_paced()
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.0.health().await
    }

    async fn close(&self) {
        self.0.close().await;
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").finish_non_exhaustive()
    }
}
