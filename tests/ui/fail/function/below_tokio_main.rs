use lock_runtime::distributed_lock;

#[tokio::main]
#[distributed_lock(key = "main")]
async fn main() -> Result<(), lock_runtime::LockError> {
    Ok(())
}
