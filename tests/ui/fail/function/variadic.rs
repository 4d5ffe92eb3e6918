use lock_runtime::distributed_lock;

#[distributed_lock(key = "order")]
unsafe fn settle(id: u64, _: ...) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
