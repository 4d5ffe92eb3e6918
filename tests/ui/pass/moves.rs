#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};

struct Token(String);

#[distributed_lock(key = "a:<token.0>", ttl = Duration::from_millis(token.0.len() as u64))]
async fn consumes(token: Token) -> Result<String, LockError> {
    Ok(token.0)
}

#[distributed_lock(key = &name)]
async fn borrowed_expression(name: String) -> Result<String, LockError> {
    Ok(name)
}

#[distributed_lock(key = "b:<token.0>")]
async fn spawns(token: Token) -> Result<(), LockError> {
    drop(token);
    Ok(())
}

fn main() {}
