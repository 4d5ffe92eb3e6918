#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use lock_runtime::{LockError, distributed_lock};

trait Store {
    fn load(&self, id: u64) -> impl Future<Output = Result<u64, LockError>> + Send;

    async fn store(&mut self, id: u64) -> Result<(), LockError>;
}

struct Memory;

impl Store for Memory {
    #[distributed_lock(key = "load:<id>")]
    async fn load(&self, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }

    #[distributed_lock(key = "store:<id>")]
    async fn store(&mut self, id: u64) -> Result<(), LockError> {
        Ok(())
    }
}

trait Defaulted {
    fn name(&self) -> String;

    #[distributed_lock(key = "default:<self.name()>")]
    async fn work(&self) -> Result<(), LockError> {
        Ok(())
    }
}

fn main() {}
