use lock_runtime::distributed_lock;

const SHARD: u64 = 7;

#[distributed_lock(key = SHARD)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
