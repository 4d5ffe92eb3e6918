//! Dialects of SQL.

/// A dialect of SQL.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SqlDialect {
    /// PostgreSQL, with `$1` for values.
    Postgres,
    /// MySQL and MariaDB, with `?` for values.
    MySql,
}
