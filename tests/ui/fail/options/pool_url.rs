use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "job", pool = "redis://localhost")]
async fn job() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
