//! Checks of the store of a pool, for operators.

use std::time::Duration;

use crate::api::pool::LockPool;
use crate::backend::Finding;
use crate::base::error::LockError;

impl LockPool {
    /// All checks of the store with their verdicts, including the checks that pass. [`health`](Self::health) has only the
    /// warnings, and is the one for repeated probes.
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
        let limit = core.config.request_timeout;
        let answer = self.core().ask(limit, async move { core.backend().diagnose().await }).await;
        answer.map_err(|error| error.in_pool(self.core().name()))
    }

    /// The round-trip time of one small request to the store.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// Same as [`diagnose`](Self::diagnose).
    pub async fn ping(&self) -> Result<Duration, LockError> {
        let core = self.core().clone();
        let limit = core.config.request_timeout;
        let probing = async move {
            let began = core.clock().now();
            core.backend().probe().await?;
            Ok(core.clock().now().since(began))
        };
        let answer = self.core().ask(limit, probing).await;
        answer.map_err(|error| error.in_pool(self.core().name()))
    }
}
