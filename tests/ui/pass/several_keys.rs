#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(keys = ["account:<from>", "account:<to>"])]
async fn transfer(from: u64, to: u64) -> Result<u64, LockError> {
    Ok(from + to)
}

#[distributed_lock(keys = ids.iter().map(|id| format!("item:{id}")))]
async fn computed(ids: Vec<u64>) -> Result<usize, LockError> {
    Ok(ids.len())
}

#[distributed_lock(keys = ["fixed", "item:<id>", format!("extra:{id}")])]
async fn mixed(id: u64) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(keys = names)]
async fn texts(names: &[&str]) -> Result<usize, LockError> {
    Ok(names.len())
}

#[distributed_lock(key = name)]
async fn maybe_owned(name: std::borrow::Cow<'_, str>) -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(keys = &["account:<from>", "account:<to>"])]
async fn by_reference(from: u64, to: u64) -> Result<u64, LockError> {
    Ok(from + to)
}

#[distributed_lock(keys = vec!["account:<from>", "account:<to>"])]
async fn in_a_vector(from: u64, to: u64) -> Result<u64, LockError> {
    Ok(from + to)
}

#[distributed_lock(keys = ("account:<from>", "account:<to>"))]
async fn in_a_tuple(from: u64, to: u64) -> Result<u64, LockError> {
    Ok(from + to)
}

fn main() {}
