#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:{<id>}:<<state>>")]
async fn hash_tag(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "{orders}:all")]
async fn fixed_tag() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = r#"raw:"<id>""#)]
async fn raw_string(id: u64) -> Result<(), LockError> {
    Ok(())
}

/// The text is replaced by the parameter.
#[distributed_lock(key = "order:<id>".replace("<id>", &id.to_string()))]
async fn replaced(id: u64) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
