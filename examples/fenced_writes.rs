//! A process stops while it holds a lock, as in a pause of its machine. Its lease expires, another process gets the lock and
//! writes. Then the first one continues and writes too late. The table compares fences and refuses this write.
//!
//! ```text
//! cargo run --example fenced_writes -- postgres://user:password@127.0.0.1:5432/database
//! ```

mod stopped_process;

use std::env;
use std::time::Duration;

use lock_runtime::{Fence, LockPool};
use tokio_postgres::{Client, NoTls};

use crate::stopped_process::StoppedProcess;

type Failure = Box<dyn std::error::Error>;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS orders (
    id bigint PRIMARY KEY, state text NOT NULL, fence bigint NOT NULL)";

/// Refuses a fence below that of the row. Equal ones pass: a holder may write more than once.
const WRITE: &str = "INSERT INTO orders AS o (id, state, fence) VALUES (42, $1, $2)
    ON CONFLICT (id) DO UPDATE SET state = excluded.state, fence = excluded.fence
    WHERE o.fence <= excluded.fence";

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let Some(url) = env::args().nth(1) else {
        return Err("name a database: fenced_writes postgres://user:password@host/database".into());
    };
    match env::args().nth(2).as_deref() {
        None => two_processes(&url).await,
        Some(_) => stopped_holder(&url).await,
    }
}

async fn two_processes(url: &str) -> Result<(), Failure> {
    let orders = connect(url).await?;
    orders.batch_execute(TABLE).await?;
    orders.execute("DELETE FROM orders WHERE id = 42", &[]).await?;

    let first = StoppedProcess::start(url)?;

    let pool = LockPool::connect(&locks(url)).await?;
    let lock = pool.lock("order:42").wait(Duration::from_secs(60)).acquire().await?;
    let fence = lock.fence().ok_or("a lock has a fence by default")?;
    println!("second: got the lock after the lease of the first had expired, fence {fence}");
    println!("second: {}", write(&orders, "shipped", fence).await?);
    lock.release().await?;

    first.go_on()?;

    let row = orders.query_one("SELECT state FROM orders WHERE id = 42", &[]).await?;
    let state: String = row.get(0);
    println!("the order is {state}");
    assert_eq!(state, "shipped");
    pool.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

/// Gets the lock, is stopped, and writes as soon as it continues, without checking whether the lease is still valid.
async fn stopped_holder(url: &str) -> Result<(), Failure> {
    let orders = connect(url).await?;
    let pool = LockPool::connect(&locks(url)).await?;
    let lock = pool.lock("order:42").ttl(Duration::from_secs(2)).acquire().await?;
    let fence = lock.fence().ok_or("a lock has a fence by default")?;
    println!("got the lock, fence {fence}");
    // In place of a computation between the last check of the lock and the write.
    std::io::stdin().read_line(&mut String::new())?;
    println!("{}", write(&orders, "cancelled", fence).await?);
    Ok(())
}

async fn write(orders: &Client, state: &str, fence: Fence) -> Result<String, Failure> {
    let written = orders.execute(WRITE, &[&state, &fence.as_i64()]).await?;
    Ok(match written {
        0 => format!("the write of `{state}` is refused: its fence {fence} is stale"),
        _ => format!("the write of `{state}` is accepted"),
    })
}

async fn connect(url: &str) -> Result<Client, Failure> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// The locks are in the same database.
fn locks(url: &str) -> String {
    format!("{url}?create=on")
}
