use lock_runtime::distributed_lock;

fn report(_: String) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

#[distributed_lock(key = "order:<id>", on_error = report)]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    Ok(())
}

fn main() {}
