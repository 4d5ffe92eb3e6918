use lock_runtime::distributed_lock;

fn spawn(_task: impl Future + Send + 'static) {}

#[distributed_lock(key = "order:<id>", guard = lock)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    spawn(async move {
        println!("{:?}", lock.fence());
    });
    Ok(())
}

fn main() {}
