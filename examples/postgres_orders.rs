//! Locks and orders are in one database. A process stops while it holds a lock, as in a pause of its machine. Its lease
//! expires, and another process gets the lock and commits. Then the first one continues: its transaction is pinned to its grant,
//! so it cannot commit. No column of the orders has a fence, and no write compares one.
//!
//! ```text
//! cargo run --example postgres_orders -- postgres://user:password@127.0.0.1:5432/database
//! ```

mod stopped_process;

use std::env;
use std::time::Duration;

use lock_runtime::{LockGuard, LockPool};
use tokio_postgres::{Client, NoTls};

use crate::stopped_process::StoppedProcess;

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let Some(url) = env::args().nth(1) else {
        return Err(
            "name a database: postgres_orders postgres://user:password@host/database".into()
        );
    };
    match env::args().nth(2).as_deref() {
        None => two_processes(&url).await,
        Some(_) => stopped_holder(&url).await,
    }
}

async fn two_processes(url: &str) -> Result<(), Failure> {
    let mut orders = connect(url).await?;
    orders
        .batch_execute(
            "CREATE TABLE IF NOT EXISTS pinned_orders (id bigint PRIMARY KEY, state text NOT NULL);
             DELETE FROM pinned_orders WHERE id = 42;
             INSERT INTO pinned_orders VALUES (42, 'paid')",
        )
        .await?;

    let first = StoppedProcess::start(url)?;

    let pool = LockPool::connect(&locks(url)).await?;
    let lock = pool.lock("order:42").wait(Duration::from_secs(60)).acquire().await?;
    println!("second: got the lock after the lease of the first had expired");
    println!("second: {}", write(&mut orders, &lock, "shipped", || {}).await?);
    lock.release().await?;

    first.go_on()?;

    let row = orders.query_one("SELECT state FROM pinned_orders WHERE id = 42", &[]).await?;
    let state: String = row.get(0);
    println!("the order is {state}");
    assert_eq!(state, "shipped");
    pool.shutdown(Duration::from_secs(1)).await;
    Ok(())
}

/// Gets the lock and is stopped between its decision and its transaction.
async fn stopped_holder(url: &str) -> Result<(), Failure> {
    let mut orders = connect(url).await?;
    let pool = LockPool::connect(&locks(url)).await?;
    let lock = pool.lock("order:42").ttl(Duration::from_secs(2)).acquire().await?;
    let stop = || {
        println!("got the lock, and decides to cancel the order");
        let _ = std::io::stdin().read_line(&mut String::new());
    };
    println!("{}", write(&mut orders, &lock, "cancelled", stop).await?);
    Ok(())
}

/// Changes the order in a transaction that is pinned to the grant of `lock`.
async fn write(
    orders: &mut Client,
    lock: &LockGuard,
    state: &str,
    stop: impl FnOnce(),
) -> Result<String, Failure> {
    let pin = lock.pin_sql()?;
    stop();
    let transaction = orders.transaction().await?;
    // The one line that a transaction needs. Dropped after an error, the transaction is rolled back.
    if let Err(error) = transaction.batch_execute(&pin).await {
        let code = error.code().map_or("none", |code| code.code());
        return Ok(format!("the transaction of `{state}` is refused with SQLSTATE {code}"));
    }
    let update = "UPDATE pinned_orders SET state = $1 WHERE id = 42";
    transaction.execute(update, &[&state]).await?;
    transaction.commit().await?;
    Ok(format!("the transaction of `{state}` is committed"))
}

async fn connect(url: &str) -> Result<Client, Failure> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// The locks are in the same database.
fn locks(url: &str) -> String {
    format!("{url}?create=on&pin=on")
}
