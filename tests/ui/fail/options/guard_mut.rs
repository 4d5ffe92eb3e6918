use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", guard = mut lock)]
async fn settle() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
