use actix_web::web::{Json, Path};
use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: Path<u64>) -> Json<u64> {
    Json(id.into_inner())
}

fn main() {
    let _ = actix_web::web::resource("/{id}").to(settle);
}
