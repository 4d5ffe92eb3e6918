use lock_runtime::distributed_lock;

#[distributed_lock(key = "order", on_conflict = fallback)]
async fn settle(_: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

async fn fallback(_: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
