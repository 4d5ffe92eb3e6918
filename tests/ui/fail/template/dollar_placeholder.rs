use lock_runtime::distributed_lock;

#[distributed_lock(keys = ["order:$id", "order:${order.id}"])]
async fn settle(id: u64, order: (u64,)) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
