//! SIGTERM while locks are held: short jobs finish, long ones are cancelled after the grace period, and every lock is
//! immediately free for other processes.
//!
//! ```text
//! cargo run --example graceful_shutdown [-- redis://127.0.0.1:6379]        # signals itself
//! cargo run --example graceful_shutdown -- redis://127.0.0.1:6379 wait     # waits for Ctrl-C or SIGTERM
//! ```

use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};

#[distributed_lock(key = "job:<name>", ttl = "30s")]
async fn job(name: &str, takes: Duration) -> Result<(), LockError> {
    println!("{name}: started");
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

    let mut jobs = tokio::task::JoinSet::new();
    for (name, millis) in [("short", 600), ("long", 60_000), ("longer", 90_000)] {
        jobs.spawn(async move { (name, job(name, Duration::from_millis(millis)).await) });
    }
    if !waits {
        tokio::spawn(signal_myself());
    }

    let report = lock_runtime::shutdown_on_signal(Duration::from_secs(1)).await?;
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
    tokio::time::sleep(Duration::from_millis(300)).await;
    let kill = tokio::process::Command::new("kill")
        .args(["-TERM", &std::process::id().to_string()])
        .status();
    if !kill.await.is_ok_and(|status| status.success()) {
        println!("no `kill` here; press Ctrl-C");
    }
}
