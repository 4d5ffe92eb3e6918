use lock_runtime::distributed_lock;

const TENANT: u64 = 1;

#[distributed_lock(key = "t:<TENANT>:<id>")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
