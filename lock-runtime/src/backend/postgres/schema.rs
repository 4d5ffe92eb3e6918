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
    /// Below [`STATEMENTS`], and unique to this statement.
    pub(crate) number: usize,
    pub(crate) text: String,
    /// The same statement for leases without the column `info`, if this one names it.
    pub(crate) without_info: Option<Box<Self>>,
}

/// How many statements there are.
pub(crate) const STATEMENTS: usize = 19;

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
    pub(crate) list: Sql,
    pub(crate) locked: Sql,
    pub(crate) sweep: Sql,
    pub(crate) settings: Sql,
    tables: String,
    check: String,
    /// Whether a grant raises the fence in its table.
    pub(crate) pins: Pins,
}

impl Statements {
    pub(crate) fn new(names: TableNames<'_>) -> Self {
        let named = |text: &str| names.apply(text);
        let sql = |number, text: &str| Sql { number, text: named(text), without_info: None };
        let with_info = |number, plain: usize, text: &str| {
            let text_without = names.without_info().apply(text);
            let plain = Sql { number: plain, text: text_without, without_info: None };
            Sql { without_info: Some(Box::new(plain)), ..sql(number, text) }
        };
        Self {
            acquire: with_info(0, 14, include_str!("sql/acquire.sql")),
            lock_rows: sql(1, include_str!("sql/lock_rows.sql")),
            enqueue: with_info(2, 15, include_str!("sql/enqueue.sql")),
            add_rows: sql(3, include_str!("sql/add_rows.sql")),
            acquire_all: with_info(4, 16, include_str!("sql/acquire_all.sql")),
            renew: sql(5, include_str!("sql/renew.sql")),
            renew_rest: sql(6, &include_str!("sql/renew.sql").replace(" SKIP LOCKED", "")),
            release: sql(7, include_str!("sql/release.sql")),
            hand_off: sql(8, include_str!("sql/hand_off.sql")),
            is_held: sql(9, include_str!("sql/is_held.sql")),
            inspect: with_info(10, 17, include_str!("sql/inspect.sql")),
            sweep: sql(11, include_str!("sql/sweep.sql")),
            settings: sql(12, include_str!("sql/settings.sql")),
            list: sql(13, include_str!("sql/list.sql")),
            locked: sql(18, include_str!("sql/locked.sql")),
            tables: named(TABLES),
            check: named(include_str!("sql/check.sql")),
            pins: names.pins,
        }
    }

    /// Fails if a table or a column is missing.
    pub(crate) async fn check_tables(&self, client: &Client) -> Result<(), Error> {
        client.batch_execute(&self.check).await
    }

    /// Makes the tables that are missing.
    pub(crate) async fn create_tables(&self, client: &Client) -> Result<(), Error> {
        // The limits of the session are for locks. Another process may take longer to make its tables. Servers before version 13
        // have one limit for all statements of a message, counted from its start.
        client
            .batch_execute(
                "BEGIN; SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = '5s'",
            )
            .await?;
        // Two processes that make the same table at the same time would both find it missing.
        let text =
            format!("SELECT pg_advisory_xact_lock(7813247910623541111); {} COMMIT", self.tables);
        let made = client.batch_execute(&text).await;
        if made.is_err() {
            client.batch_execute("ROLLBACK").await?;
        }
        made
    }
}
