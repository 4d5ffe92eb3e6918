use actix_web::web::Path;
use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "order:<path>")]
async fn settle(path: Path<(String, u64)>) -> Result<String, LockError> {
    Ok(path.0.clone())
}

fn main() {
    let _ = actix_web::web::resource("/{tenant}/{id}").to(settle);
}
