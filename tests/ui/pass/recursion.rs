#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "node:<depth>")]
async fn descend(depth: u32) -> Result<u32, LockError> {
    if depth == 0 {
        return Ok(0);
    }
    let below = Box::pin(descend(depth - 1)).await?;
    Ok(below + 1)
}

fn sendable<T: Send>(value: T) -> T {
    value
}

fn starts() {
    drop(sendable(descend(3)));
}

fn main() {}
