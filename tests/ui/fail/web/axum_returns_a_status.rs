use axum::extract::Path;
use axum::http::StatusCode;
use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(Path(id): Path<u64>) -> (StatusCode, String) {
    (StatusCode::OK, id.to_string())
}

fn main() {}
