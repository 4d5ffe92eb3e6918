use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: String) -> Result<(), lock_runtime::LockError> {
    drop(id);
    drop(id);
    Ok(())
}

fn main() {}
