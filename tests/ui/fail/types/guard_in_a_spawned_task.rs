use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>", guard = lock)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    tokio::spawn(async move {
        println!("{:?}", lock.fence());
    });
    Ok(())
}

fn main() {}
