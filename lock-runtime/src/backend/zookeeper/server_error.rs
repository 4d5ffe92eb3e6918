//! Errors of a server, classified by what a caller can do about them.

use std::time::Duration;

use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::{BackendError, FailureKind};
use crate::base::text::rounded;

/// The failure for `code`, the answer to a request.
#[cold]
pub(crate) fn failure(code: ServerCode) -> BackendError {
    let (kind, what, remedy) = meaning(code);
    BackendError::new(kind, format!("ZooKeeper {what} (code {})", code.number())).remedy(remedy)
}

fn meaning(code: ServerCode) -> (FailureKind, &'static str, &'static str) {
    use FailureKind::{MaybeApplied, NotApplied, Rejected};
    match code {
        ServerCode::NO_AUTH => (
            Rejected,
            "refuses access to the nodes of the locks",
            "put the login into the URL, `zookeeper://user:password@host/locks`, or grant it all rights with `setAcl`",
        ),
        ServerCode::AUTH_FAILED => {
            (Rejected, "refuses the login", "check user and password in the URL")
        }
        ServerCode::INVALID_ACL => (
            Rejected,
            "has no login of this client to give the nodes to",
            "put a login into the URL, or write `?acl=open`",
        ),
        ServerCode::UNIMPLEMENTED => {
            (Rejected, "has no containers, so it is older than 3.5.3", "update the servers")
        }
        ServerCode::PARENT_IS_EPHEMERAL => (
            Rejected,
            "has an ephemeral node where the locks should be",
            "name another path in the URL",
        ),
        ServerCode::QUOTA_EXCEEDED => {
            (Rejected, "has a quota for this path, which is used up", "raise it with `setquota`")
        }
        ServerCode::READ_ONLY => {
            (NotApplied, "is read-only", "wait until the ensemble has a leader")
        }
        ServerCode::SESSION_EXPIRED => {
            (NotApplied, "has ended the session", "it is reopened automatically")
        }
        ServerCode::SESSION_MOVED => {
            (NotApplied, "has the session at another server", "it passes on its own")
        }
        ServerCode::THROTTLED => (NotApplied, "is overloaded", "look at the servers' load"),
        ServerCode::NO_NODE | ServerCode::NODE_EXISTS => {
            (NotApplied, "has other nodes than a moment ago", "it passes on its own")
        }
        ServerCode::CONNECTION_LOSS | ServerCode::OPERATION_TIMEOUT => {
            (MaybeApplied, "has lost its leader", "it passes on its own")
        }
        _ => (MaybeApplied, "has failed", "see the server's log"),
    }
}

/// A server could not be reached.
#[cold]
pub(crate) fn unreachable(server: &str, why: &str) -> BackendError {
    BackendError::new(
        FailureKind::NotApplied,
        format!("ZooKeeper at {server} is unreachable: {why}"),
    )
    .remedy("check host, port and network, and whether the ensemble has a leader")
}

/// A connection has ended with requests in flight.
#[cold]
pub(crate) fn connection_lost(server: &str, why: &str) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("the connection to ZooKeeper at {server} has ended: {why}"),
    )
    .remedy("it is reopened automatically")
}

/// The bytes do not follow the protocol.
#[cold]
pub(crate) fn malformed() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "ZooKeeper has answered in an unexpected form")
        .remedy("check that the port is the server's `clientPort`")
}

/// The session in which the request was prepared has ended.
#[cold]
pub(crate) fn expired() -> BackendError {
    let message = "the session at ZooKeeper has expired";
    BackendError::new(FailureKind::NotApplied, message).remedy("it is reopened automatically")
}

/// A request has no answer in time.
#[cold]
pub(crate) fn unanswered() -> BackendError {
    let message = "ZooKeeper has not answered in time";
    BackendError::new(FailureKind::MaybeApplied, message)
        .remedy("check the servers' load, and whether the ensemble has a leader")
}

/// The first connection of a session takes longer than a request waits for it.
#[cold]
pub(crate) fn still_opening(waited: Duration) -> BackendError {
    let waited = rounded(waited);
    let message = format!("ZooKeeper has not opened a session for this ttl within {waited:?}");
    BackendError::new(FailureKind::NotApplied, message).remedy(
        "try again, as the session is still being opened; otherwise check the servers' load, or raise `request_timeout`",
    )
}

/// The pool is closed.
#[cold]
pub(crate) fn closed() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "the connections to ZooKeeper are closed")
}

/// The servers allow no session that lives for `kept_for` and `margin`.
#[cold]
pub(crate) fn session_too_short(
    kept_for: Duration,
    margin: Duration,
    allowed: Duration,
) -> BackendError {
    let message = format!(
        "ZooKeeper keeps a session for {allowed:?} at most, and this lock needs {:?}: its ttl or min_hold and {margin:?}",
        kept_for.saturating_add(margin)
    );
    BackendError::new(FailureKind::Rejected, message).remedy(
        "raise `maxSessionTimeout` in `zoo.cfg` of all servers, or ask for a shorter ttl and min_hold",
    )
}

/// A server resumes a session for a shorter time than was agreed.
#[cold]
pub(crate) fn session_shortened(server: &str, agreed: Duration, offered: Duration) -> BackendError {
    let message = format!(
        "ZooKeeper at {server} keeps a session for {offered:?} that others keep for {agreed:?}"
    );
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("set the same `maxSessionTimeout` in `zoo.cfg` of all servers")
}
