use lock_runtime::distributed_lock;

struct Memory;

#[async_trait::async_trait]
trait Store {
    async fn settle(&self, order: (u64, u64)) -> Result<(), lock_runtime::LockError>;
}

#[async_trait::async_trait]
impl Store for Memory {
    #[distributed_lock(key = "order:<id>")]
    async fn settle(&self, (id, _): (u64, u64)) -> Result<(), lock_runtime::LockError> {
        Ok(())
    }
}

fn main() {}
