//! Why a connection to a server is down.

use crate::backend::{BackendError, FailureKind};

#[cold]
pub(super) fn not_connected() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "not connected yet")
}

#[cold]
pub(super) fn lost(server: &str) -> BackendError {
    let message = format!("the connection to Redis at {server} is lost");
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("check that the server is up and reachable; the pool reconnects on its own")
}

/// A request that was in flight when the connection was found silent.
#[cold]
pub(super) fn unanswered(server: &str) -> BackendError {
    no_longer_answers(FailureKind::MaybeApplied, server)
}

#[cold]
pub(super) fn silent(server: &str) -> BackendError {
    no_longer_answers(FailureKind::NotApplied, server)
}

fn no_longer_answers(kind: FailureKind, server: &str) -> BackendError {
    let message = format!("Redis at {server} no longer answers");
    BackendError::new(kind, message).remedy(
        "check that the server is up and reachable; the pool replaces the connection on its own",
    )
}

#[cold]
pub(super) fn moved(server: &str) -> BackendError {
    let message = format!("Redis at {server} is no longer the master");
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("no action is needed: the pool connects to the new master on its own")
}
