#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<type>:<r#match>")]
async fn r#loop(r#type: u64, r#match: &str) -> Result<usize, LockError> {
    Ok(r#match.len())
}

#[distributed_lock(key = "b:<id>", on_conflict = r#loop_instead)]
async fn r#while(id: u64) -> Result<usize, LockError> {
    Ok(usize::from(id == 0))
}

async fn r#loop_instead(_: u64) -> Result<usize, LockError> {
    std::future::ready(Ok(1)).await
}

fn main() {}
