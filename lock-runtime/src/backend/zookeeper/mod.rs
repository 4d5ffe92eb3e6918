//! `zookeeper://`: locks as ephemeral nodes.
//!
//! A lock is a container, and each owner of it, or waiter, is an ephemeral sequential node below it. The first node
//! holds the lock, and each other node watches the one right before it. The layout is that of Curator's
//! `InterProcessMutex`, so both exclude each other:
//!
//! ```text
//! /locks/order:1                                   container, deleted by the servers when it is not used
//! /locks/order:1/_c_<owner>-lock-0000000007        holds the lock
//! /locks/order:1/_c_<owner>-lock-0000000009        waits, watches ..07
//! ```
//!
//! 1. **The session is the lease.** A node lives as long as its session. There is a session for each class of ttls. Its
//!    timeout exceeds these ttls. A lease that ends earlier is deleted by its process. A renewal is a transaction without a change, one
//!    for all leases of a session: a majority has to take it.
//! 2. **The owner token is in the name**, so a node is found again after a lost answer. Requests of a session are
//!    executed in their order, even after a reconnect: a look after a lost answer tells its outcome.
//! 3. **A claim is recorded before its request is sent**, and until its node is known to be gone. What a dropped call
//!    or a lost connection leaves is deleted at the claim's deadline.
//! 4. **A fence is the number of a transaction**: of the node's creation, or of a write to the container.
//! 5. **A node moves between sessions** in one transaction that deletes it and makes it again, in the same position. It moves
//!    when a lease becomes longer than its session.
//! 6. **The data of a node is a text about its owner**, or empty. No request depends on it, and Curator does not read it.
//!
//! The files from bottom to top: `protocol`, `url`, `node_path`, `server_error`, `transport`, `exchange` and `open_exchange`
//! (requests without an answer), `session` with `session_task`, `ttl_classes` (all sessions), `lock_node`, `owner_claims` and
//! `claims` (what each owner has), `claim_events` and `listed_nodes` (watches), `lock_nodes` with `create`, `fence`, `acquire`,
//! `release`, `renew`, `inspect`, `upkeep` and `diagnostics`.

mod acquire;
mod claim_events;
mod claims;
mod create;
mod diagnostics;
mod exchange;
mod fence;
mod inspect;
mod listed_nodes;
mod lock_node;
mod lock_nodes;
mod node_path;
mod open_exchange;
mod owner_claims;
mod protocol;
mod release;
mod renew;
mod server_error;
mod session;
mod session_task;
mod transport;
mod ttl_classes;
mod upkeep;
mod url;

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use self::claims::ClaimTable;
use self::lock_nodes::LockNodes;
use self::server_error::closed;
use self::transport::EnsembleDialer;
use self::ttl_classes::TtlClasses;
use self::url::Ensemble;
use crate::backend::coordination::positions::in_positions;
use crate::backend::credentials::beside_password;
use crate::backend::queue_events::QueueEvents;
use crate::backend::unclaimed_grants::release_unclaimed;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities, DynBackend,
    Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome,
    ReleaseRequest, Warning,
};
use crate::base::error::LockError;
use crate::base::key::Key;

/// Opens the store at `url`, which has the scheme of ZooKeeper.
pub(crate) async fn open(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    let ensemble = Ensemble::parse(url)?;
    let config = config.with_connect_timeout(ensemble.connect_timeout);
    let credentials = beside_password(config.credentials, ensemble.login.is_some())?;
    let dialer = EnsembleDialer::new(ensemble, credentials, config.limits()).await?;
    Ok(Arc::new(ZooKeeper::connect(Arc::new(dialer), config).await.map_err(LockError::backend)?))
}

struct ZooKeeper {
    nodes: Arc<LockNodes>,
    has_login: bool,
    tasks: [AbortHandle; 2],
}

impl Drop for ZooKeeper {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        // Claims hold their sessions, which would otherwise continue.
        for session in self.nodes.classes.all() {
            session.begin_close(self.nodes.claims.end_of_session(session.number));
        }
    }
}

