use actix_web::web::Json;
use lock_runtime::{LockError, distributed_lock};

#[derive(serde::Deserialize)]
struct Order {
    id: u64,
}

#[distributed_lock(key = "order:<order>")]
async fn settle(order: Json<Order>) -> Result<String, LockError> {
    Ok(order.id.to_string())
}

fn main() {
    let _ = actix_web::web::resource("/").to(settle);
}
