//! Where a connection goes next: always to the same server, or to whichever is the master.

use std::fmt;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use super::endpoint::Endpoint;
use super::reply;
use super::sentinel::Sentinels;
use super::stream::Dialer;
use crate::backend::{BackendError, Failure};

#[derive(Clone)]
pub(super) enum Resolver {
    Fixed(Dialer),
    Sentinels(Arc<Sentinels>),
}

impl Resolver {
    /// Where to dial, after `last`.
    pub(super) async fn resolve(&self, last: Option<&Endpoint>) -> Result<Dialer, BackendError> {
        match self {
            Self::Fixed(dialer) => Ok(dialer.clone()),
            Self::Sentinels(sentinels) => sentinels.master(last).await,
        }
    }

    /// Returns when `from` is not where to be any more.
    pub(super) async fn moved(&self, from: &Endpoint) {
        match self {
            Self::Fixed(_) => std::future::pending().await,
            Self::Sentinels(sentinels) => sentinels.moved(from).await,
        }
    }

    /// Whether another answer than the last one is possible.
    pub(super) fn finds_masters(&self) -> bool {
        matches!(self, Self::Sentinels(_))
    }

    /// Makes sure that a new connection is to a master, if one was looked for: who names one may know less
    /// than the server itself.
    pub(super) async fn confirm(
        &self,
        dialer: &Dialer,
        connection: &mut MultiplexedConnection,
    ) -> Result<(), BackendError> {
        if !self.finds_masters() {
            return Ok(());
        }
        let role: Result<Value, _> = redis::cmd("ROLE").query_async(connection).await;
        match role {
            Ok(Value::Array(parts)) if is_master(&parts) => Ok(()),
            Ok(_) => Err(not_yet(dialer.endpoint())),
            Err(error) => Err(not_told(dialer.endpoint(), error)),
        }
    }

    /// How many replicas have to have a lock before it is believed in.
    pub(super) fn replicas(&self) -> u16 {
        match self {
            Self::Fixed(dialer) => dialer.endpoint().replicas,
            Self::Sentinels(sentinels) => sentinels.replicas(),
        }
    }

    /// Gives up connections of its own.
    pub(super) fn close(&self) {
        if let Self::Sentinels(sentinels) = self {
            sentinels.close();
        }
    }
}

impl From<Dialer> for Resolver {
    fn from(dialer: Dialer) -> Self {
        Self::Fixed(dialer)
    }
}

impl From<Sentinels> for Resolver {
    fn from(sentinels: Sentinels) -> Self {
        Self::Sentinels(Arc::new(sentinels))
    }
}

/// The server, or how it is looked for.
impl fmt::Display for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(dialer) => dialer.endpoint().fmt(f),
            Self::Sentinels(sentinels) => sentinels.fmt(f),
        }
    }
}

fn is_master(role: &[Value]) -> bool {
    match role.first() {
        Some(Value::BulkString(role)) => role == b"master",
        Some(Value::SimpleString(role)) => role == "master",
        _ => false,
    }
}

#[cold]
fn not_yet(endpoint: &Endpoint) -> BackendError {
    let message = format!("Redis at {endpoint}, which the sentinels name, is not a master");
    BackendError::new(Failure::NotNow, message).remedy(
        "a failover passes by itself; otherwise look at `SENTINEL MASTER` and `ROLE`, and at the sentinels' logs",
    )
}

#[cold]
fn not_told(endpoint: &Endpoint, error: RedisError) -> BackendError {
    let may_not = error.code() == Some("NOPERM");
    let failure = reply::failure(&endpoint.to_string(), error).before_sending();
    if may_not {
        return failure.remedy("allow the ACL user `+role` too, by which a master is known");
    }
    failure
}
