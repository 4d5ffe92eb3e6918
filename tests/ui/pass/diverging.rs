#![deny(warnings, clippy::all, clippy::pedantic)]
// Both functions have what is behind the panic reported, and the argument that nothing reads. Nothing else is.
#![allow(dead_code, unreachable_code, unused_variables, unused_assignments)]
//! A body that ends in the middle.

use lock_runtime::{LockError, distributed_lock};

#[allow(clippy::unused_async)]
async fn plain(a: u64) -> Result<u64, LockError> {
    panic!("x");
    Ok(a)
}

#[distributed_lock(key = "a:<a>")]
async fn annotated(a: u64) -> Result<u64, LockError> {
    panic!("x");
    Ok(a)
}

#[distributed_lock(key = "a:<a>", guard = lock, on_conflict = "skip")]
async fn with_a_guard(a: u64) -> Result<(), LockError> {
    panic!("{:?}", lock.fence());
}

#[distributed_lock(key = "a:<a>", on_error = |error| panic!("{error}"))]
async fn on_error(a: u64) -> u64 {
    std::process::exit(i32::try_from(a).unwrap_or(1))
}

fn main() {}
