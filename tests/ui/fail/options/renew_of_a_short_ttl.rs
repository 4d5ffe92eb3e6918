use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", ttl = "10ms", renew = "5ms")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
