//! One node of a quorum: a server or a cluster.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::sync::mpsc;

use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::cluster::router::IfDivided;
use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::conn::path::Path;
use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::conn::push::PushHandler;
use crate::backend::redis::discovery::sentinel::Sentinels;
use crate::backend::redis::discovery::target::Target;
use crate::backend::redis::keyspace::BallotLog;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::net::handshake::PushConfig;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::script;
use crate::backend::redis::protocol::scripted_server::RouteHint;
use crate::backend::redis::quorum::message::{BallotOperation, BallotRequest};
use crate::backend::redis::quorum::pacing::ResponseTimes;
use crate::backend::redis::quorum::push::{ChangeReports, NodeWakeups};
use crate::backend::redis::quorum::url::NodeAddress;
use crate::backend::redis::slot_map::Address;
use crate::backend::{Backend, BackendConfig, BackendError, FailureKind, Notifier, Warning};
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::mutex::Mutex;
use crate::base::text::rounded;

/// One node. It keeps its connections up until it is closed.
pub(crate) struct QuorumNode {
    pub(crate) name: String,
    pub(crate) kind: NodeKind,
    /// Of the server, or of the cluster as a whole.
    pub(crate) times: Arc<ResponseTimes>,
    /// Of each server of a cluster.
    server_times: Mutex<HashMap<Address, Arc<ResponseTimes>>>,
}

pub(crate) enum NodeKind {
    Server(Connection),
    /// Each lock is stored by one server of the cluster. If that server fails, the node fails for its locks.
    Cluster(Cluster),
}

impl QuorumNode {
    /// Connects to a node and retries in the background if that fails. The second value is the result of the first try.
    /// `index` identifies the node in `changes`.
    pub(crate) async fn connect(
        address: NodeAddress,
        index: usize,
        changes: &Arc<ChangeReports>,
        mut config: BackendConfig<'_>,
    ) -> Result<(Self, Result<(), BackendError>), LockError> {
        let BackendConfig { clock, .. } = config;
        let name = address.to_string();
        let notifier = Notifier::new(NodeWakeups::new(index, changes, clock));
        let target: Target = match address {
            NodeAddress::Server(endpoint) => {
                config = config.with_connect_timeout(endpoint.connect_timeout);
                Dialer::new(endpoint.of_pool(config)?).await?.into()
            }
            NodeAddress::Service(service) => {
                config = config.with_connect_timeout(service.master.connect_timeout);
                Sentinels::new(service, config).await?.into()
            }
            // Opened like a cluster backend. It subscribes to hand-off messages too, though a quorum sends none.
            NodeAddress::Cluster(seeds) => {
                let (cluster, opened) = Cluster::begin(seeds, config).await?;
                cluster.subscribe(notifier);
                return Ok((Self::new(name, NodeKind::Cluster(cluster)), opened));
            }
        };
        // A quorum has no wait queue, so no hand-off can be unclaimed.
        let (strays, _) = mpsc::unbounded_channel();
        let push_handler = PushHandler::new(strays, |_| {});
        push_handler.subscribe(notifier);
        let pushes = PushConfig { sink: push_handler, scope: MessageScope::AllSlots, queue: None };
        let (node, opened) = Connection::start(target, clock, config.limits(), Some(pushes)).await;
        Ok((Self::new(name, NodeKind::Server(node)), opened))
    }

    fn new(name: String, kind: NodeKind) -> Self {
        Self { name, kind, times: Arc::default(), server_times: Mutex::default() }
    }

