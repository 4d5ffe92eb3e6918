use lock_runtime::distributed_lock;

#[distributed_lock(keys = ["a:<from>", "b:<too>"])]
async fn settle(from: u64, to: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
