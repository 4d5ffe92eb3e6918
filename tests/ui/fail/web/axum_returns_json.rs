use axum::Json;
use axum::extract::Path;
use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(Path(id): Path<u64>) -> Json<u64> {
    Json(id)
}

fn main() {
    let _: axum::Router = axum::Router::new().route("/{id}", axum::routing::post(settle));
}
