//! Holds locks at the store of the given URL, prints `ready`, and shuts down at a signal: prints the
//! report, and how the bodies ended. For the test of `shutdown_on_signal`.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use lock_runtime::{LockError, OnLost};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<(), LockError> {
    let url = std::env::args().nth(1).unwrap_or_default();
    let pool = lock_runtime::init(&url).await?;
    let inside = Arc::new(Barrier::new(22));
    let guard = pool.lock("guard").acquire().await?;
    let stubborn = pool.lock("stubborn").on_lost(OnLost::Notify);
    let stubborn_inside = inside.clone();
    tokio::spawn(stubborn.run(async move {
        stubborn_inside.wait().await;
        pending::<()>().await;
    }));
    let mut bodies = JoinSet::new();
    for n in 0..20 {
        let (inside, probe) = (inside.clone(), pool.clone());
        bodies.spawn(pool.lock(format!("body:{n}")).run(async move {
            inside.wait().await;
            if n % 2 == 1 {
                pending::<()>().await;
            }
            // Ends within the grace, and not before the shutdown begins. The guard holds this lock, so the probe takes
            // nothing.
            while probe.lock("guard").try_acquire().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }));
    }
    inside.wait().await;
    println!("ready");
    let report = lock_runtime::shutdown_on_signal(Duration::from_secs(3)).await?;
    let ended = bodies.join_all().await;
    let (done, stopped): (Vec<_>, Vec<_>) = ended.into_iter().partition(Result::is_ok);
    println!("{} released, {} abandoned", report.released, report.abandoned);
    println!("{} done, {} stopped, guard held: {}", done.len(), stopped.len(), guard.is_held());
    Ok(())
}
