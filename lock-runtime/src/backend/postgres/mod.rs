//! `postgres://`: locks as rows of a table.
//!
//! A lock is a row of `lock_lease`: key, owner, end of the lease by the server's clock, fence. An owner that waits is a row of
//! `lock_queue`. A release grants the lock to the head of the queue in the same transaction and notifies its process
//! alone, by `NOTIFY`. Every transition is a statement in `sql/`:
//!
//! ```text
//! free ── acquire ──> held ── enqueue by another owner: marks the row, notifies the holder ──> contended
//!   ^                  │                                                                          │
//!   └──── release ─────┘   reserved: the head's for a reservation time <── hand_off ──────────────┘
//!                            │ acquire by the head: held for its whole ttl
//!                            └ none in time: the row expires, and the next acquire has it
//! ```
//!
//! 1. **A lease, not a session lock.** An advisory lock ends when the server thinks that the connection has, which can be
//!    before its holder knows. A row has an end that the holder knows too.
//! 2. **Only the server's clock**, at the start of a statement. A statement that has waited for a row computes with a
//!    time that is too early: a grant is then shorter than its row, and an expired lease counts as held.
//! 3. **A fence is the server's clock in microseconds, or one more than the last fence of the row**, whichever is greater. So it
//!    grows past deleted rows, restarts and failovers, and no counter is shared between keys.
//! 4. **One statement for all requests of a batch.** A commit costs a flush of the disk, and 64 keys cost about as much as one.
//! 5. **Two connections.** Acquires and releases share one, in order: a release that undoes an acquire cannot overtake
//!    it. Renewals have the other, so that no acquire delays them. A lost connection's server process is ended before
//!    its successor is used.
//!
//! The files from bottom to top: `url`, `schema` with the statements, `server_error`, `channel`, `session` (one connection),
//! `job`, `batch` with `acquire`, `release` and `renew` (requests as statements), `sweep`, `link` (a connection that is opened again).

mod acquire;
mod batch;
mod channel;
mod diagnostics;
mod job;
mod link;
mod release;
mod renew;
mod schema;
mod server_error;
mod session;
mod sweep;
mod url;

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use self::job::StoreJob;
use self::link::{AwaitedAnswer, PoolState, Purpose, SessionLink};
use self::schema::Statements;
use self::session::{Connector, Encryption};
use self::url::Database;
use crate::backend::queue_events::QueueEvents;
use crate::backend::unclaimed_grants::release_unclaimed;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities, DynBackend,
    LeaseRef, LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use crate::base::error::{ErrorKind, LockError};

/// Opens the store at `url`, which has the scheme of PostgreSQL.
pub(crate) async fn open(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    let database = Database::parse(url)?;
    if config.sentinel_credentials.is_some() {
        return Err(LockError::new(ErrorKind::Config, "PostgreSQL has no sentinels")
            .remedy("leave `.sentinel_credentials(..)` out"));
    }
    let config = config.with_connect_timeout(database.connect_timeout());
    let statements = Arc::new(Statements::new(&database.table));
    let tls = Encryption::new(database.tls.clone()).await?;
    let connector = Connector {
        database: Arc::new(database),
        statements,
        credentials: config.credentials.cloned(),
        tls,
        limits: config.limits(),
        last: Arc::default(),
    };
    Ok(Arc::new(Postgres::connect(connector, config).await.map_err(LockError::backend)?))
}

struct Postgres {
    events: Arc<QueueEvents>,
    claims: Arc<SessionLink>,
    upkeep: SessionLink,
    unclaimed: AbortHandle,
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.unclaimed.abort();
    }
}

impl Postgres {
    async fn connect(
        connector: Connector,
        config: BackendConfig<'_>,
    ) -> Result<Self, BackendError> {
        let (unclaimed, found) = mpsc::unbounded_channel();
        let events = QueueEvents::new(unclaimed);
        let state = Arc::new(PoolState::new(connector, events.clone(), config.clock));
        // First the channel: grants from the first acquire on name it.
        let upkeep = SessionLink::connect(&state, Purpose::Upkeep).await?;
        let claims = Arc::new(SessionLink::connect(&state, Purpose::Claims).await?);
        let link = claims.clone();
        let release = move |request| {
            let link = link.clone();
            async move { link.send(|reply| StoreJob::Release((request, reply))).get().await }
        };
        let unclaimed = release_unclaimed(found, config.request_timeout, release);
        let unclaimed = tokio::spawn(unclaimed).abort_handle();
        Ok(Self { events, claims, upkeep, unclaimed })
    }
}

impl Backend for Postgres {
    fn capabilities(&self) -> Capabilities {
        Capabilities { wait_queue: true, ..Capabilities::default() }
    }

    fn subscribe(&self, notifier: Notifier) {
        self.events.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let new = requests.iter().filter(|request| request.enqueue && request.attempt == 0);
        let pending = self.events.expect(new.map(|request| request.owner).collect());
        let answers: Vec<_> = requests
            .iter()
            .map(|request| self.claims.send(|reply| StoreJob::Acquire((request.clone(), reply))))
            .collect();
        let mut outcomes = Vec::with_capacity(requests.len());
        for (request, answer) in requests.iter().zip(answers) {
            let mut outcome = answer.get().await;
            if let Ok(AcquireOutcome::Contended {
                wait_mode: WaitMode::Queued { retry_after }, ..
            }) = &mut outcome
                && pending.reached_head(&request.owner)
            {
                *retry_after = std::time::Duration::ZERO;
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let answers: Vec<_> = leases
            .iter()
            .map(|lease| self.upkeep.send(|reply| StoreJob::Renew((lease.clone(), reply))))
            .collect();
        all(answers).await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let answers: Vec<_> = requests
            .iter()
            .map(|request| self.claims.send(|reply| StoreJob::Release((request.clone(), reply))))
            .collect();
        all(answers).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        self.upkeep.send(|reply| StoreJob::IsHeld((lease.clone(), reply))).get().await
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.upkeep.send(StoreJob::Health).get().await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        self.claims.send(StoreJob::Probe).get().await
    }

    async fn close(&self) {
        tokio::join!(self.claims.close(), self.upkeep.close());
    }
}

async fn all<T>(answers: Vec<AwaitedAnswer<T>>) -> Vec<Result<T, BackendError>> {
    let mut outcomes = Vec::with_capacity(answers.len());
    for answer in answers {
        outcomes.push(answer.get().await);
    }
    outcomes
}
