//! The requests that a connection sends together.
//!
//! Statements cost a flush of the server's disk each, so all requests of a kind go in one statement. A statement changes the row of
//! a key once at most, so requests for one key go in different statements. All statements lock rows in the order of
//! their keys: no two wait for each other in a circle.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

use crate::backend::postgres::diagnostics;
use crate::backend::postgres::job::{Jobs, answer};
use crate::backend::postgres::schema::Statements;
use crate::backend::postgres::server_error::failure;
use crate::backend::postgres::session::Session;
use crate::backend::queue_events::QueueEvents;
use crate::base::key::Key;

/// What the statements of a batch need.
pub(crate) struct Batch<'a> {
    pub(super) session: &'a Session,
    pub(super) statements: &'a Statements,
    pub(super) events: &'a QueueEvents,
    /// The channel on which this process receives notifications, or nothing.
    pub(super) channel: String,
}

impl Batch<'_> {
    /// Sends all requests and answers each.
    pub(crate) async fn run(&self, jobs: Jobs) {
        let Jobs { acquires, releases, renewals, reads, health, probes, .. } = jobs;
        // An acquire that its caller has given up comes before the release that undoes it.
        if !acquires.is_empty() {
            self.acquire(acquires).await;
        }
        if !releases.is_empty() {
            self.release(releases).await;
        }
        if !renewals.is_empty() {
            self.renew(renewals).await;
        }
        for (lease, reply) in reads {
            answer(reply, self.is_held(&lease).await);
        }
        for reply in health {
            let settings = &self.statements.settings;
            answer(reply, diagnostics::warnings(self.session, settings, self.is_notified()).await);
        }
        for reply in probes {
            answer(reply, self.client().check_connection().await.map_err(failure));
        }
    }

    pub(super) async fn query(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, Error> {
        self.client().query_typed(statement, parameters).await
    }

    pub(super) fn client(&self) -> &Client {
        &self.session.client
    }

    /// The channel as a value of a statement.
    pub(super) fn channel(&self) -> Parameter<'_> {
        (&self.channel, Type::TEXT)
    }

    /// Whether this process receives notifications.
    pub(super) fn is_notified(&self) -> bool {
        !self.channel.is_empty()
    }
}

/// Locks the rows of `keys`, runs one statement that sees every change made under these locks, and commits. All in one
/// write, because no part depends on an answer.
pub(super) async fn in_transaction(
    client: &Client,
    lock_rows: &str,
    keys: Parameter<'_>,
    (statement, parameters): (&str, &[Parameter<'_>]),
) -> Result<Vec<Row>, Error> {
    let keys = [keys];
    let (began, locked, rows, committed) = tokio::join!(
        biased;
        client.batch_execute("BEGIN"),
        client.query_typed(lock_rows, &keys),
        client.query_typed(statement, parameters),
        // Behind an error this rolls back.
        client.batch_execute("COMMIT"),
    );
    began?;
    locked?;
    let rows = rows?;
    committed?;
    Ok(rows)
}

/// A value of a statement, and its type.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

pub(super) type Parameters<'a> = Vec<Parameter<'a>>;

/// Splits `requests` so that no two of one part have a key in common. Their order stays for each key.
pub(super) fn by_distinct_keys<T>(
    requests: Vec<T>,
    keys: impl Fn(&T) -> &Arc<[Key]>,
) -> Vec<Vec<T>> {
    let mut parts: Vec<(HashSet<Key>, Vec<T>)> = Vec::new();
    for request in requests {
        let wanted = keys(&request).clone();
        let behind =
            parts.iter().rposition(|(taken, _)| wanted.iter().any(|key| taken.contains(key)));
        let at = behind.map_or(0, |last| last + 1);
        if at == parts.len() {
            parts.push((HashSet::new(), Vec::new()));
        }
        parts[at].0.extend(wanted.iter().cloned());
        parts[at].1.push(request);
    }
    parts.into_iter().map(|(_, requests)| requests).collect()
}

pub(super) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_one_key_go_in_different_statements_and_in_order() {
        let request = |number: u32, keys: &[&str]| -> (u32, Arc<[Key]>) {
            (number, keys.iter().copied().map(Key::from).collect())
        };
        let requests = vec![
            request(1, &["a"]),
            request(2, &["b"]),
            request(3, &["a", "b"]),
            request(4, &["c"]),
            request(5, &["a"]),
        ];
        let parts = by_distinct_keys(requests, |(_, keys)| keys);
        let numbers: Vec<Vec<u32>> =
            parts.iter().map(|part| part.iter().map(|(number, _)| *number).collect()).collect();
        assert_eq!(numbers, [vec![1, 2, 4], vec![3], vec![5]]);
    }
}
