#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

struct Service;

impl Service {
    #[distributed_lock(key = "a:<id>", on_error = Self::refused)]
    async fn by_path(&self, id: u64) -> u64 {
        id
    }

    fn refused(_: LockError) -> u64 {
        0
    }
}

#[distributed_lock(key = "b", on_error = |error| error.to_string())]
async fn by_closure() -> String {
    String::new()
}

#[distributed_lock(key = "c", on_error = |_| ())]
async fn unit() {}

fn main() {}
