use lock_runtime::distributed_lock;

#[distributed_lock(key = "account:<from>")]
#[distributed_lock(key = "account:<to>")]
async fn transfer(from: u64, to: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
