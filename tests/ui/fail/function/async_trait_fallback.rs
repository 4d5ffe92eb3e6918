use lock_runtime::distributed_lock;

struct Memory;

#[async_trait::async_trait]
trait Store {
    async fn settle(&self, order: (u64, u64)) -> Result<(), lock_runtime::LockError>;
}

#[async_trait::async_trait]
impl Store for Memory {
    #[distributed_lock(key = "order", on_conflict = Self::fallback)]
    async fn settle(&self, (_, _): (u64, u64)) -> Result<(), lock_runtime::LockError> {
        Ok(())
    }
}

fn main() {}
