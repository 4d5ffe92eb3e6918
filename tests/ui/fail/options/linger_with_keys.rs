use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(keys = ["a:<id>", "b:<id>"], linger = "50ms")]
async fn several(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "a:<id>", linger = "50ms", max_hold = "1s")]
async fn limited(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "a:<id>", renew = false, linger = "2m")]
async fn too_long(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

fn main() {}
