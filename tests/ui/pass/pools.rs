#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::sync::Arc;

use lock_runtime::{LockError, LockPool, distributed_lock};

struct Service {
    locks: LockPool,
    other: Option<LockPool>,
}

impl Service {
    #[distributed_lock(key = "a", pool = self.locks)]
    async fn field(&self) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = "b", pool = &self.locks)]
    async fn reference(&self) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = "c", pool = self.other.clone().unwrap())]
    async fn computed(self) -> Result<Self, LockError> {
        Ok(self)
    }

    #[distributed_lock(key = "d", pool = locks)]
    async fn shared(locks: Arc<LockPool>) -> Result<(), LockError> {
        Ok(())
    }
}

fn main() {}
