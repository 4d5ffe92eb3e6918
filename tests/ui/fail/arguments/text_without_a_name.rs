use lock_runtime::{LockError, distributed_lock};

#[distributed_lock("order:<id>", "5s")]
async fn settle(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "order:<id>", "5s")]
async fn pay(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

fn main() {}
