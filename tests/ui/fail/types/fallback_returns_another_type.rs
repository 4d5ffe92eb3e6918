use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", on_conflict = fallback)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

async fn fallback(_: u64) -> u64 {
    1
}

fn main() {}
