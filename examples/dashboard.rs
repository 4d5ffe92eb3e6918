//! A page of the locks, beside workers that settle orders. Several instances on one Redis show their own locks, and look
//! up any key.
//!
//! ```text
//! cargo run --example dashboard                                   # then open http://127.0.0.1:8080/locks
//! cargo run --example dashboard -- redis://127.0.0.1:6379 8081
//! ```

use std::time::Duration;

use axum::Router;
use lock_runtime::web::LocksPage;
use lock_runtime::{LockError, distributed_lock};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Each order is settled by one worker at a time; the others wait.
#[distributed_lock(key = "order:<id>", ttl = "5s", wait = "30s", guard = lock)]
async fn settle(id: u64) -> Result<(), LockError> {
    let _fence = lock.fence();
    tokio::time::sleep(Duration::from_millis(500 + 300 * id)).await;
    Ok(())
}

/// One at a time in the fleet.
#[distributed_lock(key = "report:daily", ttl = "10s", wait = "5m")]
async fn report() -> Result<(), LockError> {
    tokio::time::sleep(Duration::from_secs(8)).await;
    Ok(())
}

#[tokio::main]
#[allow(clippy::disallowed_methods)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://".to_owned());
    let port: u16 = args.next().map_or(Ok(8080), |port| port.parse())?;
    lock_runtime::init(&url).await?;

    let mut workers = JoinSet::new();
    for worker in 0..12 {
        workers.spawn(async move {
            // Ends with the pool.
            while settle(worker % 5).await.is_ok() {}
        });
    }
    for _ in 0..2 {
        workers.spawn(async { while report().await.is_ok() {} });
    }

    // For operators alone: keys are shown in full.
    let routes = Router::new().nest("/locks", LocksPage::new().into_router());
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("open http://{}/locks", listener.local_addr()?);
    let served = lock_runtime::serve(Duration::from_secs(1), |stopped| {
        axum::serve(listener, routes).with_graceful_shutdown(stopped)
    })
    .await?;
    println!("{:?}", served.locks);
    Ok(())
}
