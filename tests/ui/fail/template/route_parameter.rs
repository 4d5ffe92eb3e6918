use lock_runtime::distributed_lock;

#[distributed_lock(key = "order/:id")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "order:[id]:<tenant>")]
async fn ship(tenant: u64, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
