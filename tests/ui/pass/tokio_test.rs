#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::distributed_lock;

#[distributed_lock(key = "test")]
#[tokio::test]
async fn locked() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
