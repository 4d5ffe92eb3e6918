use lock_runtime::distributed_lock;

const PREFIX: &str = "order:";

#[distributed_lock(key = concat!("order:", "<id>"))]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(keys = [PREFIX.to_string() + "<order.id>:items"])]
async fn pay(order: (u64,)) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(keys = vec!["<other>".to_string(), "<id>".to_string()])]
async fn refund(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
