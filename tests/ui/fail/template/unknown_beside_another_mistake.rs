use lock_runtime::distributed_lock;

#[distributed_lock(key = "<idd>:<>")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