impl ZooKeeper {
    async fn connect(
        dialer: Arc<EnsembleDialer>,
        config: BackendConfig<'_>,
    ) -> Result<Self, BackendError> {
        let (unclaimed, found) = mpsc::unbounded_channel();
        let (claims, changes) = ClaimTable::new(QueueEvents::new(unclaimed), config.clock);
        let classes = TtlClasses::new(dialer.clone(), config.clock, claims.clone());
        let has_login = dialer.has_login();
        let nodes = Arc::new(LockNodes {
            root: dialer.ensemble.root.clone(),
            access: dialer.ensemble.access(has_login),
            claims,
            classes,
            // The call ends at the request timeout, with all answers that have arrived.
            part_limit: config.request_timeout * 4 / 5,
        });
        let limit = config.request_timeout;
        let releasing = release_unclaimed(found, limit, &nodes, |nodes, request| async move {
            nodes.release(&request).await
        });
        let tasks = [releasing, tokio::spawn(upkeep::run(nodes.clone(), changes)).abort_handle()];
        // From here on a connect that is dropped ends its session.
        let store = Self { nodes, has_login, tasks };
        if let Err(error) = store.open_root().await {
            // The runtime of the session may end with the caller.
            let _ = timeout(limit, Backend::close(&store)).await;
            return Err(error);
        }
        Ok(store)
    }

    /// Opens the first session, and makes the node above the locks.
    async fn open_root(&self) -> Result<(), BackendError> {
        let session = self.nodes.classes.first().await?;
        self.nodes.make_root(&session).await
    }

    /// One call for each of `requests`, all at the same time. Dropping it drops the calls.
    async fn each<R, T, F>(
        &self,
        requests: &[R],
        call: impl Fn(Arc<LockNodes>, R) -> F,
    ) -> Vec<Result<T, BackendError>>
    where
        R: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        if let [request] = requests {
            return vec![call(self.nodes.clone(), request.clone()).await];
        }
        let mut calls = JoinSet::new();
        for (at, request) in requests.iter().enumerate() {
            let call = call(self.nodes.clone(), request.clone());
            calls.spawn(async move { vec![(at, call.await)] });
        }
        in_positions(calls, requests.iter().map(|_| Err(closed())).collect()).await
    }
}

impl Backend for ZooKeeper {
    fn capabilities(&self) -> Capabilities {
        // A server executes requests in their order, so what is sent in excess is answered too late.
        Capabilities { wait_queue: true, paced: true, ..Capabilities::default() }
    }

    fn subscribe(&self, notifier: Notifier) {
        self.nodes.claims.events.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        // Even a repeated request may be the first one that is answered.
        let queued = requests.iter().filter(|request| request.enqueue);
        let pending = self.nodes.claims.events.expect(queued.map(|it| it.owner).collect());
        let is_alone = requests.len() == 1;
        let call = move |nodes: Arc<LockNodes>, request: AcquireRequest| async move {
            let acquiring = nodes.acquire(&request);
            if is_alone { acquiring.await } else { nodes.within_part(acquiring).await }
        };
        let mut outcomes = self.each(requests, call).await;
        pending.retry_heads(requests, &mut outcomes);
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.nodes.renew(leases).await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let call = |nodes: Arc<LockNodes>, request| async move { nodes.release(&request).await };
        self.each(requests, call).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        self.nodes.is_held(lease).await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        self.nodes.inspect(key).await.map(Some)
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        self.nodes.list_keys(pattern, limit).await.map(Some)
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.nodes.health(self.has_login).await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        self.nodes.probe().await
    }

    async fn close(&self) {
        let mut closing = JoinSet::new();
        for session in self.nodes.classes.all() {
            session.begin_close(self.nodes.claims.end_of_session(session.number));
            closing.spawn(async move { session.closed().await });
        }
        closing.join_all().await;
    }
}
