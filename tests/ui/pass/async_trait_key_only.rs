//! A parameter that only the attribute uses is not unused, also behind the bindings that `async_trait` adds.

#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::time::Duration;

use lock_runtime::{LockError, LockPool, distributed_lock};

#[async_trait::async_trait]
trait Orders {
    async fn settle(&self, id: u64, r#type: &str) -> Result<(), LockError>;
    async fn pay(&self, id: u64, ttl: Duration, live: bool) -> Result<(), LockError>;
    async fn refund(&self, pool: &LockPool, ids: [String; 2]) -> Result<(), LockError>;
    async fn ship(&self, id: u64, kind: u8, width: usize) -> u64;
}

struct Store;

#[async_trait::async_trait]
impl Orders for Store {
    #[distributed_lock(key = "order:<type>:<id>")]
    async fn settle(&self, id: u64, r#type: &str) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = format!("order:{}", id), ttl = ttl, when = live)]
    async fn pay(&self, id: u64, ttl: Duration, live: bool) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = format!("order:{kind:>width$}"), on_error = |_| id)]
    async fn ship(&self, id: u64, kind: u8, width: usize) -> u64 {
        0
    }

    #[distributed_lock(keys = ids.clone(), pool = pool)]
    async fn refund(&self, pool: &LockPool, ids: [String; 2]) -> Result<(), LockError> {
        Ok(())
    }
}

fn main() {
    drop(Store.settle(1, "a"));
    drop(Store.pay(1, Duration::from_secs(1), true));
}
