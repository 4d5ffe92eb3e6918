use lock_runtime::distributed_lock;

struct Failure;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: u64) -> Result<(), Failure> {
    Ok(())
}

fn main() {}
