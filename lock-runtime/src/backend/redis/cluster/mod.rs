//! The backend for a Redis Cluster: each request goes to the server that has the slot of its keys.
//!
//! ```text
//! mod ── divided_slot ── router ── servers ── fan_out
//!  │                       └─ slot_refresh ─┘
//!  └─ seeds
//! ```
//!
//! `router` sends requests and follows redirections, which also correct the slot map. `servers` has one connection per
//! master. `slot_refresh` reads the whole map again in the background.
//!
//! 1. **No request waits for the map.** A request goes to the server in the map. `MOVED` corrects the map and the request
//!    continues in the same call; `ASK` redirects it once. Any other temporary error is a failure that the pool
//!    repeats; it also requests a refresh of the map.
//! 2. **A wrong map is harmless.** A server refuses keys of slots that it does not have. So two servers never keep the same
//!    lock, whatever the map says. Redis Cluster itself may lose a lock when a master dies before its
//!    replica has the lock; the fence protects against that.
//! 3. **All keys of a lock are in one slot**, including its wait queue and its fence counter, by a tag in front; see `keyspace`.
//! 4. **A divided slot.** While a slot moves, its keys are divided between two servers. A command that needs keys of
//!    both servers is refused until the move is over (`TRYAGAIN`). That is an acquire with a fence, or of several keys. Other
//!    acquires leave the wait queue out and poll. Releases and renewals go on key by key; see `divided_slot`.
//! 5. **One channel on all servers.** A script that sends a message counts the receivers at its own server, so each
//!    connection subscribes. A message arrives over every connection, and counts only on the connection to the slot's
//!    server. From 7.0 on each connection also has a channel in its shard, which is tried first; see `shard_channel`.

mod divided_slot;
mod errors;
pub(crate) mod fan_out;
pub(crate) mod router;
pub(crate) mod seeds;
mod servers;
mod slot_refresh;

use std::sync::Arc;

use tokio::task::{AbortHandle, JoinSet};

use self::errors::no_server;
use self::fan_out::{BoxedCall, fan_out};
use self::router::{IfDivided, Router};
use self::seeds::{first_map, seeds};
use self::servers::Servers;
use self::slot_refresh::SlotRefresh;
use crate::backend::first_ended::first_ended;
use crate::backend::redis::hash_slot::common_slot;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::lock_changes::watch_locks;
use crate::backend::redis::protocol::scripted_server::ScriptedServer;
use crate::backend::redis::protocol::shared_state::SharedState;
use crate::backend::redis::slot_map::{Address, SlotMap, SlotRanges};
use crate::backend::redis::url::Endpoint;
use crate::backend::unclaimed_grants::release_unclaimed;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities,
    FailureKind, Finding, Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, Owner,
    ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::error::LockError;
use crate::base::key::Key;

/// Owns the connections to all servers, the task that refreshes the slot map, and the one that releases unclaimed grants.
///
/// Drop ends the tasks.
pub(crate) struct Cluster {
    router: Arc<Router>,
    tasks: [AbortHandle; 2],
}

impl Cluster {
    pub(crate) async fn connect(url: &str, config: BackendConfig<'_>) -> Result<Self, LockError> {
        let (cluster, opened) = Self::begin(seeds(url)?, config).await?;
        opened.map_err(LockError::backend)?;
        Ok(cluster)
    }

    /// Connects, and keeps trying if that fails. The second value is the result of the first try.
    pub(crate) async fn begin(
        seeds: Vec<Endpoint>,
        config: BackendConfig<'_>,
    ) -> Result<(Self, Result<(), BackendError>), LockError> {
        let seeds: Result<Vec<_>, _> = seeds.into_iter().map(|seed| seed.of_pool(config)).collect();
        let seeds = seeds?;
        let config =
            config.with_connect_timeout(seeds.first().and_then(|seed| seed.connect_timeout));
        let (shared, unclaimed) =
            SharedState::new(Keyspace::of_cluster(config.key_prefix), config)?;
        let request_timeout = shared.request_timeout;
        let mut dialers = Vec::with_capacity(seeds.len());
        for seed in &seeds {
            dialers.push(Dialer::new(seed.clone()).await?);
        }
        let first = first_map(dialers, config.connect_timeout).await;
        // Without a map no server has a slot, and refreshes go on until there is one.
        let map = first.as_ref().map_or_else(|_| SlotRanges::default(), SlotRanges::clone);
        let slots = Arc::new(SlotMap::new(&map));
        let servers = Arc::new(Servers::new(seeds, shared, slots, Owner::random()?));
        let refresh = Arc::new(SlotRefresh::new(servers.clone()));
        let router = Arc::new(Router { servers, refresh });
        let opened = match first {
            Ok(map) => router.servers.open_all(&map.masters()).await,
            Err(error) => Err(error),
        };
        let refreshing = tokio::spawn(router.refresh.clone().run()).abort_handle();
        let unclaimed =
            release_unclaimed(unclaimed, request_timeout, &router, |router, request| async move {
                router.release(&[request]).await
            });
        Ok((Self { router, tasks: [refreshing, unclaimed] }, opened))
    }

    pub(crate) fn router(&self) -> &Router {
        &self.router
    }

