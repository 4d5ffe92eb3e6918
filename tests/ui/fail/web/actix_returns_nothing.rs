use actix_web::web::Path;
use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: Path<u64>) {
    println!("{id}");
}

fn main() {
    let _ = settle;
}
