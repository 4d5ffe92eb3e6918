//! Checks whether the nodes are fit for a quorum: independent of each other, configured well, with synchronised clocks.

use std::time::Duration;

use tokio::time::timeout;

use crate::backend::clock_distance::ClockDistance;
use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::cluster::fan_out::{BoxedCall, StragglerLimit, fan_out};
use crate::backend::redis::diagnostics::{self, Info};
use crate::backend::redis::protocol::diagnosis::ServerAnswers;
use crate::backend::redis::quorum::fence_block::{MAX_AHEAD, SYNCHRONISE};
use crate::backend::redis::quorum::node::{NodeKind, QuorumNode, timeout_error};
use crate::backend::redis::quorum::url::Dependent;
use crate::backend::redis::quorum::vote_count::VoteCount;
use crate::backend::{BackendError, Finding, Warning};

/// The state of one node, as the node reports it. What the user may not read there is missing.
#[derive(Debug, Default)]
pub(crate) struct NodeReport {
    name: String,
    warnings: Vec<Warning>,
    findings: Vec<Finding>,
    /// Identify its servers.
    ids: Vec<String>,
    /// The node is a single server that belongs to a cluster.
    is_part: bool,
    /// The node was named by its address and is a replica: it accepts no locks.
    is_replica: bool,
    /// Clock differences between its servers and this machine.
    distances: Vec<ClockDistance>,
    /// The failure of the node, or of one of its servers.
    pub(crate) failure: Option<BackendError>,
}

impl NodeReport {
    /// Queries the node. After `request_timeout` the report contains what was received so far, and the timeout as its
    /// failure.
    pub(crate) async fn of(node: &QuorumNode, request_timeout: Duration) -> Self {
        let mut report = Self { name: node.name.clone(), ..Self::default() };
        let queried = timeout(request_timeout, report.query(node, request_timeout * 9 / 10)).await;
        report.failure =
            queried.unwrap_or_else(|_| Err(timeout_error(&node.name, request_timeout))).err();
        report
    }

    /// The checks of its servers.
    pub(crate) fn findings(&self) -> impl Iterator<Item = Finding> {
        self.findings.iter().cloned()
    }

    async fn query(&mut self, node: &QuorumNode, limit: Duration) -> Result<(), BackendError> {
        match &node.kind {
            NodeKind::Server(server) => {
                let info = self.add_server(ServerAnswers::of(server).await?, &node.name);
                self.is_part = info.is_part();
                // A server that its sentinels report as the master may not be promoted yet.
                self.is_replica = info.is_replica() && !server.has_sentinels();
                self.ids.extend(info.run_id().map(str::to_owned));
                Ok(())
            }
            NodeKind::Cluster(cluster) => {
                self.ids = cluster.ids();
                self.query_servers(cluster, limit).await.map_err(|error| {
                    let text = format!("{}: {}", node.name, error.message());
                    BackendError::new(error.kind(), text).remedy(error.remedy_text())
                })
            }
        }
    }

    /// Servers that do not answer within `limit` are left out.
    async fn query_servers(
        &mut self,
        cluster: &Cluster,
        limit: Duration,
    ) -> Result<(), BackendError> {
        let servers = cluster.servers().await?;
        let queries = servers
            .iter()
            .map(|server| -> BoxedCall<'_, _> { Box::pin(ServerAnswers::of(server.connection())) });
        let stragglers = StragglerLimit { limit, from_start: true };
        let answers = fan_out(queries.collect(), Some(stragglers)).await;
        let mut failure = Ok(());
        for (server, answers) in servers.iter().zip(answers) {
            let name = server.connection().server();
            match answers.unwrap_or_else(|| Err(timeout_error(&name, limit))) {
                Ok(answers) => drop(self.add_server(answers, &name)),
                Err(error) => failure = failure.and(Err(error)),
            }
        }
        failure
    }

    fn add_server(&mut self, answers: ServerAnswers, name: &str) -> Info {
        let ServerAnswers { info, time, settings, asked } = answers;
        // A node that belongs to a cluster is reported by `dependent` instead.
        let for_all = false;
        self.findings.extend(diagnostics::findings(name, for_all, &info, &settings));
        self.findings.push(diagnostics::clock_finding(name, &time, &asked));
        self.warnings.extend(diagnostics::warnings(name, for_all, &info, &settings));
        let distance = |time| diagnostics::clock_distance(&time, &asked);
        self.distances.extend(time.ok().and_then(distance));
        Info::of(&info)
    }
}

/// The first node that does not fail independently of the others.
pub(crate) fn dependent(reports: &[NodeReport]) -> Option<Dependent> {
    for (at, report) in reports.iter().enumerate() {
        if report.is_part {
            return Some(Dependent::Part(report.name.clone()));
        }
        if report.is_replica {
            return Some(Dependent::Replica(report.name.clone()));
        }
        // Nodes without readable ids count as different.
        let is_same = |other: &&NodeReport| other.ids.iter().any(|id| report.ids.contains(id));
        if let Some(other) = reports[..at].iter().find(is_same) {
            return Some(Dependent::Same(other.name.clone(), report.name.clone()));
        }
    }
    None
}

/// Warnings about the nodes, each on its own and in comparison.
pub(crate) fn warnings(reports: &[NodeReport]) -> Vec<Warning> {
    let alone = reports.iter().flat_map(|report| report.warnings.iter().cloned());
    alone.chain(between(reports)).collect()
}

/// Warnings about the nodes in comparison.
pub(crate) fn between(reports: &[NodeReport]) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let clocks = || {
        reports.iter().flat_map(|report| report.distances.iter().map(|far| (&report.name, *far)))
    };
    let pairs = clocks().flat_map(|one| clocks().map(move |other| (one, other)));
    let furthest = pairs.max_by_key(|((_, one), (_, other))| one.to(*other));
    if let Some(((one, here), (other, there))) = furthest
        && here.to(there) > ClockDistance::FAR
    {
        let text = format!("the clocks of {one} and {other} are {:?} apart", here.to(there));
        warnings.push(Warning::new(
            text,
            "synchronise them: after the loss of a node's data fences are in order only as far as clocks agree",
        ));
    }
    warnings.extend(own_clock(reports));
    warnings
}

/// A warning if the clock of this machine is so far from those of a majority that fences are refused, or will be soon.
fn own_clock(reports: &[NodeReport]) -> Option<Warning> {
    let far_of = |report: &NodeReport| report.distances.iter().map(|distance| distance.abs()).max();
    let mut distances: Vec<_> =
        reports.iter().map(|report| far_of(report).unwrap_or_default()).collect();
    distances.sort_unstable();
    // At least a majority of the nodes is this far away or further.
    let far = *distances.get(reports.len() - VoteCount::majority_of(reports.len()))?;
    (far > MAX_AHEAD / 2).then(|| {
        let text = format!(
            "the clock of this machine is {far:?} or more from those of most nodes: beyond {MAX_AHEAD:?} no lock with a fence is granted"
        );
        Warning::new(text, SYNCHRONISE)
    })
}
