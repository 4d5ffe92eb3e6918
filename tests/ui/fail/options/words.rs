use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", wait = "never", renew = "off")]
async fn settle() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "a", wait = forever, renew = auto)]
async fn ship() -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
