use lock_runtime::distributed_lock;

#[distributed_lock(key = "order:<id>")]
async fn settle(id: u64) -> Result<(), lock_runtime::LockError> {
    let local = std::rc::Rc::new(id);
    std::future::ready(()).await;
    drop(local);
    Ok(())
}

fn sendable(_: impl Send) {}

fn starts() {
    sendable(settle(1));
}

fn main() {}
