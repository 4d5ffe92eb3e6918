use lock_runtime::distributed_lock;

#[distributed_lock(key = "t:<tenant>:{}")]
async fn settle(tenant: u64, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "t:<tenant>:%d")]
async fn ship(tenant: u64, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "<<t>>:$id:<tenant>")]
async fn pay(tenant: u64, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
