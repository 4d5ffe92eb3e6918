//! Whether a new connection leads to a master.

use redis::aio::ConnectionLike;
use redis::{RedisError, Value};

use crate::backend::redis::server_error;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind};

/// What `ROLE` has to answer before a new connection is used.
#[derive(Clone, Debug)]
pub(crate) enum RoleCheck {
    /// No request is sent.
    Skip,
    /// The server must be a master: a sentinel may know less than the server itself.
    Master,
    /// The last server at this address was a replica and answered a request with this error. A replica fails with
    /// the same error; the name or address may lead to another server by now.
    NotReplica(BackendError),
}

impl RoleCheck {
    pub(crate) async fn run(
        &self,
        endpoint: &Endpoint,
        connection: &mut (impl ConnectionLike + Send),
    ) -> Result<(), BackendError> {
        if let Self::Skip = self {
            return Ok(());
        }
        let role: Result<Value, _> = redis::cmd("ROLE").query_async(connection).await;
        match (self, role) {
            (Self::Master, Ok(role)) if is_role(&role, "master") => Ok(()),
            (Self::Master, Ok(_)) => Err(not_master(endpoint)),
            (Self::Master, Err(error)) => Err(no_role(endpoint, error)),
            (Self::NotReplica(failure), Ok(role)) if is_role(&role, "slave") => {
                Err(failure.clone())
            }
            // `ROLE` may be forbidden to the user or unknown to a proxy. The next request shows whether this is a
            // replica.
            (Self::Skip | Self::NotReplica(_), _) => Ok(()),
        }
    }
}

fn is_role(role: &Value, name: &str) -> bool {
    let Value::Array(parts) = role else { return false };
    match parts.first() {
        Some(Value::BulkString(role)) => role == name.as_bytes(),
        Some(Value::SimpleString(role)) => role == name,
        _ => false,
    }
}

#[cold]
fn not_master(endpoint: &Endpoint) -> BackendError {
    let message = format!("Redis at {endpoint}, which the sentinels name, is not a master");
    BackendError::new(FailureKind::NotApplied, message).remedy(
        "a failover ends on its own; otherwise look at `SENTINEL MASTER` and `ROLE`, and at the sentinels' logs",
    )
}

#[cold]
fn no_role(endpoint: &Endpoint, error: RedisError) -> BackendError {
    let is_forbidden = error.code() == Some("NOPERM");
    let failure = server_error::failure(&endpoint.to_string(), error).before_sending();
    if is_forbidden {
        return failure.remedy("allow the ACL user `+role` too, which identifies a master");
    }
    failure
}
