use lock_runtime::distributed_lock;

#[distributed_lock(key = "order")]
fn settle() -> impl Future<Output = Result<(), lock_runtime::LockError>> {
    let id = 1;
    async move { Ok(drop(id)) }
}

fn main() {}
