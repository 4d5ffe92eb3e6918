//! What the nodes tell of themselves: whether they are fit, and who they are.

use std::time::{Duration, SystemTime};

use redis::{Pipeline, Value};
use tokio::time::timeout;

use super::{fence_block, silence};
use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::conn::connection::Node;
use crate::backend::redis::diagnostics::{self, ClockDistance, Info};
use crate::backend::redis::quorum::node::{Body, Member};
use crate::backend::redis::quorum::vote_count::Tally;
use crate::backend::{BackendError, Warning};

/// What one node has told.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) warnings: Vec<Warning>,
    /// By which its servers are known from others. None of those that may not be asked.
    ids: Vec<String>,
    /// A server that is named as if it were a node, and is a part of one.
    is_part: bool,
    /// A server that was named by its address, and follows another one: it takes no locks.
    is_replica: bool,
    /// How far the clocks of its servers are from ours.
    distances: Vec<ClockDistance>,
    /// What is wrong with it, or with one of its servers.
    pub(crate) failure: Option<BackendError>,
}

impl Member {
    /// Asks the node. What it may not be asked it does not tell.
    pub(crate) async fn tell(&self, request_timeout: Duration) -> Told {
        let mut told = Told::default();
        let asked = async {
            match &self.body {
                Body::Server(node) => {
                    let info = told.ask(node, &self.name).await?;
                    told.is_part = info.is_part();
                    // One that sentinels name as the master is on its way to be one.
                    told.is_replica = info.is_replica() && !node.finds_masters();
                    told.ids.extend(info.run_id().map(str::to_owned));
                }
                Body::Cluster(cluster) => {
                    told.ids = cluster.ids();
                    told.ask_all(cluster).await.map_err(|error| {
                        let text = format!("{}: {}", self.name, error.message());
                        BackendError::new(error.kind(), text).remedy(error.remedy_text())
                    })?;
                }
            }
            Ok(())
        };
        let asked = timeout(request_timeout, asked).await;
        told.failure = asked.unwrap_or_else(|_| Err(silence(&self.name, request_timeout))).err();
        told
    }
}

impl Told {
    async fn ask_all(&mut self, cluster: &Cluster) -> Result<(), BackendError> {
        for server in cluster.servers().await? {
            self.ask(server.node(), &server.node().server()).await?;
        }
        Ok(())
    }

    /// One server more.
    async fn ask(&mut self, node: &Node, name: &str) -> Result<Info, BackendError> {
        let mut questions = Pipeline::with_capacity(5);
        questions.add_command(redis::cmd("PING")).add_command(diagnostics::question());
        questions.add_command(redis::cmd("TIME"));
        for question in diagnostics::more_questions() {
            questions.add_command(question);
        }
        let mut answers = node.send_all(&questions).await?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
        // The one that anybody may ask.
        next().map_err(|error| node.failure(error))?;
        let (info, time) = (next(), next());
        // That a node must not be a part of a cluster is said of the node.
        let for_all = false;
        let more: Vec<_> = answers.collect();
        self.warnings.extend(diagnostics::warnings(name, for_all, &info, &more));
        let distance = |time| diagnostics::clock_distance(&time, SystemTime::now());
        self.distances.extend(time.ok().and_then(distance));
        Ok(Info::of(&info))
    }
}

/// The first of these nodes, each with its name, that does not fail independently of the others, and why.
pub(crate) fn dependent(told: &[(&str, &Told)]) -> Option<Dependent> {
    for (at, (name, one)) in told.iter().enumerate() {
        if one.is_part {
            return Some(Dependent::Part((*name).to_owned()));
        }
        if one.is_replica {
            return Some(Dependent::Replica((*name).to_owned()));
        }
        // Who may not be asked is believed to have named different ones.
        let is_same = |other: &Told| other.ids.iter().any(|id| one.ids.contains(id));
        if let Some((other, _)) = told[..at].iter().find(|(_, other)| is_same(other)) {
            return Some(Dependent::Same((*other).to_owned(), (*name).to_owned()));
        }
    }
    None
}

/// What fails together and would vote as if it did not.
pub(crate) enum Dependent {
    /// A part of a cluster, by itself.
    Part(String),
    /// A replica: its master has the locks.
    Replica(String),
    /// Two nodes with a server in common.
    Same(String, String),
}

impl Dependent {
    pub(crate) fn cause(&self) -> String {
        match self {
            Self::Part(name) => format!(
                "Redis at {name} is a part of a Redis Cluster, and refuses the keys of all other parts"
            ),
            Self::Replica(name) => {
                format!("Redis at {name} is a replica, takes no locks, and fails with its master")
            }
            Self::Same(one, other) if one == other => {
                format!("{one} is named twice: its one failure would count as two")
            }
            Self::Same(one, other) => format!(
                "{one} and {other} are the same server, or have one in common: its one failure would count as two"
            ),
        }
    }

    pub(crate) const fn remedy(&self) -> &'static str {
        match self {
            Self::Part(_) => {
                "name the whole cluster as one node: `redis+cluster://host` instead of `redis://host`"
            }
            Self::Replica(_) => {
                "name its master instead, or the sentinels that know the master: `redis+sentinel://host:26379/service`"
            }
            Self::Same(..) => {
                "name servers that fail independently of each other, each once; several databases of one server are one node"
            }
        }
    }
}

/// What there is to be warned of in a quorum of these nodes, each with its name.
pub(crate) fn warnings(told: &[(&str, &Told)]) -> Vec<Warning> {
    /// More than a network explains, and than anybody wants.
    const FAR: Duration = Duration::from_secs(1);
    let mut warnings: Vec<_> =
        told.iter().flat_map(|(_, told)| told.warnings.iter().cloned()).collect();
    let clocks =
        || told.iter().flat_map(|(name, told)| told.distances.iter().map(|far| (*name, *far)));
    let pairs = clocks().flat_map(|one| clocks().map(move |other| (one, other)));
    let furthest = pairs.max_by_key(|((_, one), (_, other))| one.to(*other));
    if let Some(((one, here), (other, there))) = furthest
        && here.to(there) > FAR
    {
        let text = format!("the clocks of {one} and {other} are {:?} apart", here.to(there));
        warnings.push(Warning::new(
            text,
            "synchronise them: after the loss of a node's data fences are in order only as far as clocks agree",
        ));
    }
    warnings.extend(own_clock(told));
    warnings
}

/// Whether the clock of this machine is so far from those of a majority that fences are refused, or will be soon.
fn own_clock(told: &[(&str, &Told)]) -> Option<Warning> {
    let far_of = |told: &Told| told.distances.iter().map(|distance| distance.to_us()).max();
    let mut distances: Vec<_> =
        told.iter().map(|(_, told)| far_of(told).unwrap_or_default()).collect();
    distances.sort_unstable();
    // That of the nearest node of the majority that is furthest away.
    let far = *distances.get(told.len() - Tally::majority_of(told.len()))?;
    (far > fence_block::AHEAD / 2).then(|| {
        let text = format!(
            "the clock of this machine is {far:?} or more from those of most nodes: beyond {:?} no lock with a fence is granted",
            fence_block::AHEAD
        );
        Warning::new(text, crate::backend::redis::quorum::message::SYNCHRONISE)
    })
}
