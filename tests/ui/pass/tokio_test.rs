#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockPool, distributed_lock};

fn locks() -> LockPool {
    unimplemented!("no test runs here")
}

#[distributed_lock(key = "test", pool = locks())]
#[tokio::test]
async fn locked() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
