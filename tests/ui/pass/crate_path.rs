#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

mod vendored {
    pub mod lock {
        pub use lock_runtime::*;
    }
}

use vendored::lock::{LockError, distributed_lock};

#[distributed_lock(crate = vendored::lock, key = "a:<id>", ttl = "5s", guard = lock)]
async fn path(id: u64) -> Result<bool, LockError> {
    Ok(lock.is_held())
}

#[distributed_lock(crate = "crate::vendored::lock", key = "b")]
async fn text() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
