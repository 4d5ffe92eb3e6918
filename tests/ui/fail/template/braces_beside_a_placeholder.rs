use lock_runtime::distributed_lock;

struct Order {
    id: u64,
}

#[distributed_lock(key = "t:{tenant}:<id>")]
async fn settle(tenant: u64, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "order:{id:?}:<tenant>:{ id }")]
async fn debug(tenant: u64, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "{order.id}:<tenant>")]
async fn field(tenant: u64, order: Order) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
