#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{FromLockError, LockError, distributed_lock};

type Answer<T> = Result<T, FailureKind>;

#[derive(Debug)]
struct FailureKind;

impl From<LockError> for FailureKind {
    fn from(_: LockError) -> Self {
        Self
    }
}

impl From<std::num::ParseIntError> for FailureKind {
    fn from(_: std::num::ParseIntError) -> Self {
        Self
    }
}

enum Outcome {
    Done,
    Locked,
}

impl FromLockError for Outcome {
    fn from_lock_error(_: LockError) -> Self {
        Self::Locked
    }
}

#[distributed_lock(key = "a")]
async fn alias(text: &str) -> Answer<u64> {
    let number = text.parse::<u64>()?;
    Ok(number)
}

#[distributed_lock(key = "b")]
async fn own() -> Outcome {
    Outcome::Done
}

#[distributed_lock(key = "c")]
async fn dynamic() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Ok(())
}

#[distributed_lock(key = "d")]
async fn infallible_value() -> Result<std::convert::Infallible, FailureKind> {
    Err(FailureKind)
}

fn main() {}
