use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", wait = "0s", retry_delay = "50ms", retry_count = 3)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
