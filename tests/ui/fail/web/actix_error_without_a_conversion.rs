use actix_web::web::Path;
use actix_web::{HttpResponse, ResponseError};
use lock_runtime::distributed_lock;

#[derive(Debug)]
enum OrderError {
    Gone,
}

impl std::fmt::Display for OrderError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("gone")
    }
}

impl ResponseError for OrderError {}

#[distributed_lock(key = "order:<id>")]
async fn settle(id: Path<u64>) -> Result<HttpResponse, OrderError> {
    if *id == 0 { Err(OrderError::Gone) } else { Ok(HttpResponse::Ok().finish()) }
}

fn main() {
    let _ = actix_web::web::resource("/{id}").to(settle);
}
