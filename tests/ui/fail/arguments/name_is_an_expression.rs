use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", name = format!("x"))]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
