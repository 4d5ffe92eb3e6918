use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", lock_at_most_for = "5m")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
