use lock_runtime::distributed_lock;

struct FailureKind;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: u64) -> Result<(), FailureKind> {
    Ok(())
}

fn main() {}
