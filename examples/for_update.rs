//! The form without a lock service, for comparison: `SELECT .. FOR UPDATE` of a lock row, and the writes in the same
//! transaction. They commit or vanish together, so a late write cannot happen. A process stops in the middle of its
//! transaction. The server ends its session by a time limit, the next process gets the row, and the late commit fails.
//!
//! What it costs: a connection and a transaction are open for the whole body, and each waiter blocks a connection of its own.
//! Long transactions hold back vacuum. A stopped process keeps the row until the time limit. `postgres_orders` has the
//! same guarantee with short transactions.
//!
//! ```text
//! cargo run --example for_update -- postgres://user:password@127.0.0.1:5432/database
//! ```

#![allow(clippy::disallowed_methods)]

mod stopped_process;

use std::env;
use std::time::{Duration, Instant};

use tokio_postgres::{Client, NoTls, Transaction};

use crate::stopped_process::StoppedProcess;

type Failure = Box<dyn std::error::Error>;

/// How long a session may be idle in its transaction: the lease of this form, without renewals. A body that computes for
/// longer between two statements loses its transaction too.
const IDLE: &str = "SET idle_in_transaction_session_timeout = '2s'";

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let Some(url) = env::args().nth(1) else {
        return Err("name a database: for_update postgres://user:password@host/database".into());
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
            "CREATE TABLE IF NOT EXISTS row_lock (key text PRIMARY KEY);
             CREATE TABLE IF NOT EXISTS locked_orders (id bigint PRIMARY KEY, state text NOT NULL);
             DELETE FROM locked_orders WHERE id = 42;
             INSERT INTO locked_orders VALUES (42, 'paid')",
        )
        .await?;

    let first = StoppedProcess::start(url)?;

    let began = Instant::now();
    let transaction = lock(&mut orders, "order:42").await?;
    let waited = began.elapsed();
    println!("second: got the row after {waited:.1?}, during which its connection was blocked");
    transaction.execute("UPDATE locked_orders SET state = 'shipped' WHERE id = 42", &[]).await?;
    transaction.commit().await?;
    println!("second: the transaction of `shipped` is committed");

    first.go_on()?;

    let row = orders.query_one("SELECT state FROM locked_orders WHERE id = 42", &[]).await?;
    let state: String = row.get(0);
    println!("the order is {state}");
    assert_eq!(state, "shipped");
    assert!(waited < Duration::from_secs(60));
    Ok(())
}

/// Holds the row, has written, and is stopped before the commit.
async fn stopped_holder(url: &str) -> Result<(), Failure> {
    let mut orders = connect(url).await?;
    let transaction = lock(&mut orders, "order:42").await?;
    transaction.execute("UPDATE locked_orders SET state = 'cancelled' WHERE id = 42", &[]).await?;
    println!("holds the row, and has written `cancelled`");
    std::io::stdin().read_line(&mut String::new())?;
    println!(
        "{}",
        match transaction.commit().await {
            Ok(()) => "the late commit succeeds".to_owned(),
            Err(_) => "the late commit fails: the server has ended the session".to_owned(),
        }
    );
    Ok(())
}

/// Waits for the row of `key`, and locks it until the end of the transaction.
async fn lock<'a>(orders: &'a mut Client, key: &str) -> Result<Transaction<'a>, Failure> {
    // A row has to exist before it can be locked.
    orders.execute("INSERT INTO row_lock VALUES ($1) ON CONFLICT DO NOTHING", &[&key]).await?;
    let transaction = orders.transaction().await?;
    transaction.query_one("SELECT key FROM row_lock WHERE key = $1 FOR UPDATE", &[&key]).await?;
    Ok(transaction)
}

async fn connect(url: &str) -> Result<Client, Failure> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(IDLE).await?;
    Ok(client)
}
