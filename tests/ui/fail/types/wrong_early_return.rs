use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: u64) -> Result<u64, lock_runtime::LockError> {
    if id == 0 {
        return "zero";
    }
    Ok(id)
}

fn main() {}
