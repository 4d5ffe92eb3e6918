//! The backend for one server that runs scripts: `redis://` and `redis+sentinel://`.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::backend::redis::discovery::target::Target;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::redis::protocol::acquire::RequestForm;
use crate::backend::redis::protocol::lock_changes::watch_locks;
use crate::backend::redis::protocol::replicas::Replicas;
use crate::backend::redis::protocol::scripted_server::{ConnectError, RouteHint, ScriptedServer};
use crate::backend::redis::protocol::shared_state::SharedState;
use crate::backend::unclaimed_grants::release_unclaimed;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities, Finding,
    Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, Owner, ReleaseOutcome,
    ReleaseRequest, Warning,
};
use crate::base::clock::Clock;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::exec::foreground::ForegroundPlace;

/// Owns the connection to the server, the one to its replicas, and the task that releases unclaimed grants.
///
/// Drop ends the task.
pub(crate) struct Scripted {
    server: Arc<ScriptedServer>,
    clock: Clock,
    /// `Some` if a grant needs the acknowledgement of replicas.
    replicas: Option<Replicas>,
    unclaimed_task: AbortHandle,
}

impl Scripted {
    pub(crate) async fn connect(
        target: impl Into<Target>,
        keyspace: Keyspace,
        config: BackendConfig<'_>,
    ) -> Result<Result<Self, ConnectError>, LockError> {
        let target = target.into();
        let for_replicas = target.clone();
        let (shared, unclaimed) = SharedState::new(keyspace, config)?;
        let probe = Owner::random()?;
        let server =
            match ScriptedServer::connect(&shared, target, MessageScope::AllSlots, probe).await {
                Ok(server) => Arc::new(server),
                Err(error) => return Ok(Err(error)),
            };
        let replicas = Replicas::connect(for_replicas, config).await?;
        let SharedState { clock, request_timeout, .. } = shared;
        let unclaimed_task =
            release_unclaimed(unclaimed, request_timeout, &server, |server, request| async move {
                server.release(RouteHint::Direct, &[request]).await
            });
        Ok(Ok(Self { server, clock, replicas, unclaimed_task }))
    }
}

impl Scripted {
    async fn acquire_all(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let sent = self.clock.now();
        let forms: Vec<_> = requests.iter().map(|request| self.server.form(request)).collect();
        let is_new = |(request, form): &(&AcquireRequest, &RequestForm)| {
            request.attempt == 0 && **form == RequestForm::Queue
        };
        let new = requests.iter().zip(&forms).filter(is_new).map(|(request, _)| request.owner);
        let pending = self.server.push_handler.expect(new.collect());
        let mut outcomes = self.server.acquire_as(forms, RouteHint::Direct, requests).await;
        if let Some(replicas) = &self.replicas {
            replicas.confirm(requests, &mut outcomes, sent).await;
        }
        pending.retry_heads(requests, &mut outcomes);
        outcomes
    }
}

impl Backend for Scripted {
    fn subscribe(&self, notifier: Notifier) {
        self.server.push_handler.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        // The usual request: no message answers it.
        if let ([request], None) = (requests, &self.replicas) {
            let form = self.server.form(request);
            if form != RequestForm::Queue {
                return vec![self.server.acquire_one(form, RouteHint::Direct, request).await];
            }
        }
        Box::pin(self.acquire_all(requests)).await
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.server.renew(RouteHint::Direct, leases).await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        self.server.release(RouteHint::Direct, requests).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let lease = std::slice::from_ref(lease);
        let mut held = self.server.are_held(RouteHint::Direct, lease).await;
        held.pop().unwrap_or(Ok(LeaseStatus::NotHeld))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let key = std::slice::from_ref(key);
        let mut inspections = self.server.inspect(RouteHint::Direct, key).await;
        inspections.pop().transpose()
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        self.server.list(pattern, limit).await.map(Some)
    }

    async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        watch_locks(self.server.connection(), pattern, changed).await
    }

    fn capabilities(&self) -> Capabilities {
        let wait_queue = self.server.keeps_wait_queues();
        Capabilities { wait_queue, ..Capabilities::default() }
    }

    fn foreground(&self, caller: &Handle) -> Option<ForegroundPlace> {
        // Replicas confirm what was written on the driver's connection.
        if self.replicas.is_some() { None } else { self.server.connection().foreground(caller) }
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.server.health().await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.server.diagnose().await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        self.server.probe().await
    }

    async fn close(&self) {
        self.server.close();
        if let Some(replicas) = &self.replicas {
            replicas.close();
        }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.unclaimed_task.abort();
    }
}
