use lock_runtime::distributed_lock;

#[distributed_lock(key = "a", ttl, wait = "5", colour = 3, renew = "0s", on_lost = "die")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
