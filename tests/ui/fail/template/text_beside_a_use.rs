use lock_runtime::distributed_lock;

struct Order {
    id: u64,
}

#[distributed_lock(key = format!("{}:<id>", order.id))]
async fn field(order: Order, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = format!("order:<id>:{id_type}"))]
async fn longer_name(id: u64, id_type: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = String::from("order:{id}"))]
async fn no_format(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(keys = ["all", concat!("order:", "{id}")])]
async fn several(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
