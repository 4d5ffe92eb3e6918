use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", guard = lock, when = id > 0)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
