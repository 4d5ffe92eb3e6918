#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::fmt::Display;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "a:<id>")]
async fn arguments(id: impl Display, finish: impl FnOnce(u8) -> u8) -> Result<u8, LockError> {
    Ok(finish(1))
}

#[distributed_lock(key = "b:<count>")]
async fn returns(count: u8) -> Result<impl Iterator<Item = u8> + Send, LockError> {
    if count == 0 {
        return Ok(0..9);
    }
    Ok(0..count)
}

#[distributed_lock(key = "c:<name>")]
async fn boxed(name: &str) -> Result<Box<dyn Iterator<Item = char> + Send + '_>, LockError> {
    Ok(Box::new(name.chars()))
}

#[distributed_lock(key = "d", on_error = |_| String::new())]
async fn bare() -> impl Display {
    String::from("x")
}

fn main() {}
