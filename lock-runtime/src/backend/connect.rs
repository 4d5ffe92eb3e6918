//! From a URL to a store.

use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::memory::Memory;
use crate::clock::Clock;
use crate::error::{ErrorKind, LockError};

/// Opens the store at `url`. Errors show the scheme and the host at most.
pub(crate) async fn connect(
    url: &str,
    prefix: &str,
    clock: Clock,
    patience: Duration,
) -> Result<Arc<dyn Store>, LockError> {
    // What stands before the first `://` may also be a password, if the scheme was forgotten.
    let parts = url.split_once("://").filter(|(scheme, _)| !scheme.contains([':', '@', '/']));
    let Some((scheme, rest)) = parts else {
        return Err(LockError::new(ErrorKind::Config, "the store's URL has no scheme").remedy(
            "write for example `redis://127.0.0.1:6379`, or `memory://` for locks of one process",
        ));
    };
    match scheme {
        "memory" => Ok(Arc::new(Memory::open(rest, clock))),
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" => {
            super::redis::open(url, super::redis::Setting { prefix, clock, patience }).await
        }
        _ => {
            let _ = (prefix, patience);
            Err(unknown(scheme))
        }
    }
}

#[cold]
fn unknown(scheme: &str) -> LockError {
    let cause = format!("`{scheme}://` is not a store that this build knows");
    let remedy = match scheme {
        "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" => {
            "enable the feature `redis` (or `rediss` for TLS) of lock-runtime"
        }
        "http" | "https" => {
            "the store is spoken to in its own protocol; write for example `redis://host:6379`"
        }
        _ => {
            "known are `redis://host:6379`, `rediss://host:6379` (TLS), `redis+sentinel://host:26379/service` and `memory://`"
        }
    };
    LockError::new(ErrorKind::Config, cause).remedy(remedy)
}
