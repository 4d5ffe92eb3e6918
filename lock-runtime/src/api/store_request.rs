//! Requests to the store other than those of a lock's life.

use std::future::Future;
use std::time::Duration;

use crate::api::pool::LockPool;
use crate::backend::BackendError;
use crate::base::error::LockError;

impl LockPool {
    /// The answer to `request`, which runs on the driver, within `limit`.
    pub(crate) async fn asked<T: Send + 'static>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<T, BackendError>> + Send + 'static,
    ) -> Result<T, LockError> {
        if self.core().is_inherited() {
            return Err(LockError::inherited());
        }
        self.core().ask(limit, request).await
    }

    /// The answer to `request`, which has a time limit of its own. The request goes on even if the caller is dropped.
    pub(crate) async fn on_driver<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T, BackendError>> + Send + 'static,
    ) -> Result<T, LockError> {
        if self.core().is_inherited() {
            return Err(LockError::inherited());
        }
        self.core().driver().run(request).await?.map_err(LockError::backend)
    }
}
