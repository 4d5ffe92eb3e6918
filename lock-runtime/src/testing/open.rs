//! Opens a store of this crate by its URL, to test or wrap it.

use std::time::Duration;

use crate::backend::{self, Backend, BackendConfig, Opened};
use crate::base::clock::Clock;
use crate::base::error::LockError;

/// Opens the store at `url` on the tokio runtime of the caller; see [`LockPool::connect`](crate::LockPool::connect)
/// for URLs. Dropping the future closes the connections that were begun.
///
/// # Errors
/// Same as [`LockPool::connect`](crate::LockPool::connect).
pub async fn open_backend(url: &str) -> Result<impl Backend + use<>, LockError> {
    let config = BackendConfig {
        key_prefix: "",
        clock: Clock::runtime(),
        request_timeout: Duration::from_secs(1),
        connect_timeout: Duration::from_secs(5),
        node_timeout: None,
        credentials: None,
        sentinel_credentials: None,
    };
    backend::connect(url, config).await.map(Opened)
}
