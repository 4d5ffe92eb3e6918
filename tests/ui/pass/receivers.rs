#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::sync::Arc;

use lock_runtime::{LockError, distributed_lock};

#[derive(Clone)]
struct Service {
    tenant: String,
    count: u64,
}

impl Service {
    #[distributed_lock(key = "a:<self.tenant>")]
    async fn by_reference(&self, amount: u64) -> Result<u64, LockError> {
        Ok(self.count + amount)
    }

    #[distributed_lock(key = "b:<self.tenant>:<amount>")]
    async fn by_mutable_reference(&mut self, amount: u64) -> Result<(), LockError> {
        self.count += amount;
        Ok(())
    }

    #[distributed_lock(key = "c:<self.tenant>")]
    async fn by_value(self) -> Result<String, LockError> {
        Ok(self.tenant)
    }

    #[distributed_lock(key = "d:<self.tenant>")]
    async fn by_mutable_value(mut self) -> Result<String, LockError> {
        self.tenant.push('x');
        Ok(self.tenant)
    }

    #[distributed_lock(key = "e:<self.tenant>")]
    async fn by_arc(self: Arc<Self>) -> Result<u64, LockError> {
        Ok(self.count)
    }

    #[distributed_lock(key = "f")]
    async fn without(tenant: &str) -> Result<Self, LockError> {
        Ok(Self { tenant: tenant.to_owned(), count: 0 })
    }
}

fn main() {}
