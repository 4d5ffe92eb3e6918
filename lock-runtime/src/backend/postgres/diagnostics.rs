//! Settings and states of a server by which locks could be lost.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;

use crate::backend::clock_distance::ClockDistance;
use crate::backend::postgres::server_error::read_only;
use crate::backend::postgres::session::get;
use crate::backend::{BackendError, Warning};

/// What is warned of, by its text and its remedy, in the order of the columns of `settings.sql`.
const FOUND: [(&str, &str); 5] = [
    (
        "PostgreSQL does not flush to disk (`fsync = off`), so a crash can free locks",
        "set `fsync = on`, or have the protected resource check fences",
    ),
    (
        "PostgreSQL answers before it flushes (`synchronous_commit = off`), so a crash can free locks",
        "set `synchronous_commit = on` for this user: `ALTER ROLE .. SET synchronous_commit = on`",
    ),
    (
        "a failover can free the latest locks, because replication is asynchronous",
        "set `synchronous_standby_names` and `synchronous_commit = on`, or have the protected resource check fences",
    ),
    (
        "the table of the locks is unlogged, so a crash frees all locks",
        "run `ALTER TABLE lock_lease SET LOGGED`",
    ),
    (
        "the queue of notifications is more than half full",
        "end sessions that listen and stay in a transaction: see `pg_stat_activity`",
    ),
];

/// The warnings about a server with this answer to `settings.sql`, which was asked for and received at the moments of `asked`.
pub(crate) fn warnings(
    server: &str,
    rows: &[Row],
    asked: &RangeInclusive<SystemTime>,
    is_notified: bool,
) -> Result<Vec<Warning>, BackendError> {
    let Some(row) = rows.first() else { return Ok(Vec::new()) };
    if get(row, 0)? {
        return Err(read_only(server));
    }
    let mut warnings = found(row)?;
    if !is_notified {
        warnings.push(Warning::new(
            "a pooler in front of PostgreSQL passes on no notifications, so waiters look on their own",
            "connect to the server itself, or to a pooler in session mode, for faster hand-offs",
        ));
    }
    warnings.extend(clock(server, row, asked)?);
    Ok(warnings)
}

fn clock(
    server: &str,
    row: &Row,
    asked: &RangeInclusive<SystemTime>,
) -> Result<Option<Warning>, BackendError> {
    // A clock before 1970 has no distance.
    let micros = u64::try_from(get::<i64>(row, FOUND.len() + 1)?).ok();
    let distance =
        micros.and_then(|micros| ClockDistance::of(Duration::from_micros(micros), asked));
    Ok(distance.and_then(|it| it.warning(format_args!("PostgreSQL at {server}"))))
}

fn found(row: &Row) -> Result<Vec<Warning>, BackendError> {
    let mut warnings = Vec::new();
    for (column, (text, remedy)) in FOUND.iter().enumerate() {
        if get(row, column + 1)? {
            warnings.push(Warning::new(*text, remedy));
        }
    }
    Ok(warnings)
}
