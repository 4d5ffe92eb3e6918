//! A payment provider delivers each event at least once: again after a time-out, and to several instances at the same time. The
//! lock of an event keeps its deliveries apart, and a table of results answers the later ones.
//!
//! If the payment is a row of one database, a unique event id in its transaction is enough. The lock adds that a second
//! delivery does not even begin: no call to another system is made twice at the same time.
//!
//! ```text
//! cargo run --example idempotent_webhook [-- redis://127.0.0.1:6379]     # the locks in Redis, the ledger in this process
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};
use tokio::task::JoinSet;

const EVENTS: u64 = 50;
const DELIVERIES: u64 = 4;
/// After as many answers other than `Done`, the provider gives up.
const ATTEMPTS: usize = 1_000;

/// The response to a delivery. The provider delivers again unless it is `Done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Response {
    /// The balance after the payment of the event.
    Done(u64),
    /// Status 409: another delivery of the event is being processed.
    InProgress,
    /// Status 500: the payment has failed, or the lock was lost meanwhile.
    Failed,
    /// Status 503: there is no lock, so nothing was processed.
    Unavailable,
}

/// In place of tables in a database.
#[derive(Clone, Default)]
struct Ledger {
    balance: Arc<Mutex<u64>>,
    /// The response to each processed event.
    results: Arc<Mutex<HashMap<u64, u64>>>,
    failures: Arc<Mutex<Vec<u64>>>,
}

impl Ledger {
    async fn deliver(&self, event: u64) -> Response {
        match self.process(event).await {
            Ok(Some(balance)) => Response::Done(balance),
            Ok(None) => Response::Failed,
            Err(error) if error.is_conflict() => Response::InProgress,
            Err(error) => {
                eprintln!("event {event}: {error}");
                if error.body_started() { Response::Failed } else { Response::Unavailable }
            }
        }
    }

    /// `min_hold` is not needed: the result is written before the lock is released.
    #[distributed_lock(key = "event:<event>", ttl = "5s", wait = "0s")]
    async fn process(&self, event: u64) -> Result<Option<u64>, LockError> {
        if let Some(balance) = self.results.lock().unwrap().get(&event) {
            return Ok(Some(*balance));
        }
        // The payment takes a round trip, and each tenth event fails the first time.
        tokio::time::sleep(Duration::from_millis(2)).await;
        if event.is_multiple_of(10) && !self.failures.lock().unwrap().contains(&event) {
            self.failures.lock().unwrap().push(event);
            return Ok(None);
        }
        let mut balance = self.balance.lock().unwrap();
        *balance += 1;
        self.results.lock().unwrap().insert(event, *balance);
        Ok(Some(*balance))
    }
}

/// Delivers `event` until it is done, as a provider does.
async fn provider(ledger: Ledger, event: u64) -> Result<(u64, u64, usize), String> {
    for attempt in 1..=ATTEMPTS {
        match ledger.deliver(event).await {
            Response::Done(balance) => return Ok((event, balance, attempt)),
            Response::InProgress | Response::Failed | Response::Unavailable => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    Err(format!("event {event} is not processed after {ATTEMPTS} deliveries"))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    lock_runtime::init(&url).await?;
    let outcome = deliver_all().await;
    lock_runtime::shutdown(Duration::from_secs(1)).await;
    outcome
}

async fn deliver_all() -> Result<(), Box<dyn std::error::Error>> {
    let ledger = Ledger::default();
    let mut deliveries = JoinSet::new();
    for event in 0..EVENTS {
        for _ in 0..DELIVERIES {
            deliveries.spawn(provider(ledger.clone(), event));
        }
    }
    let mut attempts = 0;
    for delivered in deliveries.join_all().await {
        let (event, balance, tried) = delivered?;
        attempts += tried;
        assert_eq!(ledger.results.lock().unwrap()[&event], balance, "each delivery has one answer");
    }
    let balance = *ledger.balance.lock().unwrap();
    println!("{attempts} deliveries of {EVENTS} events: {balance} payments");
    assert_eq!(balance, EVENTS);
    Ok(())
}
