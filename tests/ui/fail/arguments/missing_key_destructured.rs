use lock_runtime::distributed_lock;

#[distributed_lock()]
async fn settle(Path(order): Path) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

struct Path(u64);

fn main() {}
