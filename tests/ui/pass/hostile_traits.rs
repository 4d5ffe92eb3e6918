#![deny(warnings, clippy::pedantic)]
#![allow(dead_code, clippy::wrong_self_convention)]

use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};

/// Methods of the names that the expansion calls, on everything.
trait Shadow: Sized {
    fn key(self, _: u8) {}
    fn keys(self, _: u8) {}
    fn ttl(self) {}
    fn pool(self) {}
    fn run(self) {}
    fn text(self) {}
    fn part(self) {}
    fn finish(self) {}
    fn guard(self) {}
    fn is_conflict(self) {}
}

impl<T> Shadow for T {}

#[distributed_lock(key = "a:<id>", ttl = Duration::from_secs(1), guard = lock, on_conflict = "skip")]
async fn settle(id: u64) -> Result<(), LockError> {
    lock.verify().await
}

fn main() {}
