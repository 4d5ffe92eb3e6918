//! The tables of the locks, and the statements on them.

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use crate::backend::sql::tables::{Pins, TableNames};

/// What to do where the tables are missing.
pub(crate) const REMEDY: &str = "run the statements in `docs/postgres.md` as the owner of the schema, or add `?create=on` to the URL of a user that may create tables";

/// What to do where the table of the fences is missing.
pub(crate) const FENCE_REMEDY: &str = "`?pin=on` needs one more table: run `CREATE TABLE lock_fence (key bytea PRIMARY KEY, fence bigint NOT NULL)` as the owner of the schema, with the prefix of `?table=`, or add `?create=on` to the URL of a user that may create tables";

/// The statements that make the tables.
const TABLES: &str = include_str!("sql/schema.sql");

/// A statement.
#[derive(Debug)]
pub(crate) struct Sql {
    /// Below [`STATEMENTS`]; no other statement has it.
    pub(crate) number: usize,
    pub(crate) text: String,
}

/// How many statements there are.
pub(crate) const STATEMENTS: usize = 13;

/// A value of a statement, and its type.
pub(crate) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

pub(crate) type Parameters<'a> = Vec<Parameter<'a>>;

/// The statements of the store, with the names of its tables.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) acquire: Sql,
    pub(crate) lock_rows: Sql,
    pub(crate) enqueue: Sql,
    pub(crate) add_rows: Sql,
    pub(crate) acquire_all: Sql,
    pub(crate) renew: Sql,
    pub(crate) renew_rest: Sql,
    pub(crate) release: Sql,
    pub(crate) hand_off: Sql,
    pub(crate) is_held: Sql,
    pub(crate) inspect: Sql,
    pub(crate) sweep: Sql,
    pub(crate) settings: Sql,
    tables: String,
    check: String,
    has_info: String,
    add_info: String,
    /// Whether a grant raises the fence in its table.
    pub(crate) pins: Pins,
}

impl Statements {
    pub(crate) fn new(names: TableNames<'_>) -> Self {
        let named = |text: &str| names.apply(text);
        let sql = |number, text: &str| Sql { number, text: named(text) };
        Self {
            acquire: sql(0, include_str!("sql/acquire.sql")),
            lock_rows: sql(1, include_str!("sql/lock_rows.sql")),
            enqueue: sql(2, include_str!("sql/enqueue.sql")),
            add_rows: sql(3, include_str!("sql/add_rows.sql")),
            acquire_all: sql(4, include_str!("sql/acquire_all.sql")),
            renew: sql(5, include_str!("sql/renew.sql")),
            renew_rest: sql(6, &include_str!("sql/renew.sql").replace(" SKIP LOCKED", "")),
            release: sql(7, include_str!("sql/release.sql")),
            hand_off: sql(8, include_str!("sql/hand_off.sql")),
            is_held: sql(9, include_str!("sql/is_held.sql")),
            inspect: sql(10, include_str!("sql/inspect.sql")),
            sweep: sql(11, include_str!("sql/sweep.sql")),
            settings: sql(12, include_str!("sql/settings.sql")),
            tables: named(TABLES),
            check: named(include_str!("sql/check.sql")),
            has_info: named(include_str!("sql/has_info.sql")),
            add_info: named(include_str!("sql/add_info.sql")),
            pins: names.pins,
        }
    }

    /// Fails if a table or a column is missing.
    pub(crate) async fn check_tables(&self, client: &Client) -> Result<(), Error> {
        client.batch_execute(&self.check).await
    }

    /// Makes the tables that are missing.
    pub(crate) async fn create_tables(&self, client: &Client) -> Result<(), Error> {
        // Two processes that make one table at the same time would both find it missing.
        let text = format!(
            "BEGIN; SELECT pg_advisory_xact_lock(7813247910623541111); {} COMMIT",
            self.tables
        );
        in_transaction(client, &text).await
    }

    /// Whether the leases have the column `info`. If it is missing, it is added if that is `allowed` and at once possible.
    pub(crate) async fn has_info(&self, client: &Client, allowed: bool) -> Result<bool, Error> {
        let is_there = async || client.query_typed_one(&self.has_info, &[]).await?.try_get(0);
        if is_there().await? {
            return Ok(true);
        }
        if !allowed {
            return Ok(false);
        }
        match in_transaction(client, &self.add_info).await {
            // Locks work without it.
            Err(error) if error.as_db_error().is_none() => Err(error),
            _ => is_there().await,
        }
    }
}

/// Runs `text`, which begins and commits. An error leaves the connection without a transaction.
async fn in_transaction(client: &Client, text: &str) -> Result<(), Error> {
    let done = client.batch_execute(text).await;
    if done.is_err() {
        client.batch_execute("ROLLBACK").await?;
    }
    done
}
