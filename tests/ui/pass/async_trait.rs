#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use async_trait::async_trait;
use lock_runtime::{LockError, distributed_lock};

#[async_trait]
trait Store {
    async fn load(&self, id: u64) -> Result<u64, LockError>;
    async fn change(&mut self, name: &str, by: u64) -> Result<String, LockError>;
    async fn take(self: Box<Self>, mut name: String) -> Result<String, LockError>;
    async fn skipped(&self) -> Result<Option<u64>, LockError>;
}

struct Memory {
    tenant: String,
}

#[async_trait]
impl Store for Memory {
    #[distributed_lock(key = "load:<self.tenant>:<id>", ttl = "5s")]
    async fn load(&self, id: u64) -> Result<u64, LockError> {
        if id == 0 {
            return Ok(0);
        }
        std::future::ready(()).await;
        Ok(id + self.tenant.len() as u64)
    }

    #[distributed_lock(key = "change:<self.tenant>:<name>", guard = lock)]
    async fn change(&mut self, name: &str, by: u64) -> Result<String, LockError> {
        self.tenant.push_str(name);
        Ok(format!("{}{by}{}", self.tenant, lock.is_held()))
    }

    #[distributed_lock(key = "take:<name>", when = name.len() > 1)]
    async fn take(self: Box<Self>, mut name: String) -> Result<String, LockError> {
        name.push_str(&self.tenant);
        Ok(name)
    }

    #[distributed_lock(key = "skipped:<self.tenant>", on_conflict = "skip")]
    async fn skipped(&self) -> Result<Option<u64>, LockError> {
        Ok(Some(1))
    }
}

#[async_trait(?Send)]
trait Local {
    #[distributed_lock(key = "local")]
    async fn local(&self) -> Result<(), LockError> {
        Ok(())
    }
}

fn main() {}
