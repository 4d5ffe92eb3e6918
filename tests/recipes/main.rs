//! The pin in a transaction of each library that the chapters on PostgreSQL and MySQL name.

#[macro_use]
mod both;
mod mysql;
mod postgres;

use std::error::Error;

use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, Wait};
use lock_tests::prelude::*;
use lock_tests::{SqlServer, eventually_async};

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

/// The write of the transaction.
const PAY: &str = "UPDATE orders SET state = 'paid' WHERE id = 42";

/// A holder.
trait Holder: Send + Sync + 'static {
    /// The pin of its transaction.
    fn pin_sql(&self) -> Result<String, LockError>;
}

impl Holder for LockGuard {
    fn pin_sql(&self) -> Result<String, LockError> {
        Self::pin_sql(self)
    }
}

/// A holder that was stopped behind its call of `pin_sql`.
#[derive(Debug)]
struct Frozen(String);

impl Holder for Frozen {
    fn pin_sql(&self) -> Result<String, LockError> {
        Ok(self.0.clone())
    }
}

/// A lease expires while its holder is frozen, and the lock is granted again. The transaction of the former holder is refused
/// with a text that contains `told`, and leaves nothing. That of the next one is committed.
async fn a_stale_holder_is_refused<F, S>(
    server: SqlServer,
    told: &str,
    pay: fn(String, Frozen) -> F,
    pay_under: fn(String, LockGuard) -> S,
) where
    F: Future<Output = Outcome>,
    S: Future<Output = Outcome>,
{
    let mut session = server.session().await;
    session.run("CREATE TABLE orders (id bigint PRIMARY KEY, state varchar(16))").await;
    session.run("INSERT INTO orders VALUES (42, 'new')").await;
    let url = format!("{}&pin=on", server.url());
    let pool = async || {
        LockPool::builder(&url).ttl(ms(20_000)).wait(Wait::Forever).connect().await.unwrap()
    };
    let (pool, other) = (pool().await, pool().await);
    let former = pool.lock("order:42").ttl(ms(500)).renew(false).acquire().await.unwrap();
    let frozen = Frozen(former.pin_sql().unwrap());
    let next = within(DEADLINE, "the next grant", other.lock("order:42").acquire()).await.unwrap();
    eventually_async(DEADLINE, "the former lease is over", async || !former.is_held()).await;
    assert_eq!(former.pin_sql().unwrap_err().kind(), ErrorKind::Lost);

    let database = url.split('?').next().unwrap();
    let error = pay(database.to_owned(), frozen).await.unwrap_err();
    assert!(format!("{error:?}").contains(told), "{error:?}");
    let state = "SELECT state FROM orders WHERE id = 42";
    assert_eq!(session.rows(state).await, ["new"]);
    pay_under(database.to_owned(), next).await.unwrap();
    assert_eq!(session.rows(state).await, ["paid"]);
}

/// Each line of the tables is one that runs here.
fn the_table_is_what_runs(chapter: &str, source: &str) {
    let (_, table) = chapter.split_once("| library | the pin |").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    let lines: Vec<_> = table.lines().filter_map(|row| row.split('`').nth(1)).collect();
    assert_eq!(lines.len(), 5, "{lines:?}");
    for line in lines {
        let runs = source.contains(line) || include_str!("both.rs").contains(line);
        assert!(runs, "no recipe has `{line}`");
    }
}
