//! A process stops while it holds a lock, as in a pause of its machine. Its lease expires, another process gets the lock and
//! writes. Then the first one continues and writes too late. The table compares fences and refuses this write.
//!
//! Use a scratch database. The example makes a table of its own and drops it; the tables of the locks stay.
//!
//! ```text
//! cargo add lock-runtime --features postgres     # in another program
//! cargo run --example fenced_writes -- postgres://user:password@127.0.0.1:5432/database
//! ```

mod stopped_process;

use std::env;
use std::time::Duration;

use lock_runtime::{Fence, LockPool};
use tokio_postgres::{Client, NoTls};

use crate::stopped_process::StoppedProcess;

type Failure = Box<dyn std::error::Error>;

/// A row is never deleted: its fence would be forgotten, and a late write would insert it again.
const TABLE: &str = "DROP TABLE IF EXISTS lock_example_fenced_orders;
    CREATE TABLE lock_example_fenced_orders (
        id bigint PRIMARY KEY, state text NOT NULL, fence bigint NOT NULL)";

/// Refuses a fence below that of the row. Equal ones pass: a holder may write more than once.
const WRITE: &str =
    "INSERT INTO lock_example_fenced_orders AS o (id, state, fence) VALUES (42, $1, $2)
    ON CONFLICT (id) DO UPDATE SET state = excluded.state, fence = excluded.fence
    WHERE o.fence <= excluded.fence";

const READ: &str = "SELECT state FROM lock_example_fenced_orders WHERE id = 42";

#[derive(Debug, thiserror::Error)]
enum WriteError {
    /// A holder with a greater fence has written.
    #[error("the fence {0} is stale")]
    Stale(Fence),
    #[error(transparent)]
    Database(#[from] tokio_postgres::Error),
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let Some(url) = env::args().nth(1) else {
        return Err("name a database: fenced_writes postgres://user:password@host/database".into());
    };
    let pool = LockPool::connect(&locks(&url)).await?;
    let outcome = match env::args().nth(2).as_deref() {
        None => two_processes(&url, &pool).await,
        Some(_) => stopped_holder(&url, &pool).await,
    };
    pool.shutdown(Duration::from_secs(1)).await;
    outcome
}

async fn two_processes(url: &str, pool: &LockPool) -> Result<(), Failure> {
    let orders = connect(url).await?;
    orders.batch_execute(TABLE).await?;

    let first = StoppedProcess::start(url)?;

    let lock = pool.lock("order:42").wait(Duration::from_secs(60)).acquire().await?;
    let fence = lock.fence().ok_or("a lock has a fence by default")?;
    println!("second: got the lock after the lease of the first had expired, fence {fence}");
    write(&orders, "shipped", fence).await?;
    println!("second: the write of `shipped` is accepted");
    lock.release().await?;

    first.go_on()?;

    let state: String = orders.query_one(READ, &[]).await?.get(0);
    println!("the order is {state}");
    assert_eq!(state, "shipped");
    orders.batch_execute("DROP TABLE lock_example_fenced_orders").await?;
    Ok(())
}

/// Gets the lock, is stopped, and writes as soon as it continues, without checking whether the lease is still valid.
async fn stopped_holder(url: &str, pool: &LockPool) -> Result<(), Failure> {
    let orders = connect(url).await?;
    let lock = pool.lock("order:42").ttl(Duration::from_secs(2)).acquire().await?;
    let fence = lock.fence().ok_or("a lock has a fence by default")?;
    println!("got the lock, fence {fence}");
    // In place of a computation between the last check of the lock and the write.
    std::io::stdin().read_line(&mut String::new())?;
    match write(&orders, "cancelled", fence).await {
        Ok(()) => Err("the late write of `cancelled` is accepted".into()),
        Err(WriteError::Stale(fence)) => {
            println!("the write of `cancelled` is refused: its fence {fence} is stale");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

async fn write(orders: &Client, state: &str, fence: Fence) -> Result<(), WriteError> {
    match orders.execute(WRITE, &[&state, &fence.as_i64()]).await? {
        0 => Err(WriteError::Stale(fence)),
        _ => Ok(()),
    }
}

async fn connect(url: &str) -> Result<Client, Failure> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(async {
        if let Err(error) = connection.await {
            eprintln!("the connection to the database has ended: {error:?}");
        }
    });
    Ok(client)
}

/// The locks are in the same database.
fn locks(url: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}create=on")
}
