use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:lock_runtime:<id>")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
