//! From a URL to a store.

use std::sync::Arc;
use std::time::Duration;

use super::DynBackend;
use super::memory::Memory;
use crate::backend::credentials::Provider;
use crate::base::clock::Clock;
use crate::base::error::{ErrorKind, LockError};

/// Settings of a pool that concern its store.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) struct BackendConfig<'a> {
    /// In front of every key.
    pub(crate) key_prefix: &'a str,
    pub(crate) clock: Clock,
    /// How long one request may take.
    pub(crate) request_timeout: Duration,
    /// How long a connection may take to be made, until requests can be sent over it.
    pub(crate) connect_timeout: Duration,
    /// How long the vote of one node of a quorum may take, if not by the ttl.
    pub(crate) node_timeout: Option<Duration>,
    /// Asked for user and password by each connection.
    pub(crate) credentials: Option<&'a Provider>,
    /// The same for those to sentinels.
    pub(crate) sentinel_credentials: Option<&'a Provider>,
}

#[cfg(feature = "redis")]
impl BackendConfig<'_> {
    pub(crate) fn limits(&self) -> Limits {
        Limits { connect: self.connect_timeout, request: self.request_timeout }
    }

    /// With what a URL says, which comes before what the builder says.
    pub(crate) fn with_connect_timeout(self, connect_timeout: Option<Duration>) -> Self {
        Self { connect_timeout: connect_timeout.unwrap_or(self.connect_timeout), ..self }
    }
}

/// How long a server may take.
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// To be connected to, until requests can be sent.
    pub(crate) connect: Duration,
    /// To answer one request; after that long without any answer the connection is replaced.
    pub(crate) request: Duration,
}

/// Opens the store at `url`. Errors show the scheme and the host at most.
pub(crate) async fn connect(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    // What stands before the first `://` may also be a password, if the scheme was forgotten.
    let parts = url.split_once("://").filter(|(scheme, _)| !scheme.contains([':', '@', '/']));
    let Some((scheme, rest)) = parts else {
        return Err(LockError::new(ErrorKind::Config, "the store's URL has no scheme").remedy(
            "write for example `redis://127.0.0.1:6379`, or `memory://` for locks of one process",
        ));
    };
    match scheme {
        "memory" if rest.contains('?') => {
            Err(LockError::new(ErrorKind::Config, "a `memory://` URL has no `?` parameters")
                .remedy("write `memory://` or `memory://name`; ttl, wait and prefix are set on `LockPool::builder(url)`"))
        }
        "memory" if config.credentials.is_some() || config.sentinel_credentials.is_some() => {
            Err(LockError::new(ErrorKind::Config, "`memory://` has no log-in for credentials")
                .remedy("leave `.credentials(..)` out, or name a server: `redis://host:6379`"))
        }
        "memory" => Ok(Arc::new(Memory::open(rest, config.clock))),
        #[cfg(feature = "redis")]
        scheme if is_of_redis(scheme) => super::redis::open(url, config).await,
        _ => Err(unknown(scheme)),
    }
}

/// Valkey's schemes are those of Redis.
fn is_of_redis(scheme: &str) -> bool {
    let (server, rest) = scheme.split_once('+').unwrap_or((scheme, ""));
    match server {
        "redis" | "valkey" => matches!(rest, "" | "sentinel" | "cluster" | "unix"),
        "rediss" | "valkeys" => matches!(rest, "" | "sentinel" | "cluster"),
        "redlock" | "unix" => rest.is_empty(),
        _ => false,
    }
}

#[cold]
fn unknown(scheme: &str) -> LockError {
    let cause = format!("`{scheme}://` is not a store that this build knows");
    let remedy = match scheme {
        scheme if is_of_redis(scheme) => {
            "enable the feature `redis` (or `rediss` for TLS) of lock-runtime"
        }
        "http" | "https" => {
            "the store is spoken to in its own protocol; write for example `redis://host:6379`"
        }
        _ => {
            "known are `redis://host:6379`, `redis+sentinel://host:26379/service`, `redis+cluster://host1,host2`, all with `rediss` for TLS or `valkey` for `redis`, `redis+unix:///path`, `redlock://host1,host2,host3` (a quorum) and `memory://`"
        }
    };
    LockError::new(ErrorKind::Config, cause).remedy(remedy)
}
