//! One annotated function, called from several tasks at once: at most one of them is inside per order.
//!
//! ```text
//! cargo run --example quickstart                            # no server needed
//! cargo run --example quickstart -- redis://127.0.0.1:6379  # the same among processes
//! ```

use std::time::{Duration, Instant};

use lock_runtime::{LockError, distributed_lock};

/// Settles an order. Never runs twice at a time for the same id, whichever task or process calls it.
#[distributed_lock(key = "order:<id>", ttl = "5s", wait = "10s")]
async fn settle(id: u64, who: &str, began: Instant) -> Result<(), LockError> {
    println!("{:>6.1?}  {who} is in  order {id}", began.elapsed());
    tokio::time::sleep(Duration::from_millis(100)).await;
    println!("{:>6.1?}  {who} is out of order {id}", began.elapsed());
    Ok(())
}

#[tokio::main]
#[allow(clippy::disallowed_methods)]
async fn main() -> Result<(), LockError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    lock_runtime::init(&url).await?;

    let began = Instant::now();
    let mut calls = tokio::task::JoinSet::new();
    for (id, who) in [(1, "anna"), (1, "ben"), (2, "cora"), (1, "dan"), (2, "eve")] {
        calls.spawn(settle(id, who, began));
    }
    // One order after another for the same id, both orders side by side.
    for outcome in calls.join_all().await {
        outcome?;
    }

    lock_runtime::shutdown(Duration::from_secs(1)).await;
    Ok(())
}
