use lock_runtime::distributed_lock;

trait Store {
    #[distributed_lock(key = "order")]
    async fn settle(&self) -> Result<(), lock_runtime::LockError>;
}

fn main() {}
