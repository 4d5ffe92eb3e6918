//! What the nodes tell of themselves: whether they are fit, and who they are.

use std::time::{Duration, SystemTime};

use redis::{FromRedisValue, Pipeline};

use super::member::Member;
use crate::backend::redis::check::{self, ClockDistance};
use crate::backend::{BackendError, Warning};

/// What one node has told.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) warnings: Vec<Warning>,
    /// Another one for every server and start. Empty if it may not be asked.
    pub(super) run_id: String,
    distance: Option<ClockDistance>,
}

impl Member {
    /// Asks the node. What it may not be asked it does not tell.
    pub(super) async fn tell(&self) -> Result<Told, BackendError> {
        let mut questions = Pipeline::with_capacity(5);
        questions.add_command(redis::cmd("PING")).add_command(check::question());
        questions.add_command(redis::cmd("TIME"));
        for question in check::more_questions() {
            questions.add_command(question);
        }
        let mut answers = self.ask_plainly(&questions).await?.into_iter();
        // The one that anybody may ask.
        if let Some(Err(error)) = answers.next() {
            return Err(self.failure(error));
        }
        let (Some(info), Some(time)) = (answers.next(), answers.next()) else {
            return Ok(Told { warnings: Vec::new(), run_id: String::new(), distance: None });
        };
        let text = info.as_ref().ok().and_then(|info| String::from_redis_value_ref(info).ok());
        let run_id =
            text.iter().flat_map(|text| text.lines()).find_map(|line| line.strip_prefix("run_id:"));
        Ok(Told {
            warnings: check::warnings(&self.name, true, &info, &answers.collect::<Vec<_>>()),
            run_id: run_id.unwrap_or_default().trim().to_owned(),
            distance: time.ok().and_then(|time| check::clock_distance(&time, SystemTime::now())),
        })
    }
}

/// What there is to be warned of in a quorum of these nodes, each with its name.
pub(super) fn warnings(told: &[(&str, &Told)]) -> Vec<Warning> {
    /// More than a network explains, and than anybody wants.
    const FAR: Duration = Duration::from_secs(1);
    let mut warnings: Vec<_> =
        told.iter().flat_map(|(_, told)| told.warnings.iter().cloned()).collect();
    let clocks = || told.iter().filter_map(|(name, told)| Some((*name, told.distance?)));
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
