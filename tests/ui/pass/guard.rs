#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:<id>", guard = lock)]
async fn settle(id: u64) -> Result<u64, LockError> {
    lock.verify().await?;
    if !lock.is_held() {
        return Ok(0);
    }
    Ok(id)
}

fn sendable<T: Send>(value: T) -> T {
    value
}

fn starts() {
    drop(sendable(settle(1)));
}

fn main() {}
