//! The callback of a payment provider and a cancellation arrive at the same time. Each reads the order, decides, and
//! writes it back. Without a lock both may read the old state, and an order ends up cancelled and paid.
//!
//! If the state is in one database, `UPDATE orders SET state = 'paid' WHERE id = 42 AND state = 'open'` is enough. A lock is for
//! decisions with further steps in other systems, such as a refund by the provider.
//!
//! ```text
//! cargo run --example order_state [-- redis://127.0.0.1:6379]      # the locks in Redis, the orders in this process
//! ```

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Paid,
    Cancelled,
}

/// The reason why a change was not made.
#[derive(Debug, thiserror::Error)]
enum OrderError {
    #[error("the order is already {0:?}")]
    Decided(State),
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// In place of a table of orders in a database: every read and write is a round trip.
#[derive(Clone, Debug, Default)]
struct Orders {
    rows: Arc<Mutex<Vec<State>>>,
    /// Every change, in the order in which it was written.
    journal: Arc<Mutex<Vec<(usize, State)>>>,
}

impl Orders {
    async fn load(&self, id: usize) -> State {
        tokio::task::yield_now().await;
        self.rows.lock().unwrap()[id]
    }

    async fn store(&self, id: usize, state: State) {
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.rows.lock().unwrap()[id] = state;
        self.journal.lock().unwrap().push((id, state));
    }

    async fn decide(&self, id: usize, state: State) -> Result<(), OrderError> {
        match self.load(id).await {
            State::Open => {
                self.store(id, state).await;
                Ok(())
            }
            decided => Err(OrderError::Decided(decided)),
        }
    }

    /// Called by the payment provider. Waits for a running cancellation.
    #[distributed_lock(key = "order:<id>", ttl = "5s", wait = "2s")]
    async fn paid(&self, id: usize) -> Result<(), OrderError> {
        self.decide(id, State::Paid).await
    }

    /// Called by the customer. Excludes `paid` by the same key.
    #[distributed_lock(key = "order:<id>", ttl = "5s", wait = "2s")]
    async fn cancel(&self, id: usize) -> Result<(), OrderError> {
        self.decide(id, State::Cancelled).await
    }

    /// Orders that were decided more than once.
    fn spoiled(&self) -> usize {
        let journal = self.journal.lock().unwrap();
        let orders = self.rows.lock().unwrap().len();
        (0..orders).filter(|id| journal.iter().filter(|(order, _)| order == id).count() > 1).count()
    }
}

const ORDERS: usize = 200;

#[tokio::main]
async fn main() -> Result<(), OrderError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    lock_runtime::init(&url).await?;
    let outcome = race().await;
    lock_runtime::shutdown(Duration::from_secs(1)).await;
    outcome
}

async fn race() -> Result<(), OrderError> {
    let unlocked =
        Orders { rows: Arc::new(Mutex::new(vec![State::Open; ORDERS])), ..Orders::default() };
    for id in 0..ORDERS {
        let _ =
            tokio::join!(unlocked.decide(id, State::Paid), unlocked.decide(id, State::Cancelled));
    }
    println!("without a lock {} of {ORDERS} orders were paid and cancelled", unlocked.spoiled());

    let orders =
        Orders { rows: Arc::new(Mutex::new(vec![State::Open; ORDERS])), ..Orders::default() };
    let mut late = 0;
    for id in 0..ORDERS {
        let (paid, cancelled) = tokio::join!(orders.paid(id), orders.cancel(id));
        for outcome in [paid, cancelled] {
            match outcome {
                Ok(()) => {}
                Err(OrderError::Decided(_)) => late += 1,
                Err(error) => return Err(error),
            }
        }
    }
    println!(
        "with the lock  {} of {ORDERS}; {late} callers learned that they came too late",
        orders.spoiled()
    );
    assert_eq!((orders.spoiled(), late), (0, ORDERS));
    Ok(())
}
