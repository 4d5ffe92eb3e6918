//! The servers of a cluster and the connections to them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::backend::backoff::Backoff;
use crate::backend::redis::cluster::errors::closed;
use crate::backend::redis::cluster::fan_out::{BoxedCall, fan_out};
use crate::backend::redis::net::handshake::PushSink;
use crate::backend::redis::net::shard_channel::{MessageScope, ShardChannel};
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::scripted_server::{ConnectError, ScriptedServer};
use crate::backend::redis::protocol::shared_state::SharedState;
use crate::backend::redis::slot_map::{Address, SlotMap};
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind, Owner};
use crate::base::mutex::Mutex;

/// Owns one [`ClusterServer`] per address, opened at its first use.
pub(super) struct Servers {
    /// The servers of the URL. All servers of the cluster have the same login and TLS settings.
    pub(super) seeds: Vec<Endpoint>,
    pub(super) shared: SharedState,
    pub(super) slots: Arc<SlotMap>,
    map: Mutex<ServerMap>,
    /// The owner token of all probes.
    probe: Owner,
}

enum ServerMap {
    Open(HashMap<Address, ClusterServer>),
    Closed,
}

/// One server, from the first try to reach it. Owns the task that tries; drop ends the task.
struct ClusterServer {
    state: watch::Receiver<ServerState>,
    opener: AbortHandle,
}

#[derive(Clone)]
enum ServerState {
    /// The first try is running.
    Opening,
    /// The last try failed, and another one follows.
    Failed(BackendError),
    /// Connected. The connection is kept up from now on.
    Open(Arc<ScriptedServer>),
}

impl Servers {
    pub(super) fn new(
        seeds: Vec<Endpoint>,
        shared: SharedState,
        slots: Arc<SlotMap>,
        probe: Owner,
    ) -> Self {
        Self { seeds, shared, slots, map: Mutex::new(ServerMap::Open(HashMap::new())), probe }
    }

    /// The server at `address`. Waits for the first try to reach it, but not for later tries.
    pub(super) async fn server(
        &self,
        address: &Address,
    ) -> Result<Arc<ScriptedServer>, BackendError> {
        let mut state = self.state(address)?;
        let tried = state.wait_for(|state| !matches!(state, ServerState::Opening)).await;
        match tried.as_deref() {
            Ok(ServerState::Open(server)) => Ok(server.clone()),
            Ok(ServerState::Failed(error)) => Err(error.clone()),
            Ok(ServerState::Opening) | Err(_) => Err(closed()),
        }
    }

    /// All of `addresses`, opened side by side.
    pub(super) async fn all(
        &self,
        addresses: &[Address],
    ) -> impl Iterator<Item = Result<Arc<ScriptedServer>, BackendError>> + use<> {
        let open = |address| -> BoxedCall<'_, _> { Box::pin(self.server(address)) };
        fan_out(addresses.iter().map(open).collect(), None).await.into_iter().flatten()
    }

    /// Opens connections to all of `masters`. An error if none can be reached, or if one rejects the connection.
    pub(super) async fn open_all(&self, masters: &[Address]) -> Result<(), BackendError> {
        let mut is_open = false;
        let mut failure = None;
        for opened in self.all(masters).await {
            match opened {
                Ok(_) => is_open = true,
                Err(error) if error.kind() == FailureKind::Rejected => return Err(error),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if !is_open => Err(error),
            _ => Ok(()),
        }
    }

    /// The servers that have been reached at least once. A server in the list may be down now.
    pub(super) fn opened(&self) -> Vec<(Address, Arc<ScriptedServer>)> {
        match &*self.map.lock() {
            ServerMap::Open(map) => map
                .iter()
                .filter_map(|(address, server)| Some((address.clone(), server.opened()?)))
                .collect(),
            ServerMap::Closed => Vec::new(),
        }
    }

    /// Whether each slot has a master and all masters are connected.
    pub(super) fn are_all_up(&self) -> bool {
        let opened = self.opened();
        let is_up = |master: &Address| {
            opened.iter().any(|(address, server)| address == master && server.is_up())
        };
        self.slots.masters().iter().all(is_up) && self.slots.unserved() == 0
    }

    /// Opens connections to new masters, and drops servers that are no longer masters. A server that is connected, or
    /// is being tried for the first time, stays: a slot may be moving to it.
    pub(super) fn settle(&self, masters: &[Address]) {
        for master in masters {
            let _ = self.state(master);
        }
        if let ServerMap::Open(map) = &mut *self.map.lock() {
            map.retain(|address, server| masters.contains(address) || server.may_have_slots());
        }
    }

    /// The settings of the URL with the host and port of `address`.
    pub(super) fn endpoint(&self, address: &Address) -> Endpoint {
        let Address { host, port } = address;
        Endpoint { host: host.to_string(), port: *port, ..self.seeds[0].clone() }
    }

    pub(super) fn close(&self) {
        let map = std::mem::replace(&mut *self.map.lock(), ServerMap::Closed);
        if let ServerMap::Open(map) = map {
            map.into_values().filter_map(|server| server.opened()).for_each(|it| it.close());
        }
    }

    fn state(&self, address: &Address) -> Result<watch::Receiver<ServerState>, BackendError> {
        let mut map = self.map.lock();
        let ServerMap::Open(map) = &mut *map else { return Err(closed()) };
        if let Some(server) = map.get(address) {
            return Ok(server.state.clone());
        }
        let server = self.open(address);
        let state = server.state.clone();
        map.insert(address.clone(), server);
        Ok(state)
    }

    fn open(&self, address: &Address) -> ClusterServer {
        let endpoint = self.endpoint(address);
        let (shared, probe) = (self.shared.clone(), self.probe);
        let (slots, shard) = (self.slots.clone(), ShardChannel::default());
        let scope = MessageScope::OwnedSlots { slots, address: address.clone(), shard };
        let (report, state) = watch::channel(ServerState::Opening);
        let opening = async move {
            let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
            for round in 0_usize.. {
                let opened = async {
                    let dialer = Dialer::new(endpoint.clone()).await;
                    let dialer = dialer
                        .map_err(|error| {
                            BackendError::new(FailureKind::Rejected, error.to_string())
                        })?
                        .with_shard_channel();
                    let opened = ScriptedServer::connect(&shared, dialer, scope.clone(), probe);
                    opened.await.map_err(ConnectError::into_error)
                };
                match opened.await {
                    Ok(server) => {
                        report.send_replace(ServerState::Open(Arc::new(server)));
                        if round > 0 {
                            shared.push_handler.resync();
                        }
                        return;
                    }
                    Err(error) => report.send_replace(ServerState::Failed(error)),
                };
                sleep(backoff.next()).await;
            }
        };
        ClusterServer { state, opener: tokio::spawn(opening).abort_handle() }
    }
}

impl ClusterServer {
    /// Whether a server that has no slot in the map may be about to get one.
    fn may_have_slots(&self) -> bool {
        match &*self.state.borrow() {
            ServerState::Opening => true,
            ServerState::Failed(_) => false,
            ServerState::Open(server) => server.is_up(),
        }
    }

    fn opened(&self) -> Option<Arc<ScriptedServer>> {
        match &*self.state.borrow() {
            ServerState::Open(server) => Some(server.clone()),
            ServerState::Opening | ServerState::Failed(_) => None,
        }
    }
}

impl Drop for ClusterServer {
    fn drop(&mut self) {
        self.opener.abort();
    }
}