    /// Sends the requests in one write and returns one result each. If `is_tracked`, the node then reports changes of
    /// the locks that it reads.
    pub(crate) async fn send(
        &self,
        requests: &[BallotRequest],
        is_tracked: bool,
    ) -> Vec<Result<Value, BackendError>> {
        match &self.kind {
            NodeKind::Server(node) => {
                let command = |at: usize, by, out: &mut CommandWriter<'_>| {
                    requests[at].command(by, Some(&BallotLog::OF_SERVER), out);
                };
                let prelude = if is_tracked { Prelude::Caching } else { Prelude::None };
                script::run(node, Path::Background, requests.len(), prelude, &command).await
            }
            NodeKind::Cluster(cluster) => {
                let routed = cluster.router().route(
                    requests,
                    // The second time without its ballot log.
                    IfDivided::SendSeparately,
                    |request| &request.keys,
                    |server, hint, requests| {
                        let command = move |at: usize, by, out: &mut CommandWriter<'_>| {
                            let request: &BallotRequest = &requests[at];
                            let has_log = request.block.is_some()
                                && (hint == RouteHint::Direct
                                    || request.operation == BallotOperation::Propose);
                            let log = has_log.then(|| BallotLog::of_slot(&request.keys));
                            request.command(by, log.as_ref(), out);
                        };
                        let (path, count) = (Path::Background, requests.len());
                        Box::pin(async move {
                            server.run(path, hint, is_tracked, count, &command).await
                        })
                    },
                );
                routed.await
            }
        }
    }

    /// Groups requests for these locks by the server that answers them. Each group is sent on its own, so that a
    /// silent server does not delay the answers of the others.
    pub(crate) fn groups<'a>(&self, locks: impl Iterator<Item = &'a [Key]>) -> Vec<ServerGroup> {
        let cluster = match &self.kind {
            NodeKind::Server(_) => {
                return vec![ServerGroup { indices: None, times: self.times.clone() }];
            }
            NodeKind::Cluster(cluster) => cluster,
        };
        let mut groups: BTreeMap<Option<Address>, Vec<usize>> = BTreeMap::new();
        for (at, keys) in locks.enumerate() {
            groups.entry(cluster.server_of(keys)).or_default().push(at);
        }
        let group = |(server, indices)| ServerGroup {
            indices: Some(indices),
            times: self.times_of(server),
        };
        groups.into_iter().map(group).collect()
    }

    fn times_of(&self, server: Option<Address>) -> Arc<ResponseTimes> {
        let Some(server) = server else { return self.times.clone() };
        let mut times = self.server_times.lock();
        times.entry(server).or_default().clone()
    }

    /// A problem of connections that work.
    pub(crate) fn warning(&self) -> Option<Warning> {
        match &self.kind {
            NodeKind::Server(node) => node.warning(),
            NodeKind::Cluster(cluster) => cluster.warning(),
        }
    }

    /// Whether the node sends change notifications.
    pub(crate) fn reports_changes(&self) -> bool {
        match &self.kind {
            NodeKind::Server(node) => node.push_support().tracking,
            NodeKind::Cluster(cluster) => cluster.reports_changes(),
        }
    }

    pub(crate) fn close(&self) {
        match &self.kind {
            NodeKind::Server(node) => node.close(),
            NodeKind::Cluster(cluster) => cluster.end(),
        }
    }
}

/// The node `name` has not answered for `waited`.
pub(crate) fn timeout_error(name: &str, waited: Duration) -> BackendError {
    let message = format!("Redis at {name} did not answer within {:?}", rounded(waited));
    BackendError::new(FailureKind::MaybeApplied, message)
        .remedy("check that the node is up and reachable; its connection comes back on its own")
}

/// The requests of a call that one server answers.
pub(crate) struct ServerGroup {
    /// Their indices in the call, in order; `None` for all.
    indices: Option<Vec<usize>>,
    pub(crate) times: Arc<ResponseTimes>,
}

impl ServerGroup {
    /// The entries of `all` that belong to this group.
    pub(crate) fn select<'a, T: Clone>(&self, all: &'a [T]) -> Cow<'a, [T]> {
        match &self.indices {
            None => all.into(),
            Some(indices) => indices.iter().map(|at| all[*at].clone()).collect(),
        }
    }

    /// The indices of this group's requests in a call of `count`.
    pub(crate) fn indices(&self, count: usize) -> Vec<usize> {
        self.indices.clone().unwrap_or_else(|| (0..count).collect())
    }

    /// Pairs each answer with the index of its request.
    pub(crate) fn with_indices<T>(&self, answers: Vec<T>) -> Vec<(usize, T)> {
        match &self.indices {
            None => answers.into_iter().enumerate().collect(),
            Some(indices) => indices.iter().copied().zip(answers).collect(),
        }
    }
}
