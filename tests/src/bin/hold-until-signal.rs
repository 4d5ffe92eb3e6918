//! Holds a number of locks at the store of a URL, prints `ready`, and shuts down at a signal: prints the report, and how
//! the bodies ended. Arguments: the URL, how many bodies, their ttl in milliseconds. For tests of
//! `shutdown_on_signal`, and of a holder that is killed.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use lock_runtime::{LockError, LockPool, OnLost};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<(), LockError> {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_default();
    let mut number = || args.next().and_then(|number| number.parse::<u64>().ok());
    let (count, ttl) = (number().unwrap_or(20), number().unwrap_or(30_000));
    let pool = LockPool::builder(&url).ttl(Duration::from_millis(ttl)).connect().await?;
    lock_runtime::install("default", pool.clone())?;
    let inside = Arc::new(Barrier::new(count as usize + 2));
    let guard = pool.lock("guard").acquire().await?;
    let stubborn = pool.lock("stubborn").on_lost(OnLost::Notify);
    let stubborn_inside = inside.clone();
    tokio::spawn(stubborn.run(async move {
        stubborn_inside.wait().await;
        pending::<()>().await;
    }));
    let mut bodies = JoinSet::new();
    for n in 0..count {
        let (inside, probe) = (inside.clone(), pool.clone());
        bodies.spawn(pool.lock(format!("body:{n}")).run(async move {
            inside.wait().await;
            if n % 2 == 1 || n >= 20 {
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
