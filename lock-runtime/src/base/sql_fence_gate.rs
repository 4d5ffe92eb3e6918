//! The statements of a fence gate in a database.

use crate::base::sql_dialect::SqlDialect;

/// A [`FenceGate`](crate::FenceGate) as SQL: a table keeps the highest fence of each resource, and refuses lower ones. For a
/// resource that is written by several processes, with any SQL library.
///
/// The statements run in the transaction of the write, before it. The row of the resource is then locked until the commit,
/// so writes take effect in the order of their fences. An equal fence is admitted: one holder may write several times. A
/// database may abort the transaction on a deadlock, like any other. The transaction may then run again.
///
/// ```
/// use lock_runtime::{SqlDialect, SqlFenceGate};
///
/// let gate = SqlFenceGate::new(SqlDialect::Postgres);
/// println!("{}", gate.create_table()); // once, in a migration
/// for statement in gate.admit() {
///     // In the transaction, with the values ("order:42", guard.fence().as_i64()).
///     println!("{statement}");
/// }
/// // The last statement has returned a row: the write is admitted. None: it is stale, roll back.
/// ```
///
/// A lock in the same database has stronger protection: [`LockGuard::pin_sql`](crate::LockGuard::pin_sql).
#[derive(Clone, Copy, Debug)]
pub struct SqlFenceGate {
    dialect: SqlDialect,
}

impl SqlFenceGate {
    /// The gate in a database of this kind.
    #[must_use]
    pub const fn new(dialect: SqlDialect) -> Self {
        Self { dialect }
    }

    /// The statement that creates the table `fence_gate`.
    #[must_use]
    pub const fn create_table(self) -> &'static str {
        match self.dialect {
            SqlDialect::Postgres => {
                "CREATE TABLE IF NOT EXISTS fence_gate (resource text PRIMARY KEY, fence bigint NOT NULL)"
            }
            // Text would compare without trailing spaces, or without case.
            SqlDialect::MySql => {
                "CREATE TABLE IF NOT EXISTS fence_gate (resource varbinary(512) NOT NULL PRIMARY KEY, fence bigint NOT NULL) ENGINE = InnoDB"
            }
        }
    }

    /// The statements of one write, in this order. Each has two values: the name of the resource, and the fence as a
    /// `bigint` ([`Fence::as_i64`](crate::Fence::as_i64)).
    ///
    /// The write is admitted if the last one returns a row. Otherwise a later holder has written, and the transaction must
    /// be rolled back.
    #[must_use]
    pub const fn admit(self) -> &'static [&'static str] {
        match self.dialect {
            SqlDialect::Postgres => {
                &["INSERT INTO fence_gate AS gate (resource, fence) VALUES ($1, $2) \
                 ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE gate.fence <= excluded.fence \
                 RETURNING fence"]
            }
            SqlDialect::MySql => &[
                "INSERT INTO fence_gate (resource, fence) VALUES (?, ?) \
                 ON DUPLICATE KEY UPDATE fence = GREATEST(fence, VALUES(fence))",
                // A plain read could return an older snapshot.
                "SELECT fence FROM fence_gate WHERE resource = ? AND fence = ? FOR UPDATE",
            ],
        }
    }
}
