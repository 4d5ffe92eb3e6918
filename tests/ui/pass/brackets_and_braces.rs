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

/// A hash tag beside a placeholder of the same name.
#[distributed_lock(key = "{order}:<order>")]
async fn tag_of_a_parameter(order: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(key = "user:id:<id>/rows[id]#id=<id>")]
async fn words(id: u64) -> Result<(), LockError> {
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

#[distributed_lock(key = format!("{kind}:<kind>:{{id}}:{id:>kind$}"))]
async fn formatted(id: u64, kind: usize) -> Result<(), LockError> {
    Ok(())
}

fn main() {}
