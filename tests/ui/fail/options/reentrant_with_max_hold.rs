use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", reentrant = true, max_hold = "1m")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
