use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:<id>", on_conflict = Ok(0))]
async fn settle(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "order:<id>", on_conflict = None)]
async fn find(id: u64) -> Option<u64> {
    Some(id)
}

#[distributed_lock(key = "order:<id>", on_error = Err(id))]
async fn pay(id: u64) -> Result<u64, u64> {
    Ok(id)
}

fn main() {}
