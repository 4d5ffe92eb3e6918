use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", retry_times = 3)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
