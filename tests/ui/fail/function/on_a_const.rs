use lock_runtime::distributed_lock;

#[distributed_lock(key = "order")]
const ORDER: u64 = 1;

fn main() {}
