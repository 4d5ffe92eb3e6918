//! SIGTERM while locks are held: short jobs finish, long ones are cancelled after the grace period, and every lock is
//! immediately free for other processes.
//!
//! ```text
//! cargo run --example graceful_shutdown [-- redis://127.0.0.1:6379]        # signals itself
//! cargo run --example graceful_shutdown -- redis://127.0.0.1:6379 wait     # waits for Ctrl-C or SIGTERM
//! ```

use std::sync::Arc;
use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};
use tokio::sync::Barrier;

#[distributed_lock(key = "job:<name>", ttl = "30s")]
async fn job(name: &str, takes: Duration, all_hold: &Barrier) -> Result<(), LockError> {
    println!("{name}: started");
    all_hold.wait().await;
    tokio::time::sleep(takes).await;
    println!("{name}: finished");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), LockError> {
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://".to_owned());
    let waits = args.next().is_some_and(|arg| arg == "wait");
    lock_runtime::init(&url).await?;

    // Passed by three jobs, and by the signal.
    let all_hold = Arc::new(Barrier::new(4));
    let mut jobs = tokio::task::JoinSet::new();
    for (name, millis) in [("short", 1_500), ("long", 60_000), ("longer", 90_000)] {
        let (takes, all_hold) = (Duration::from_millis(millis), all_hold.clone());
        jobs.spawn(async move { (name, job(name, takes, &all_hold).await) });
    }
    let signal = async {
        all_hold.wait().await;
        if !waits {
            signal_myself().await;
        }
    };

    // Polled first, so it listens when the signal comes.
    let shutdown = lock_runtime::shutdown_on_signal(Duration::from_secs(3));
    let (report, ()) = tokio::join!(shutdown, signal);
    let report = report?;
    println!("{} locks released, {} left to their ttl", report.released, report.abandoned);
    for (name, outcome) in jobs.join_all().await {
        match outcome {
            Ok(()) => println!("{name}: done"),
            Err(error) => println!("{name}: stopped: {error}"),
        }
    }
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
