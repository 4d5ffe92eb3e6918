//! Checks of the store of a pool, for operators.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;

use crate::api::inspect::silence;
use crate::api::pool::LockPool;
use crate::backend::{BackendError, Finding};
use crate::base::error::LockError;
use crate::lock::core::PoolCore;

impl LockPool {
    /// All checks of the store with their verdicts, also of what is good. [`health`](Self::health) has the warnings alone, and is
    /// the one for a probe that repeats.
    ///
    /// ```
    /// # use lock_runtime::{LockPool, Verdict};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let pool = LockPool::connect("memory://").await?;
    /// for finding in pool.diagnose().await? {
    ///     println!("{:?} {}: {}", finding.verdict, finding.check, finding.text);
    ///     assert_eq!(finding.verdict, Verdict::Good);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`](crate::ErrorKind::Backend) if the store does not answer, or cannot serve.
    pub async fn diagnose(&self) -> Result<Vec<Finding>, LockError> {
        let core = self.core().clone();
        let asking = async move { timed(&core, core.backend().diagnose()).await };
        self.answered(asking).await.map(|(findings, _)| findings)
    }

    /// How long one small request to the store takes, there and back.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// As [`diagnose`](Self::diagnose).
    pub async fn ping(&self) -> Result<Duration, LockError> {
        let core = self.core().clone();
        let asking = async move { timed(&core, core.backend().probe()).await };
        self.answered(asking).await.map(|((), took)| took)
    }

    async fn answered<T: Send + 'static>(
        &self,
        asking: impl Future<Output = Result<T, BackendError>> + Send + 'static,
    ) -> Result<T, LockError> {
        let core = self.core();
        if core.is_inherited() {
            return Err(LockError::inherited().in_pool(core.name()));
        }
        let answer = core.driver().run(asking).await?;
        answer.map_err(|error| LockError::backend(error).in_pool(core.name()))
    }
}

/// The answer to `request`, and how long it took.
async fn timed<T>(
    core: &PoolCore,
    request: impl Future<Output = Result<T, BackendError>>,
) -> Result<(T, Duration), BackendError> {
    let began = core.clock().now();
    let answer = timeout(core.config.request_timeout, request).await;
    let answer = answer.unwrap_or_else(|_| Err(silence()))?;
    Ok((answer, core.clock().now().since(began)))
}
