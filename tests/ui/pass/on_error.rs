#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

struct Service;

impl Service {
    #[distributed_lock(key = "a:<id>", on_error = Self::refused)]
    async fn by_path(&self, id: u64) -> u64 {
        id
    }

    #[distributed_lock(key = "d", on_error = |_| 0)]
    async fn exclusive(&mut self, id: String) -> usize {
        id.len()
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

/// What the body takes is copied for the closure before it.
#[distributed_lock(key = "e:<id>", on_error = { let id = id.clone(); move |error| Err((id, error)) })]
async fn by_block(id: String) -> Result<usize, (String, LockError)> {
    std::future::ready(Ok(id.len())).await
}

fn main() {}
