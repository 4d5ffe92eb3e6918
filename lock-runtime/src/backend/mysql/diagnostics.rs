//! Settings and states of a server by which locks could be lost.

use std::collections::HashMap;
use std::time::Duration;

use crate::backend::clock_distance::ClockDistance;
use crate::backend::mysql::batch::{MysqlBatch, incomplete};
use crate::backend::mysql::script::{ByteList, Literal, SqlScript};
use crate::backend::mysql::server_error::read_only;
use crate::backend::sql::tables::Pins;
use crate::backend::{BackendError, FailureKind, Warning};
use crate::base::clock;

/// What is warned of, by its text and its remedy, in the order of the columns of `settings.sql`.
const FOUND: [(&str, &str); 2] = [
    (
        "MySQL answers before it flushes (`innodb_flush_log_at_trx_commit` is not 1), so a crash can free locks",
        "set `innodb_flush_log_at_trx_commit = 1`, or have the protected resource check fences",
    ),
    (
        "the binary log is not flushed with each commit (`sync_binlog` is not 1), so a crash and a failover can free locks",
        "set `sync_binlog = 1`, or have the protected resource check fences",
    ),
];

impl MysqlBatch<'_> {
    /// The warnings about the server.
    pub(super) async fn health(&mut self) -> Result<Vec<Warning>, BackendError> {
        let database = &self.state.connector.database;
        let (schema, prefix) = match database.params.table.split_once('.') {
            Some((schema, prefix)) => (schema, prefix),
            None => {
                (database.database.as_deref().unwrap_or_default(), database.params.table.as_str())
            }
        };
        let mut names = ByteList::default();
        names.push(&[prefix.as_bytes(), b"_lease"]);
        names.push(&[prefix.as_bytes(), b"_queue"]);
        if self.statements().pins == Pins::On {
            names.push(&[prefix.as_bytes(), b"_fence"]);
        }
        let values = [("schema", Literal::Bytes(schema.as_bytes())), ("names", names.as_literal())];
        let statements = self.statements();
        let script = SqlScript::of(&statements.settings, &values);
        let sent = clock::wall();
        let answered = self.execute(&script, usize::MAX).await?;
        let asked = sent..=clock::wall();
        let [settings, states] = answered.sets.as_slice() else { return Err(incomplete()) };
        let settings = settings.first().ok_or_else(incomplete)?;
        if settings.is_true(0) {
            return Err(read_only(&self.state.connector.server()));
        }
        if settings.is_true(3) {
            let message = "the tables of the locks have an engine without transactions";
            return Err(BackendError::new(FailureKind::Rejected, message).remedy(
                "run `ALTER TABLE lock_lease ENGINE = InnoDB`, and the same for the other tables of the locks",
            ));
        }
        let states: HashMap<&str, &str> =
            states.iter().filter_map(|row| Some((row.text(0)?, row.text(1)?))).collect();
        let mut warnings: Vec<_> = (1..)
            .zip(FOUND)
            .filter(|(column, _)| settings.is_true(*column))
            .map(|(_, (text, remedy))| Warning::new(text, remedy))
            .collect();
        // A clock before 1970 has no distance.
        let clock = settings.number(4).and_then(|micros| u64::try_from(micros).ok());
        let distance =
            clock.and_then(|micros| ClockDistance::of(Duration::from_micros(micros), &asked));
        let server = self.state.connector.server();
        warnings.extend(distance.and_then(|it| it.warning(format_args!("MySQL at {server}"))));
        warnings.extend(of_replication(&states));
        if self.replicates().await {
            warnings.push(Warning::new(
                "this server replicates from another one, which does not know of locks that are taken here",
                "point the URL at the primary, and set `read_only` on replicas",
            ));
        }
        if self.channel.is_empty() {
            warnings.push(Warning::new(
                "the server refuses `GET_LOCK`, so waiters of ended processes are not found immediately",
                "connect to the server itself, not through a proxy that refuses it",
            ));
        }
        Ok(warnings)
    }

    /// Whether the server has a primary. Unknown without the right to ask.
    async fn replicates(&mut self) -> bool {
        for statement in ["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"] {
            let script = SqlScript::verbatim(statement);
            if let Ok(answered) = self.execute(&script, usize::MAX).await {
                return answered.sets.iter().any(|rows| !rows.is_empty());
            }
        }
        false
    }
}

fn of_replication(states: &HashMap<&str, &str>) -> Vec<Warning> {
    let count = |name| states.get(name).and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
    let is_on = |name| states.get(name).is_some_and(|state| *state == "ON");
    let mut warnings = Vec::new();
    let is_acknowledged =
        is_on("Rpl_semi_sync_master_status") || is_on("Rpl_semi_sync_source_status");
    if count("Slaves_connected") > 0 && !is_acknowledged {
        warnings.push(Warning::new(
            "a failover can free the latest locks, because replication is asynchronous",
            "enable semi-synchronous replication, or have the protected resource check fences",
        ));
    }
    if count("wsrep_cluster_size") > 1 {
        warnings.push(Warning::new(
            "the server is a node of a cluster, and locks are safe only while all pools use the same node",
            "name one node in the URL of all processes, or put it first in all URLs",
        ));
    }
    warnings
}
