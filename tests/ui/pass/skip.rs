#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a", wait = "0s", on_conflict = "skip")]
async fn result() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "b", on_conflict = "skip")]
async fn optional_result() -> Result<Option<u8>, LockError> {
    Ok(Some(1))
}

#[distributed_lock(key = "c", on_conflict = "skip", on_error = |_| None)]
async fn option() -> Option<u8> {
    Some(1)
}

#[distributed_lock(key = "d", on_conflict = "skip", on_error = report)]
async fn unit() {}

fn report(error: LockError) {
    drop(error);
}

fn main() {}
