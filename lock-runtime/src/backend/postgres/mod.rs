//! `postgres://`: locks as rows of a table.
//!
//! A lock is a row of `lock_lease`: key, owner, end of the lease by the server's clock, fence. An owner that waits is a row of
//! `lock_queue`. A release grants the lock to the head of the queue in the same transaction and notifies only its process, by
//! `NOTIFY`. Every transition is a statement in `sql/`:
//!
//! ```text
//! free ── acquire ──> held ── enqueue by another owner: marks the row, notifies the holder ──> contended
//!   ^                  │                                                                          │
//!   └──── release ─────┘   reserved: the head's for a reservation time <── hand_off ──────────────┘
//!                            │ acquire by the head: held for its whole ttl
//!                            └ none in time: the row expires, and the next acquire has it
//! ```
//!
//! 1. **A lease, not a session lock.** An advisory lock ends when the server considers the connection ended, which can be before
//!    its holder knows. A row has an end that the holder knows too.
//! 2. **Only the server's clock**, at the start of a statement. A statement that has waited for a row computes with a
//!    time that is too early. A grant is then shorter than its row, and an expired lease counts as held.
//! 3. **A fence is the server's clock in microseconds, or one more than the last fence of the row**, whichever is greater. So it
//!    grows past deleted rows, restarts and failovers, and no counter is shared between keys.
//! 4. **One statement for all requests of a batch.** A commit costs a flush of the disk, and 64 keys cost about as much as one.
//! 5. **Two connections.** Acquires and releases share one, in order: a release that undoes an acquire cannot overtake it. After
//!    an acquire that took long, as for a locked row, releases of other owners go first. Renewals have the other connection, so
//!    that no acquire delays them. The server process of a lost connection is ended before the next connection is used.
//!
//! The files from bottom to top: `url`, `schema` with the statements, `server_error`, `channel`, `session` (one connection),
//! `batch` with `acquire`, `release` and `renew` (requests as statements), `blocked_requests` (rows that are locked elsewhere),
//! `sweep`, `link` (a connection that is opened again). `backend/sql` has what MySQL shares.

mod acquire;
mod batch;
mod blocked_requests;
mod channel;
mod diagnostics;
mod inspect;
mod link;
mod release;
mod renew;
mod schema;
mod server_error;
mod session;
mod sweep;
mod url;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize};

use tokio::sync::mpsc;

use self::link::PoolState;
use self::schema::Statements;
use self::session::{Connector, Encryption};
use self::url::Database;
use crate::backend::credentials::beside_password;
use crate::backend::queue_events::QueueEvents;
use crate::backend::sql::pin::FenceTable;
use crate::backend::sql::sender::Purpose;
use crate::backend::sql::store::SqlStore;
use crate::backend::{BackendConfig, BackendError, DynBackend};
use crate::base::error::LockError;
use crate::base::sql_dialect::SqlDialect;

/// Opens the store at `url`, which has the scheme of PostgreSQL.
pub(crate) async fn open(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    let database = Database::parse(url)?;
    let config = config.with_connect_timeout(database.params.connect_timeout);
    let credentials = beside_password(config.credentials, database.has_password())?;
    let statements = Statements::new(database.names());
    let tls = Encryption::new(database.tls.clone()).await?;
    let connector = Connector {
        database,
        statements,
        credentials,
        tls,
        limits: config.limits(),
        last: AtomicUsize::default(),
        last_start: AtomicI64::default(),
    };
    Ok(Arc::new(connect(connector, config).await.map_err(LockError::backend)?))
}

async fn connect(
    connector: Connector,
    config: BackendConfig<'_>,
) -> Result<SqlStore, BackendError> {
    let (unclaimed, found) = mpsc::unbounded_channel();
    let events = QueueEvents::new(unclaimed);
    let fences = FenceTable::of(SqlDialect::Postgres, connector.database.names());
    let state = Arc::new(PoolState::new(connector, events.clone(), config.clock));
    // The channel comes first: grants name it from the first acquire on.
    let upkeep = link::connect(&state, Purpose::Upkeep).await?;
    let claims = link::connect(&state, Purpose::Claims).await?;
    Ok(SqlStore::new(events, claims, upkeep, found, config.request_timeout, fences))
}
