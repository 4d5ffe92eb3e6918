//! Locks and orders are in one database. A process stops while it holds a lock, as in a pause of its machine. Its lease
//! expires, and another process gets the lock and commits. Then the first one continues: its transaction is pinned to its grant,
//! so it cannot commit. No column of the orders has a fence, and no write compares one.
//!
//! Use a scratch database. The example makes a table of its own and drops it; the tables of the locks stay.
//!
//! ```text
//! cargo add lock-runtime --features postgres     # in another program
//! cargo run --example postgres_orders -- postgres://user:password@127.0.0.1:5432/database
//! ```

mod stopped_process;

use std::env;
use std::time::Duration;

use lock_runtime::{LockError, LockGuard, LockPool};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

use crate::stopped_process::StoppedProcess;

type Failure = Box<dyn std::error::Error>;

const TABLE: &str = "DROP TABLE IF EXISTS lock_example_pinned_orders;
    CREATE TABLE lock_example_pinned_orders (id bigint PRIMARY KEY, state text NOT NULL);
    INSERT INTO lock_example_pinned_orders VALUES (42, 'paid')";
const UPDATE: &str = "UPDATE lock_example_pinned_orders SET state = $1 WHERE id = 42";
const READ: &str = "SELECT state FROM lock_example_pinned_orders WHERE id = 42";

#[derive(Debug, thiserror::Error)]
enum WriteError {
    /// The lock was granted again. Has the SQLSTATE of the pin.
    #[error("the lock is lost: SQLSTATE {0}")]
    Stale(String),
    #[error("there is no order 42")]
    NoOrder,
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Database(#[from] tokio_postgres::Error),
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let Some(url) = env::args().nth(1) else {
        return Err(
            "name a database: postgres_orders postgres://user:password@host/database".into()
        );
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
    let mut orders = connect(url).await?;
    orders.batch_execute(TABLE).await?;

    let first = StoppedProcess::start(url)?;

    let lock = pool.lock("order:42").wait(Duration::from_secs(60)).acquire().await?;
    println!("second: got the lock after the lease of the first had expired");
    write(&mut orders, &lock, "shipped", || {}).await?;
    println!("second: the transaction of `shipped` is committed");
    lock.release().await?;

    first.go_on()?;

    let state: String = orders.query_one(READ, &[]).await?.get(0);
    println!("the order is {state}");
    assert_eq!(state, "shipped");
    orders.batch_execute("DROP TABLE lock_example_pinned_orders").await?;
    Ok(())
}

/// Gets the lock and is stopped between its decision and its transaction.
async fn stopped_holder(url: &str, pool: &LockPool) -> Result<(), Failure> {
    let mut orders = connect(url).await?;
    let lock = pool.lock("order:42").ttl(Duration::from_secs(2)).acquire().await?;
    let stop = || {
        println!("got the lock, and decides to cancel the order");
        let _ = std::io::stdin().read_line(&mut String::new());
    };
    match write(&mut orders, &lock, "cancelled", stop).await {
        Ok(()) => Err("the late transaction of `cancelled` is committed".into()),
        Err(WriteError::Stale(code)) => {
            println!("the transaction of `cancelled` is refused with SQLSTATE {code}");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Changes the order in a transaction that is pinned to the grant of `lock`.
async fn write(
    orders: &mut Client,
    lock: &LockGuard,
    state: &str,
    stop: impl FnOnce(),
) -> Result<(), WriteError> {
    let pin = lock.pin_sql()?;
    stop();
    let transaction = orders.transaction().await?;
    // The one line that a transaction needs. Dropped after an error, the transaction is rolled back.
    transaction.batch_execute(&pin).await.map_err(refusal)?;
    if transaction.execute(UPDATE, &[&state]).await? != 1 {
        return Err(WriteError::NoOrder);
    }
    Ok(transaction.commit().await?)
}

/// 40001 instead of LK001 may come from a transaction at `REPEATABLE READ` or `SERIALIZABLE`.
fn refusal(error: tokio_postgres::Error) -> WriteError {
    match error.code().map(SqlState::code) {
        Some(code @ ("LK001" | "40001")) => WriteError::Stale(code.to_owned()),
        _ => error.into(),
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
    format!("{url}{separator}create=on&pin=on")
}
