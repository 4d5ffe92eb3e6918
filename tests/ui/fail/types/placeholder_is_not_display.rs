use lock_runtime::distributed_lock;

struct Order { id: u64 }

#[distributed_lock(key = "order:<order>")]
async fn settle(order: Order) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