    /// The masters, which together have all slots.
    pub(crate) async fn servers(&self) -> Result<Vec<Arc<ScriptedServer>>, BackendError> {
        let Router { servers, refresh } = &*self.router;
        let unserved = servers.slots.unserved();
        if unserved > 0 {
            refresh.request();
            return Err(no_server(format!("{unserved} slots of the Redis Cluster have no server")));
        }
        let opened = servers.all(&servers.slots.masters()).await;
        opened.map(|server| server.map_err(|error| self.router.final_error(error))).collect()
    }

    /// What `call` returns for each master.
    async fn of_all<T, F>(
        &self,
        call: impl Fn(Arc<ScriptedServer>) -> F,
    ) -> Result<Vec<T>, BackendError>
    where
        F: Future<Output = Result<T, BackendError>> + Send,
    {
        let servers = self.servers().await?.into_iter();
        let calls = servers.map(|server| -> BoxedCall<'_, _> { Box::pin(call(server)) });
        let answers = fan_out(calls.collect(), None).await.into_iter().flatten();
        answers.map(|answer| answer.map_err(|error| self.router.final_error(error))).collect()
    }

    /// The ids of its servers, masters and replicas; empty before the first map.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.router.servers.slots.ids()
    }

    /// A weakness of connections that work.
    pub(crate) fn warning(&self) -> Option<Warning> {
        self.router.servers.seeds.iter().find_map(Endpoint::warning)
    }

    /// The server that has `keys` according to the map.
    pub(crate) fn server_of(&self, keys: &[Key]) -> Option<Address> {
        self.router.servers.slots.owner(common_slot(keys).ok()?)
    }

    /// Whether a connected server reports changes of keys.
    pub(crate) fn reports_changes(&self) -> bool {
        let mut opened = self.router.servers.opened().into_iter();
        opened.any(|(_, server)| server.is_up() && server.reports_changes())
    }

    pub(crate) fn end(&self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.router.servers.close();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Backend for Cluster {
    fn subscribe(&self, notifier: Notifier) {
        self.router.servers.shared.push_handler.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        // Expected until the whole call ends: an answer may wait here for the answer of another server.
        let is_new = |request: &&AcquireRequest| {
            request.attempt == 0 && request.enqueue && request.keys.len() == 1
        };
        let new = requests.iter().filter(is_new).map(|request| request.owner).collect();
        let pending = self.router.servers.shared.push_handler.expect(new);
        let routed = self.router.route(
            requests,
            IfDivided::SendSeparately,
            |request| &request.keys,
            |server, hint, requests| Box::pin(server.acquire(hint, requests)),
        );
        let mut outcomes = routed.await;
        pending.retry_heads(requests, &mut outcomes);
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.router
            .route_leases(leases, |server, hint, leases| Box::pin(server.renew(hint, leases)))
            .await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        self.router.release(requests).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let leases = std::slice::from_ref(lease);
        let mut held = self
            .router
            .route_leases(leases, |server, hint, leases| Box::pin(server.are_held(hint, leases)))
            .await;
        held.pop().unwrap_or(Ok(LeaseStatus::NotHeld))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let routed = self.router.route(
            std::slice::from_ref(key),
            IfDivided::SendSeparately,
            |key| std::slice::from_ref(key),
            |server, hint, keys| Box::pin(server.inspect(hint, keys)),
        );
        routed.await.pop().transpose()
    }

    async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        let mut masters = self.router.refresh.masters();
        let servers = self.servers().await?;
        let mut watches: Vec<BoxedCall<'_, Result<(), BackendError>>> = Vec::new();
        for server in &servers {
            watches.push(Box::pin(watch_locks(server.connection(), pattern, changed)));
        }
        tokio::select! {
            watched = first_ended(&mut watches) => watched,
            // All watches begin again, with one for a master that has joined.
            _ = masters.changed() => {
                Err(no_server("a master of the Redis Cluster has joined or left".to_owned()))
            }
        }
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        let search = |server: Arc<ScriptedServer>| async move { server.list(pattern, limit).await };
        let (mut keys, mut is_complete) = (Vec::new(), true);
        for found in self.of_all(search).await? {
            is_complete &= found.is_complete;
            keys.extend(found.keys);
        }
        Ok(Some(KeyList::new(keys, is_complete, limit)))
    }

    /// Of any server, as all servers have the same users.
    fn capabilities(&self) -> Capabilities {
        let mut opened = self.router.servers.opened().into_iter();
        let wait_queue = opened.any(|(_, server)| server.keeps_wait_queues());
        Capabilities { wait_queue, ..Capabilities::default() }
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let found = self.of_all(|server| async move { server.health().await }).await?;
        let mut warnings = Vec::new();
        for warning in found.into_iter().flatten() {
            if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
        Ok(warnings)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let findings = self.of_all(|server| async move { server.diagnose().await }).await?;
        Ok(findings.into_iter().flatten().collect())
    }

    /// One master is enough: keys of other masters wait for their own master.
    async fn probe(&self) -> Result<(), BackendError> {
        let servers = self.router.servers.opened();
        if servers.is_empty() {
            return self.servers().await.map(drop);
        }
        let mut pings = JoinSet::new();
        for (_, server) in servers {
            pings.spawn(async move { server.probe().await });
        }
        let mut last = Ok(());
        while let Some(answer) = pings.join_next().await {
            match answer {
                Ok(Err(error)) if error.kind() != FailureKind::Rejected => last = Err(error),
                Ok(Ok(()) | Err(_)) => return Ok(()),
                // A panic counts as no answer.
                Err(_) => {}
            }
        }
        last
    }

    async fn close(&self) {
        self.end();
    }
}
