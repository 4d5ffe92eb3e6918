#![deny(warnings, clippy::pedantic)]
#![allow(dead_code, clippy::manual_async_fn)]

use std::pin::Pin;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<id>")]
fn opaque(id: u64) -> impl Future<Output = Result<u64, LockError>> + Send {
    async move {
        if id == 0 {
            return Ok(0);
        }
        Ok(id)
    }
}

#[distributed_lock(key = "b:<id>", on_conflict = opaque)]
fn boxed(id: u64) -> impl Future<Output = Result<u64, LockError>> {
    async move { Ok(id) }
}

#[distributed_lock(key = "c:<id>")]
fn pinned(id: u64) -> Pin<Box<dyn Future<Output = Result<u64, LockError>> + Send>> {
    Box::pin(async move { Ok(id) })
}

/// The body uses nothing, and the key does.
#[distributed_lock(key = "d:<id>")]
fn unmoved(id: String) -> impl Future<Output = Result<(), LockError>> {
    async { Ok(()) }
}

fn main() {}
