//! `mysql://`: locks as rows of a table, in MySQL and MariaDB.
//!
//! A lock is a row of `lock_lease`: key, owner, end of the lease by the server's clock, fence. An owner that waits is a row of
//! `lock_queue`. A release grants the lock to the head of the queue in the same transaction. Every transition is a
//! script of statements in `sql/`, with the states of `backend/postgres`:
//!
//! ```text
//! free ── acquire ──> held ── enqueue by another owner: marks the row ──> contended
//!   ^                  │                                                     │
//!   └──── release ─────┘   reserved: the head's for a reservation time <── hand_off
//!                            │ acquire by the head: held for its whole ttl
//!                            └ none in time: the row expires, and the next acquire has it
//! ```
//!
//! 1. **A lease, not a session lock.** A lock of `GET_LOCK` ends when the server considers the connection ended, which can be
//!    before its holder knows. A row has an end that the holder knows too.
//! 2. **Only the server's clock**, at the start of a script. A script that has waited for a row computes with a time that
//!    is too early. A grant is then shorter than its row, and an expired lease counts as held.
//! 3. **A fence is the server's clock in microseconds, or one more than the last fence of the row**, whichever is greater. So it
//!    grows past deleted rows, restarts and failovers, and no counter is shared between keys.
//! 4. **One packet for a transition of a batch.** A commit costs a flush of the disk, and 64 keys cost about as much as one. No
//!    transaction waits for this process: one that is paused keeps no row locked.
//! 5. **Rows are locked in the order of their keys**, only by the primary key, with READ COMMITTED. So no two scripts wait for
//!    each other in a circle. After a deadlock with statements of others, a script is repeated.
//! 6. **Two connections.** Acquires and releases share one, in order: a release that undoes an acquire cannot overtake
//!    it. After an acquire that took long, as for a locked row, releases of other owners go first. Renewals have the other
//!    connection, so that no acquire delays them. Each holds a named lock of its own. A lost connection is found by that name and
//!    killed before its successor is used.
//! 7. **Looks.** The server sends no notifications. While this process waits, one statement looks at all that it waits for.
//!
//! The files from bottom to top: `url`, `script`, `packet`, `schema` with the statements, `server_error`, `encryption`, `session`
//! (one connection), `watch_list`, `pool_state`, `batch` with `acquire`, `release`, `renew` and `look` (requests as scripts),
//! `sweep`, `link` (a connection that is opened again).

mod acquire;
mod batch;
mod diagnostics;
mod encryption;
mod held_grants;
mod inspect;
mod link;
mod look;
mod packet;
mod pool_state;
mod release;
mod renew;
mod schema;
mod script;
mod server_error;
mod session;
mod sweep;
mod url;
mod watch_list;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use tokio::sync::mpsc;

use self::encryption::MysqlEncryption;
use self::pool_state::MysqlPoolState;
use self::schema::MysqlStatements;
use self::session::MysqlConnector;
use self::url::MysqlUrl;
use crate::backend::credentials::beside_password;
use crate::backend::queue_events::QueueEvents;
use crate::backend::sql::pin::FenceTable;
use crate::backend::sql::sender::Purpose;
use crate::backend::sql::store::SqlStore;
use crate::backend::{BackendConfig, BackendError, DynBackend};
use crate::base::error::LockError;
use crate::base::mutex::Mutex;
use crate::base::sql_dialect::SqlDialect;

/// Opens the store at `url`, which has the scheme of MySQL.
pub(crate) async fn open(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    let database = MysqlUrl::parse(url)?;
    let config = config.with_connect_timeout(database.params.connect_timeout);
    let connector = MysqlConnector {
        statements: MysqlStatements::new(database.names()),
        without_info: MysqlStatements::new(database.names().without_info()),
        encryption: MysqlEncryption::new(database.tls.clone()).await?,
        credentials: beside_password(config.credentials, database.has_password())?,
        database,
        limits: config.limits(),
        last: AtomicUsize::new(0),
        last_server: Mutex::default(),
    };
    Ok(Arc::new(connect(connector, config).await.map_err(LockError::backend)?))
}

async fn connect(
    connector: MysqlConnector,
    config: BackendConfig<'_>,
) -> Result<SqlStore, BackendError> {
    let (unclaimed, found) = mpsc::unbounded_channel();
    let events = QueueEvents::new(unclaimed);
    let fences = FenceTable::of(SqlDialect::MySql, connector.database.names());
    let state = Arc::new(MysqlPoolState::new(connector, events.clone(), config.clock));
    // The channel comes first: grants name it from the first acquire on.
    let upkeep = link::connect(&state, Purpose::Upkeep).await?;
    let claims = link::connect(&state, Purpose::Claims).await?;
    Ok(SqlStore::new(events, claims, upkeep, found, config.request_timeout, fences))
}
