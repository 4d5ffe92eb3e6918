use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", pool = name)]
async fn settle(name: String, id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
