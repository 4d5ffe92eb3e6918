use lock_runtime::distributed_lock;

struct Service;

#[distributed_lock(key = "order")]
impl Service {
    async fn settle(&self) -> Result<(), lock_runtime::LockError> {
        Ok(())
    }
}

fn main() {}
