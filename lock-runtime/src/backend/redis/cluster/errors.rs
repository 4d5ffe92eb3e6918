//! Errors of a cluster as a whole.

use crate::backend::redis::server_error;
use crate::backend::redis::slot_map::Address;
use crate::backend::{BackendError, FailureKind};

#[cold]
pub(super) fn different_slots(one: &str, other: &str) -> BackendError {
    let message = format!("`{one}` and `{other}` are in different slots of the Redis Cluster");
    BackendError::new(FailureKind::Rejected, message).remedy(server_error::SHARE_A_SLOT)
}

#[cold]
pub(super) fn no_server(message: String) -> BackendError {
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("check `redis-cli --cluster check` on one of its servers; requests were repeated until the end of the wait")
}

#[cold]
pub(super) fn too_many_redirects() -> BackendError {
    no_server("the servers of the Redis Cluster redirect a slot to each other".to_owned())
}

#[cold]
pub(super) fn slow(address: &Address) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("Redis at {address} did not answer in time"),
    )
    .remedy(
        "check that the server is up and reachable; a grant that may have been made is released",
    )
}

#[cold]
pub(super) fn closed() -> BackendError {
    BackendError::new(FailureKind::Rejected, "the connections to the Redis Cluster are closed")
}
