use actix_web::Responder;
use actix_web::web::Path;
use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: Path<u64>) -> impl Responder {
    id.to_string()
}

fn main() {
    let _ = actix_web::web::resource("/{id}").to(settle);
}
