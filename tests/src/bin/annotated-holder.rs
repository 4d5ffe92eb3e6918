//! Holds the lock `order:42` at the store of a URL by an annotated function, until it is killed. Arguments: the URL, `off` for
//! a pool that does not tell of which process it is.

use std::future::pending;

use lock_runtime::{LockError, LockPool, distributed_lock};

#[distributed_lock(key = "order:<id>", ttl = "5s", pool = pool)]
async fn hold(pool: &LockPool, id: u32) -> Result<(), LockError> {
    println!("ready");
    let _ = (pool, id);
    pending().await
}

#[tokio::main]
async fn main() -> Result<(), LockError> {
    let mut args = std::env::args().skip(1);
    let builder = LockPool::builder(args.next().unwrap_or_default());
    let tells = args.next().as_deref() != Some("off");
    let pool = builder.owner_info(tells).connect().await?;
    hold(&pool, 42).await
}
