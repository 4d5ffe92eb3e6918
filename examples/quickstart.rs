//! One annotated function, called from several tasks at the same time. At most one of them runs per order.
//!
//! ```text
//! cargo run --example quickstart                            # no server needed
//! cargo run --example quickstart -- redis://127.0.0.1:6379  # between processes: in two terminals at once
//! ```

use std::time::{Duration, Instant};

use lock_runtime::{LockError, distributed_lock};

/// Settles an order. At most one call per id runs at a time, among all tasks and processes.
#[distributed_lock(key = "order:<id>", ttl = "5s", wait = "10s")]
async fn settle(id: u64, customer: &str, began: Instant) -> Result<(), LockError> {
    println!("{:>6.1?}  {customer} is in  order {id}", began.elapsed());
    tokio::time::sleep(Duration::from_millis(500)).await;
    println!("{:>6.1?}  {customer} is out of order {id}", began.elapsed());
    Ok(())
}

#[tokio::main]
#[allow(clippy::disallowed_methods)]
async fn main() -> Result<(), LockError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    lock_runtime::init(&url).await?;

    let began = Instant::now();
    let mut calls = tokio::task::JoinSet::new();
    for (id, customer) in [(1, "anna"), (1, "ben"), (2, "cora"), (1, "dan"), (2, "eve")] {
        calls.spawn(settle(id, customer, began));
    }
    // Calls for the same order run one after another; calls for different orders run at the same time.
    let outcomes = calls.join_all().await;

    // Before an error is returned: a process that ends without it leaves its locks to their ttl.
    lock_runtime::shutdown(Duration::from_secs(1)).await;
    outcomes.into_iter().collect()
}
