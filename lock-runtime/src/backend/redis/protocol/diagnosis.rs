//! All checks of one server.

use std::ops::RangeInclusive;
use std::time::SystemTime;

use redis::{Pipeline, RedisError, Value};

use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::diagnostics;
use crate::backend::redis::protocol::scripted_server::ScriptedServer;
use crate::backend::{BackendError, Finding, Warning};
use crate::base::clock;

/// What a server says about itself.
pub(crate) struct ServerAnswers {
    pub(crate) info: Result<Value, RedisError>,
    pub(crate) time: Result<Value, RedisError>,
    pub(crate) settings: Vec<Result<Value, RedisError>>,
    /// The local time at the question and at the answers.
    pub(crate) asked: RangeInclusive<SystemTime>,
}

impl ServerAnswers {
    /// Asks in one write. Fails if the server does.
    pub(crate) async fn of(connection: &Connection) -> Result<Self, BackendError> {
        let mut questions = Pipeline::with_capacity(5);
        questions.add_command(redis::cmd("PING")).add_command(diagnostics::info_command());
        questions.add_command(redis::cmd("TIME"));
        for question in diagnostics::config_commands() {
            questions.add_command(question);
        }
        let sent = clock::wall();
        let mut answers = connection.send_all(&questions).await?.into_iter();
        let asked = sent..=clock::wall();
        let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
        // `PING` is allowed to every user, so its error is an error of the server.
        next().map_err(|error| connection.failure(error))?;
        let (info, time) = (next(), next());
        Ok(Self { info, time, settings: answers.collect(), asked })
    }
}

/// The checks that need neither scripts nor pushes. `for_all`: the server has to serve all keys.
pub(crate) async fn of_server(
    connection: &Connection,
    for_all: bool,
) -> Result<Vec<Finding>, BackendError> {
    let server = connection.server();
    let mut findings = Vec::new();
    if connection.is_minimal() {
        connection.send(&redis::cmd("PING")).await?;
        let unknown = "a proxy is in front of Redis, and hangs up on `INFO`";
        let remedy = "look at the server itself";
        findings.push(Finding::unknown("server", unknown, remedy).at(&*server));
    } else {
        let answers = ServerAnswers::of(connection).await?;
        findings.extend(diagnostics::findings(&server, for_all, &answers.info, &answers.settings));
        findings.push(diagnostics::clock_finding(&server, &answers.time, &answers.asked));
    }
    let warning = connection.warning();
    findings.extend(warning.map(|warning| Finding::warning("connection", &warning).at(&*server)));
    Ok(findings)
}

/// The check whether the server reports changes of keys.
pub(crate) fn of_tracking(server: &str, is_on: bool) -> Finding {
    let finding = if is_on {
        Finding::good("tracking", "a lock that is deleted is reported at once")
    } else {
        let text = format!(
            "Redis at {server} reports no changes of keys: the deletion of a lock is noticed by its next renewal"
        );
        let remedy = "allow `CLIENT TRACKING`, `CLIENT CACHING` and `CLIENT ID` for the login, and RESP3 (`HELLO 3`) in front of the server";
        Finding::warning("tracking", &Warning::new(text, remedy))
    };
    finding.at(server)
}

impl ScriptedServer {
    pub(crate) async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let server = self.connection().server();
        let mut findings = of_server(self.connection(), self.keyspace.is_of_server()).await?;
        findings.push(Finding::good("scripts", "`EVAL` runs").at(&*server));
        findings.push(of_tracking(&server, self.reports_changes()));
        let queue = if self.keeps_wait_queues() {
            Finding::good("wait queue", "a release notifies the next process")
        } else {
            let text = format!(
                "Redis at {server} keeps no wait queues for this login: waiters of several processes are not in order"
            );
            let remedy = "allow `SUBSCRIBE`, `PUBLISH` and the channels `lock_runtime:*` for the login, and the sorted sets beside the locks";
            Finding::warning("wait queue", &Warning::new(text, remedy))
        };
        findings.push(queue.at(server));
        Ok(findings)
    }
}
