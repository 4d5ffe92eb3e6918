//! A parameter that only the key uses is not unused, also behind the bindings that `async_trait` adds.

#![deny(warnings, clippy::pedantic)]

use lock_runtime::{LockError, distributed_lock};

#[async_trait::async_trait]
trait Orders {
    async fn settle(&self, id: u64, r#type: &str) -> Result<(), LockError>;
}

struct Store;

#[async_trait::async_trait]
impl Orders for Store {
    #[distributed_lock(key = "order:<type>:<id>")]
    async fn settle(&self, id: u64, r#type: &str) -> Result<(), LockError> {
        Ok(())
    }
}

fn main() {
    drop(Store.settle(1, "a"));
}
