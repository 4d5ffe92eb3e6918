#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:<id>", ttl = "5s")]
async fn settle(id: u64) -> Result<u64, LockError> {
    if id == 0 {
        return Ok(0);
    }
    Ok(id * 2)
}

#[distributed_lock(key = "all")]
async fn everything() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
