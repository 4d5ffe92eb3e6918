use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<items[at]>")]
async fn settle(items: Vec<u64>) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
