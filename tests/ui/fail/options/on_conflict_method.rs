use lock_runtime::{LockError, distributed_lock};

struct Orders;

impl Orders {
    #[distributed_lock(key = "order:<id>", on_conflict = self.busy)]
    async fn settle(&self, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }

    #[distributed_lock(key = "order:<id>", on_conflict = self.busy(id))]
    async fn cancel(&self, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }

    async fn busy(&self, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }
}

fn main() {}
