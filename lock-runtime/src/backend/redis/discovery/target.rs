//! Where a connection goes next: always to the same server, or to whichever is the master.

use std::fmt;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{RedisError, Value};

use crate::backend::redis::discovery::sentinel::Sentinels;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::server_error;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind, Warning};

#[derive(Clone)]
pub(crate) enum Resolver {
    Fixed(Box<Dialer>),
    Sentinels(Arc<Sentinels>),
}

impl Resolver {
    /// Where to dial, after `last`.
    pub(crate) async fn resolve(&self, last: Option<&Endpoint>) -> Result<Dialer, BackendError> {
        match self {
            Self::Fixed(dialer) => Ok(Dialer::clone(dialer)),
            Self::Sentinels(sentinels) => sentinels.master(last).await,
        }
    }

    /// Returns when `from` is not where to be any more.
    pub(crate) async fn moved(&self, from: &Endpoint) {
        match self {
            Self::Fixed(_) => std::future::pending().await,
            Self::Sentinels(sentinels) => sentinels.moved(from).await,
        }
    }

    /// Makes sure that a new connection is to a master, if one was looked for: a sentinel may know less
    /// than the server itself. At a fixed address so if there was no master before, with this `replica`'s answer: the
    /// name or the address may lead to another server by now, or not yet.
    pub(crate) async fn confirm(
        &self,
        dialer: &Dialer,
        connection: &mut MultiplexedConnection,
        replica: Option<&BackendError>,
    ) -> Result<(), BackendError> {
        if let (Self::Fixed(_), None) = (self, replica) {
            return Ok(());
        }
        let role: Result<Value, _> = redis::cmd("ROLE").query_async(connection).await;
        match (self, role) {
            (_, Ok(Value::Array(parts))) if is_master(&parts) => Ok(()),
            (Self::Sentinels(_), Ok(_)) => Err(not_yet(dialer.endpoint())),
            (Self::Sentinels(_), Err(error)) => Err(not_told(dialer.endpoint(), error)),
            (Self::Fixed(_), Ok(Value::Array(parts))) if is_replica(&parts) => {
                replica.cloned().map_or(Ok(()), Err)
            }
            // Not every user may ask, and not every proxy knows the question. The next request will tell.
            (Self::Fixed(_), _) => Ok(()),
        }
    }

    /// How many replicas have to have a lock before it is believed in.
    pub(crate) fn replicas(&self) -> u16 {
        match self {
            Self::Fixed(dialer) => dialer.endpoint().replicas,
            Self::Sentinels(sentinels) => sentinels.replicas(),
        }
    }

    /// What is wrong with connections that work.
    pub(crate) fn warning(&self) -> Option<Warning> {
        match self {
            Self::Fixed(dialer) => dialer.endpoint().warning(),
            Self::Sentinels(sentinels) => sentinels.warning(),
        }
    }

    /// Gives up connections of its own.
    pub(crate) fn close(&self) {
        if let Self::Sentinels(sentinels) = self {
            sentinels.close();
        }
    }
}

impl From<Dialer> for Resolver {
    fn from(dialer: Dialer) -> Self {
        Self::Fixed(Box::new(dialer))
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
    is_role(role, "master")
}

fn is_replica(role: &[Value]) -> bool {
    is_role(role, "slave")
}

fn is_role(role: &[Value], name: &str) -> bool {
    match role.first() {
        Some(Value::BulkString(role)) => role == name.as_bytes(),
        Some(Value::SimpleString(role)) => role == name,
        _ => false,
    }
}

#[cold]
fn not_yet(endpoint: &Endpoint) -> BackendError {
    let message = format!("Redis at {endpoint}, which the sentinels name, is not a master");
    BackendError::new(FailureKind::NotApplied, message).remedy(
        "a failover passes by itself; otherwise look at `SENTINEL MASTER` and `ROLE`, and at the sentinels' logs",
    )
}

#[cold]
fn not_told(endpoint: &Endpoint, error: RedisError) -> BackendError {
    let may_not = error.code() == Some("NOPERM");
    let failure = server_error::failure(&endpoint.to_string(), error).before_sending();
    if may_not {
        return failure.remedy("allow the ACL user `+role` too, by which a master is known");
    }
    failure
}
