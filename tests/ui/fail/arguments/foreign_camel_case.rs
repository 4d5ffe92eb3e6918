use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", lockAtMostFor = "5s", waitTime = "1s")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
