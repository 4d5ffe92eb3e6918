//! A page with the locks and their metrics, beside workers that settle orders. Several instances on one Redis show their own
//! locks, and look up any key.
//!
//! ```text
//! cargo add lock-runtime --features axum,metrics                    # in another program
//! cargo run --example dashboard                                   # then open http://127.0.0.1:8080/locks
//! cargo run --example dashboard -- redis://127.0.0.1:6379 8081
//! ```
//!
//! The folder `dashboard` has a configuration for Prometheus that scrapes port 8080, its alert rules with tests, and
//! `grafana.json`, a dashboard to import into Grafana.
//!
//! ```text
//! prometheus --config.file=examples/dashboard/prometheus.yml \
//!     --storage.tsdb.path=target/prometheus --web.listen-address=127.0.0.1:9091
//! promtool test rules examples/dashboard/alerts_test.yml
//! ```

use std::io;
use std::time::Duration;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use lock_runtime::web::LocksPage;
use lock_runtime::{ErrorKind, LockError, distributed_lock};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing_subscriber::filter::LevelFilter;

/// Upper bounds in seconds, for round trips, waits and holds. Without any, each instance exports quantiles of its own, which
/// cannot be combined.
const BUCKETS: [f64; 17] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0,
    60.0, 300.0,
];

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

/// Repeats a call until the pool is closed. The metrics count what else went wrong.
async fn repeat<F: Future<Output = Result<(), LockError>>>(call: impl Fn() -> F) {
    loop {
        match call().await {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::PoolClosed => return,
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
}

/// Sorts the measured times into the buckets. Between two scrapes, or without any, they would fill the memory.
async fn keep_up(metrics: PrometheusHandle) {
    let mut ticks = tokio::time::interval(Duration::from_secs(5));
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}

#[tokio::main]
#[allow(clippy::disallowed_methods)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Standard error gets the warnings: lost locks, a store that is down.
    tracing_subscriber::fmt().with_max_level(LevelFilter::WARN).with_writer(io::stderr).init();
    let mut args = std::env::args().skip(1);
    let url = args.next().unwrap_or_else(|| "memory://".to_owned());
    let port: u16 = args.next().map_or(Ok(8080), |port| port.parse())?;

    // Before the pool: its metrics then exist from the start, at zero.
    let metrics = PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()?;
    lock_runtime::init(&url).await?;

    let mut tasks = JoinSet::new();
    tasks.spawn(keep_up(metrics.clone()));
    for worker in 0..12 {
        tasks.spawn(repeat(move || settle(worker % 5)));
    }
    for _ in 0..2 {
        tasks.spawn(repeat(report));
    }

    // For operators only: keys are shown in full.
    let routes = Router::new().nest("/locks", LocksPage::new().into_router());
    // No metric has a key.
    let scrape =
        move || async move { ([(CONTENT_TYPE, "text/plain; version=0.0.4")], metrics.render()) };
    let routes = routes.route("/metrics", get(scrape));

    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let address = listener.local_addr()?;
    println!("open http://{address}/locks");
    println!("scrape http://{address}/metrics");
    let served = lock_runtime::serve(Duration::from_secs(1), |stopped| {
        axum::serve(listener, routes).with_graceful_shutdown(stopped)
    })
    .await?;
    println!("{:?}", served.locks);
    served.output.transpose()?;
    Ok(())
}
