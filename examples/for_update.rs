//! The form without a lock service, for comparison: `SELECT .. FOR UPDATE` of a lock row, and the writes in the same
//! transaction. They commit or vanish together, so a late write cannot happen. A process stops in the middle of its
//! transaction. The server ends its session by a time limit, the next process gets the row, and the late commit fails.
//!
//! What it costs: a connection and a transaction are open for the whole body, and each waiter blocks a connection of its own.
//! Long transactions hold back vacuum. A stopped process keeps the row until the time limit. `postgres_orders` has the
//! same guarantee with short transactions.
//!
//! Use a scratch database. The example makes tables of its own and drops them.
//!
//! ```text
//! cargo run --example for_update -- postgres://user:password@127.0.0.1:5432/database
//! ```

#![allow(clippy::disallowed_methods)]

mod stopped_process;

use std::env;
use std::time::Instant;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls, Transaction};

use crate::stopped_process::StoppedProcess;

type Failure = Box<dyn std::error::Error>;

/// How long a session may be idle in its transaction: the lease of this form, without renewals. A body that computes for
/// longer between two statements loses its transaction too.
const IDLE: &str = "SET idle_in_transaction_session_timeout = '2s'";

/// How long a transaction waits for a row: the error has SQLSTATE 55P03.
const WAIT: &str = "SET LOCAL lock_timeout = '60s'";

const TABLES: &str = "DROP TABLE IF EXISTS lock_example_rows, lock_example_locked_orders;
    CREATE TABLE lock_example_rows (key text PRIMARY KEY);
    CREATE TABLE lock_example_locked_orders (id bigint PRIMARY KEY, state text NOT NULL);
    INSERT INTO lock_example_locked_orders VALUES (42, 'paid')";
const UPDATE: &str = "UPDATE lock_example_locked_orders SET state = $1 WHERE id = 42";
const READ: &str = "SELECT state FROM lock_example_locked_orders WHERE id = 42";

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
    orders.batch_execute(TABLES).await?;

    let first = StoppedProcess::start(url)?;

    let began = Instant::now();
    let transaction = lock(&mut orders, "order:42").await?;
    let waited = began.elapsed();
    println!("second: got the row after {waited:.1?}, during which its connection was blocked");
    write(&transaction, "shipped").await?;
    transaction.commit().await?;
    println!("second: the transaction of `shipped` is committed");

    first.go_on()?;

    let state: String = orders.query_one(READ, &[]).await?.get(0);
    println!("the order is {state}");
    assert_eq!(state, "shipped");
    orders.batch_execute("DROP TABLE lock_example_rows, lock_example_locked_orders").await?;
    Ok(())
}

/// Holds the row, has written, and is stopped before the commit.
async fn stopped_holder(url: &str) -> Result<(), Failure> {
    let mut orders = connect(url).await?;
    let transaction = lock(&mut orders, "order:42").await?;
    write(&transaction, "cancelled").await?;
    println!("holds the row, and has written `cancelled`");
    std::io::stdin().read_line(&mut String::new())?;
    match transaction.commit().await {
        Ok(()) => Err("the late commit succeeds".into()),
        Err(error) if has_ended(&error) => {
            println!("the late commit fails: the server has ended the session");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// The server's last message is the answer to the commit, or it has ended the connection before, with a text of its own.
fn has_ended(error: &tokio_postgres::Error) -> bool {
    error.is_closed() || error.code() == Some(&SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT)
}

async fn write(transaction: &Transaction<'_>, state: &str) -> Result<(), Failure> {
    match transaction.execute(UPDATE, &[&state]).await? {
        1 => Ok(()),
        _ => Err("there is no order 42".into()),
    }
}

/// Waits for the row of `key`, and locks it until the end of the transaction.
async fn lock<'a>(orders: &'a mut Client, key: &str) -> Result<Transaction<'a>, Failure> {
    // A row has to exist before it can be locked.
    let insert = "INSERT INTO lock_example_rows VALUES ($1) ON CONFLICT DO NOTHING";
    orders.execute(insert, &[&key]).await?;
    let transaction = orders.transaction().await?;
    transaction.batch_execute(WAIT).await?;
    let select = "SELECT key FROM lock_example_rows WHERE key = $1 FOR UPDATE";
    transaction.query_one(select, &[&key]).await?;
    Ok(transaction)
}

async fn connect(url: &str) -> Result<Client, Failure> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(async {
        if let Err(error) = connection.await {
            eprintln!("the connection to the database has ended: {error:?}");
        }
    });
    client.batch_execute(IDLE).await?;
    Ok(client)
}
