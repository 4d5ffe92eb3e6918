use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", unless = paid)]
async fn settle(paid: bool) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "a", no_wait = true)]
async fn once() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "a", fallback = instead)]
async fn refund() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
