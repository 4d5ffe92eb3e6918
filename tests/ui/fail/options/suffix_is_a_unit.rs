use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", ttl = 5m, wait = 1m30s)]
async fn settle() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
