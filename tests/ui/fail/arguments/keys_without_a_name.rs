use lock_runtime::distributed_lock;

#[distributed_lock("a:<from>", "b:<to>")]
async fn settle(from: u64, to: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(keys("a:<from>", "b:<to>"))]
async fn ship(from: u64, to: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "a:<from>", "b:<to>")]
async fn pay(from: u64, to: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = vec!["a:<from>", "b:<to>"])]
async fn refund(from: u64, to: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
