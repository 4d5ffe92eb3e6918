#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

struct Service;

impl Service {
    #[distributed_lock(key = "a:<id>", on_conflict = Self::instead)]
    async fn reference(&self, id: u64, mut name: String) -> Result<String, LockError> {
        name.push_str(&id.to_string());
        Ok(name)
    }

    async fn instead(&self, _: u64, name: String) -> Result<String, LockError> {
        std::future::ready(Ok(name)).await
    }

    #[distributed_lock(key = "b:<id>", on_conflict = Self::consumed)]
    async fn value(self, id: u64) -> Result<(), LockError> {
        Ok(())
    }

    async fn consumed(self, _: u64) -> Result<(), LockError> {
        std::future::ready(Ok(())).await
    }

    #[distributed_lock(key = "c:<id>", on_conflict = Self::changed)]
    async fn mutable(&mut self, id: u64) -> Result<(), LockError> {
        Ok(())
    }

    async fn changed(&mut self, _: u64) -> Result<(), LockError> {
        std::future::ready(Ok(())).await
    }
}

#[async_trait::async_trait]
trait Settle {
    async fn settle(&mut self, name: String) -> Result<String, LockError>;
}

#[async_trait::async_trait]
impl Settle for Service {
    #[distributed_lock(key = "e:<name>", on_conflict = Self::renamed)]
    async fn settle(&mut self, name: String) -> Result<String, LockError> {
        Ok(name)
    }
}

impl Service {
    async fn renamed(&mut self, name: String) -> Result<String, LockError> {
        std::future::ready(Ok(name)).await
    }
}

mod other {
    pub(crate) async fn generic<T>(_: T) -> Result<(), lock_runtime::LockError> {
        std::future::ready(Ok(())).await
    }
}

#[distributed_lock(key = "d", on_conflict = other::generic::<T>)]
async fn generic<T>(item: T) -> Result<(), LockError> {
    drop(item);
    Ok(())
}

fn main() {}
