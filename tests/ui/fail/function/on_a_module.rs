use lock_runtime::distributed_lock;

#[distributed_lock(key = "order")]
mod orders {}

fn main() {}
