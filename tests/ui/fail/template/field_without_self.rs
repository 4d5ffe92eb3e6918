use lock_runtime::distributed_lock;

struct Service { tenant: String }

impl Service {
    #[distributed_lock(key = "<tenant>:all")]
    async fn settle(&self) -> Result<(), lock_runtime::LockError> {
        Ok(())
    }
}

fn main() {}
