use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "main")]
#[tokio::main]
async fn main() -> Result<(), LockError> {
    lock_runtime::init("memory://").await?;
    Ok(())
}

#[distributed_lock(key = "test", pool = "orders")]
#[tokio::test]
async fn test() -> Result<(), LockError> {
    Ok(())
}
