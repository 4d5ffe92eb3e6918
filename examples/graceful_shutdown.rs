//! SIGTERM while locks are held: short jobs finish, long ones are cancelled after the grace period, and every lock is
//! immediately free for other processes, here for a second pool.
//!
//! ```text
//! cargo run --example graceful_shutdown [-- redis://127.0.0.1:6379]        # signals itself
//! cargo run --example graceful_shutdown -- redis://127.0.0.1:6379 wait     # waits for Ctrl-C or SIGTERM
//! ```

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use lock_runtime::{LockError, LockPool, distributed_lock};
use tokio::sync::Barrier;
use tracing_subscriber::filter::LevelFilter;

const JOBS: [(&str, u64); 3] = [("short", 1_500), ("long", 60_000), ("longer", 90_000)];

#[distributed_lock(key = "job:<name>", ttl = "30s")]
async fn job(name: &str, takes: Duration, all_hold: &Barrier) -> Result<(), LockError> {
    println!("{name}: started");
    all_hold.wait().await;
    tokio::time::sleep(takes).await;
    println!("{name}: finished");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Standard error gets the warnings: lost locks, a store that is down.
    tracing_subscriber::fmt().with_max_level(LevelFilter::WARN).with_writer(io::stderr).init();
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://jobs".to_owned());
    let waits = args.next().is_some_and(|arg| arg == "wait");
    lock_runtime::init(&url).await?;
    let second_pool = LockPool::connect(&url).await?;

    // Passed by three jobs, and by the signal.
    let all_hold = Arc::new(Barrier::new(4));
    let mut jobs = tokio::task::JoinSet::new();
    for (name, millis) in JOBS {
        let (takes, all_hold) = (Duration::from_millis(millis), all_hold.clone());
        jobs.spawn(async move { (name, job(name, takes, &all_hold).await) });
    }
    let signal = async {
        all_hold.wait().await;
        if !waits {
            signal_myself().await;
        }
    };

    let mut shutdown = pin!(lock_runtime::shutdown_on_signal(Duration::from_secs(3)));
    let report = tokio::select! {
        // In this order: the shutdown listens when the signal comes.
        biased;
        report = &mut shutdown => report?,
        () = signal => shutdown.await?,
        Some(ended) = jobs.join_next() => {
            lock_runtime::shutdown(Duration::ZERO).await;
            return Err(format!("a job ended before all of them had begun: {ended:?}").into());
        }
    };
    println!("{} locks released, {} left to their ttl", report.released, report.abandoned);
    for (name, outcome) in jobs.join_all().await {
        match outcome {
            Ok(()) => println!("{name}: done"),
            Err(error) => println!("{name}: stopped: {error}"),
        }
    }
    if report.abandoned > 0 {
        return Err("a lock is left to its ttl".into());
    }
    for (name, _) in JOBS {
        let request = second_pool.lock(format!("job:{name}")).wait(Duration::ZERO);
        request.acquire().await?.release().await?;
    }
    println!("all keys are free");
    second_pool.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

async fn signal_myself() {
    let kill = tokio::process::Command::new("kill")
        .args(["-TERM", &std::process::id().to_string()])
        .status();
    if !kill.await.is_ok_and(|status| status.success()) {
        println!("no `kill` here; press Ctrl-C");
    }
}
