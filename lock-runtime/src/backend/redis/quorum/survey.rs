//! What the nodes tell of themselves: whether they are fit, and who they are.

use std::time::{Duration, SystemTime};

use redis::{FromRedisValue, Pipeline};
use tokio::time::timeout;

use super::member::{Body, Member};
use super::silence;
use crate::backend::redis::check::{self, ClockDistance};
use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::node::Node;
use crate::backend::{BackendError, Warning};

/// What one node has told.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) warnings: Vec<Warning>,
    /// By which its servers are known from others. None of those that may not be asked.
    ids: Vec<String>,
    /// A server that is named as if it were a node, and is a part of one.
    is_part: bool,
    /// How far the clocks of its servers are from ours.
    distances: Vec<ClockDistance>,
    /// What is wrong with it, or with one of its servers.
    pub(super) failure: Option<BackendError>,
}

impl Member {
    /// Asks the node. What it may not be asked it does not tell.
    pub(super) async fn tell(&self, patience: Duration) -> Told {
        let mut told = Told::default();
        match &self.body {
            Body::Server(node) => {
                let asked = timeout(patience, told.ask(node, &self.name, true)).await;
                told.failure = asked.unwrap_or_else(|_| Err(silence(&self.name, patience))).err();
            }
            Body::Cluster(cluster) => {
                let asked = timeout(patience, told.ask_all(cluster)).await;
                let asked = asked.unwrap_or_else(|_| Err(silence(&self.name, patience)));
                told.ids = cluster.ids();
                told.failure = asked.err().map(|error| {
                    let text = format!("{}: {}", self.name, error.message());
                    BackendError::new(error.failure(), text).remedy(error.remedy_text())
                });
            }
        }
        told
    }
}

impl Told {
    async fn ask_all(&mut self, cluster: &Cluster) -> Result<(), BackendError> {
        for server in cluster.servers().await? {
            self.ask(server.node(), &server.node().server(), false).await?;
        }
        Ok(())
    }

    /// One server more; `is_alone` if it is to have all keys.
    async fn ask(&mut self, node: &Node, name: &str, is_alone: bool) -> Result<(), BackendError> {
        let mut questions = Pipeline::with_capacity(5);
        questions.add_command(redis::cmd("PING")).add_command(check::question());
        questions.add_command(redis::cmd("TIME"));
        for question in check::more_questions() {
            questions.add_command(question);
        }
        let mut answers = node.send_all(&questions).await?.into_iter();
        // The one that anybody may ask.
        if let Some(Err(error)) = answers.next() {
            return Err(node.failure(error));
        }
        let (Some(info), Some(time)) = (answers.next(), answers.next()) else { return Ok(()) };
        let text = info.as_ref().ok().and_then(|info| String::from_redis_value_ref(info).ok());
        let lines = text.iter().flat_map(|text| text.lines());
        // Another one for every start.
        let ids = lines.filter_map(|line| line.strip_prefix("run_id:")).map(str::trim);
        self.ids.extend(ids.filter(|id| !id.is_empty()).map(str::to_owned));
        self.is_part |= is_alone && check::is_part(&info);
        self.warnings.extend(check::warnings(name, is_alone, &info, &answers.collect::<Vec<_>>()));
        let distance = |time| check::clock_distance(&time, SystemTime::now());
        self.distances.extend(time.ok().and_then(distance));
        Ok(())
    }
}

/// The first of these nodes, each with its name, that does not fail independently of the others, and why.
pub(super) fn dependent(told: &[(&str, &Told)]) -> Option<Dependent> {
    for (at, (name, one)) in told.iter().enumerate() {
        if one.is_part {
            return Some(Dependent::Part((*name).to_owned()));
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
pub(super) enum Dependent {
    /// A part of a cluster, by itself.
    Part(String),
    /// Two nodes with a server in common.
    Same(String, String),
}

impl Dependent {
    pub(super) fn cause(&self) -> String {
        match self {
            Self::Part(name) => format!(
                "Redis at {name} is a part of a Redis Cluster, and refuses the keys of all other parts"
            ),
            Self::Same(one, other) if one == other => {
                format!("{one} is named twice: its one failure would count as two")
            }
            Self::Same(one, other) => format!(
                "{one} and {other} are the same server, or have one in common: its one failure would count as two"
            ),
        }
    }

    pub(super) const fn remedy(&self) -> &'static str {
        match self {
            Self::Part(_) => {
                "name the whole cluster as one node: `redis+cluster://host` instead of `redis://host`"
            }
            Self::Same(..) => {
                "name servers that fail independently of each other, each once; several databases of one server are one node"
            }
        }
    }
}

/// What there is to be warned of in a quorum of these nodes, each with its name.
pub(super) fn warnings(told: &[(&str, &Told)]) -> Vec<Warning> {
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
    warnings
}
