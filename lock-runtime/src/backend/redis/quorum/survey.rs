//! What the nodes tell of themselves: whether they are fit, and who they are.

use std::time::{Duration, SystemTime};

use redis::{FromRedisValue, Pipeline};

use super::member::{Body, Member};
use crate::backend::redis::check::{self, ClockDistance};
use crate::backend::redis::cluster::Cluster;
use crate::backend::redis::node::Node;
use crate::backend::{BackendError, Warning};

/// What one node has told.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) warnings: Vec<Warning>,
    /// One for each of its servers, and another for every start. None of those that may not be asked.
    pub(super) run_ids: Vec<String>,
    /// How far the clocks of its servers are from ours.
    distances: Vec<ClockDistance>,
}

impl Member {
    /// Asks the node. What it may not be asked it does not tell.
    pub(super) async fn tell(&self) -> Result<Told, BackendError> {
        let mut told = Told::default();
        match &self.body {
            Body::Server(node) => told.ask(node, &self.name, true).await?,
            Body::Cluster(cluster) => {
                let told = told.ask_all(cluster).await;
                told.map_err(|error| {
                    let text = format!("{}: {}", self.name, error.message());
                    BackendError::new(error.failure(), text).remedy(error.remedy_text())
                })?;
            }
        }
        Ok(told)
    }
}

impl Told {
    async fn ask_all(&mut self, cluster: &Cluster) -> Result<(), BackendError> {
        for server in cluster.servers().await? {
            self.ask(server.node(), &server.node().server(), false).await?;
        }
        Ok(())
    }

    /// One server more; `is_alone` if it has all keys.
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
        self.run_ids
            .extend(lines.filter_map(|line| Some(line.strip_prefix("run_id:")?.trim().to_owned())));
        self.warnings.extend(check::warnings(name, is_alone, &info, &answers.collect::<Vec<_>>()));
        let distance = |time| check::clock_distance(&time, SystemTime::now());
        self.distances.extend(time.ok().and_then(distance));
        Ok(())
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
