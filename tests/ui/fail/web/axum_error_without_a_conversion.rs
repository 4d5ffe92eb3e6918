use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use lock_runtime::distributed_lock;

enum OrderError {
    Gone,
}

impl IntoResponse for OrderError {
    fn into_response(self) -> Response {
        StatusCode::GONE.into_response()
    }
}

#[distributed_lock(key = "order:<id>")]
async fn settle(Path(id): Path<u64>) -> Result<String, OrderError> {
    if id == 0 { Err(OrderError::Gone) } else { Ok(id.to_string()) }
}

fn main() {}
