//! The requests that a connection sends together.
//!
//! Each statement costs a flush of the server's disk, so all requests of a kind go in one statement. A statement changes the row
//! of a key at most once, so requests for one key go in different statements. All statements lock rows in the order of their
//! keys: no two wait for each other in a circle.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row, Statement};

use crate::backend::postgres::diagnostics;
use crate::backend::postgres::schema::{Parameter, Sql, Statements};
use crate::backend::postgres::server_error::{blocked_commit, failure};
use crate::backend::postgres::session::{Connector, Session};
use crate::backend::queue_events::QueueEvents;
use crate::backend::sql::claim_queue::ClaimStep;
use crate::backend::sql::job::{Jobs, answer, dropped_tables, moved, no_answer};
use crate::backend::sql::pending_jobs::PendingJobs;
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{self, Clock};

/// What the statements of a batch need.
pub(crate) struct Batch<'a> {
    pub(super) session: &'a Session,
    /// For error texts.
    pub(super) server: &'a str,
    pub(super) statements: &'a Statements,
    pub(super) events: &'a QueueEvents,
    /// The channel on which this process receives notifications, or nothing.
    pub(super) channel: String,
    pub(super) clock: Clock,
    /// The time limit for the answer to one statement.
    limit: Duration,
    /// Whether a new connection makes missing tables.
    creates: bool,
    /// Why the connection is no longer usable.
    broken: OnceLock<BackendError>,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(
        session: &'a Session,
        connector: &'a Connector,
        server: &'a str,
        events: &'a QueueEvents,
        channel: String,
        clock: Clock,
    ) -> Self {
        let limit = 2 * connector.limits.request;
        let (statements, broken) = (&connector.statements, OnceLock::new());
        let creates = connector.database.params.creates;
        if !connector.is_last_server(session) {
            broken.get_or_init(moved);
        }
        Self { session, server, statements, events, channel, clock, limit, creates, broken }
    }

    /// Sends all requests and answers each, except the ones that stay in `pending`.
    pub(crate) async fn run(&self, mut jobs: Jobs, pending: &mut PendingJobs) {
        pending.begin_turn(&mut jobs);
        let PendingJobs { claims, renewals } = pending;
        while let Some(step) = claims.next_step() {
            match step {
                ClaimStep::Release(requests) => self.release(requests, claims).await,
                ClaimStep::Single(requests) => self.acquire_single(requests, claims).await,
                ClaimStep::Several(request) => self.acquire_several(request).await,
            }
        }
        let renewals = renewals.next_part();
        if !renewals.is_empty() {
            self.renew(renewals).await;
        }
        let Jobs { reads, inspections, lists, health, probes, .. } = jobs;
        if !reads.is_empty() {
            self.are_held(reads).await;
        }
        for (key, reply) in inspections {
            // Earlier requests may have taken longer than the time limit of its caller.
            if !reply.is_closed() {
                answer(reply, self.inspect(&key).await);
            }
        }
        for (from, reply) in lists {
            answer(reply, self.list(&from).await);
        }
        for reply in health {
            let sent = clock::wall();
            let answered = self.query(&self.statements.settings, &[]).await;
            let asked = sent..=clock::wall();
            let found = answered.and_then(|rows| {
                diagnostics::warnings(self.server, &rows, &asked, self.is_notified())
            });
            answer(reply, found);
        }
        for reply in probes {
            answer(reply, self.in_time(self.client().check_connection()).await);
        }
    }

    /// Runs one statement, which commits.
    pub(super) async fn query(
        &self,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, BackendError> {
        self.with_or_without_info(None, statement, parameters).await
    }

    /// Locks the rows of `keys`, runs one statement that sees every change made under these locks, and commits.
    pub(super) async fn in_transaction(
        &self,
        keys: Parameter<'_>,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, BackendError> {
        self.with_or_without_info(Some(keys), statement, parameters).await
    }

    /// Runs `statement`, and again without the column `info` if the server refuses it because of that column. The column may be
    /// missing, or have another type or other rights. No lock depends on it. The session continues without it.
    async fn with_or_without_info(
        &self,
        keys: Option<Parameter<'_>>,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, BackendError> {
        let without_info = statement.without_info.as_deref();
        if let Some(without_info) = without_info.filter(|_| !self.session.has_info()) {
            return self.run_once(keys, without_info, parameters).await;
        }
        let answer = self.run_once(keys.clone(), statement, parameters).await;
        // Nothing was applied then.
        let is_refused = |error: &BackendError| error.kind() == FailureKind::Rejected;
        match without_info {
            Some(without_info) if answer.as_ref().is_err_and(is_refused) => {
                let answer = self.run_once(keys, without_info, parameters).await;
                if answer.is_ok() {
                    self.session.go_on_without_info();
                }
                answer
            }
            _ => answer,
        }
    }

    async fn run_once(
        &self,
        keys: Option<Parameter<'_>>,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, BackendError> {
        if keys.is_some() || !self.session.is_direct {
            return self.transaction(keys, statement, parameters).await;
        }
        let prepared = self.prepared(statement, parameters).await?;
        self.in_time(self.session.run(statement, prepared.as_ref(), parameters)).await
    }

    /// The prepared form of the statement, where the session keeps one.
    async fn prepared(
        &self,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Option<Statement>, BackendError> {
        let prepared = self.in_time(self.session.prepared(statement, parameters)).await;
        // Nothing was run.
        prepared.map_err(BackendError::before_sending)
    }

    /// Like [`in_transaction`](Self::in_transaction), or without locks of its own. All parts go in one write, because none
    /// depends on an answer.
    async fn transaction(
        &self,
        keys: Option<Parameter<'_>>,
        statement: &Sql,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>, BackendError> {
        let (session, client) = (self.session, self.client());
        let locking = match keys {
            Some(keys) => {
                let (lock_rows, keys) = (&self.statements.lock_rows, [keys]);
                Some((lock_rows, self.prepared(lock_rows, &keys).await?, keys))
            }
            None => None,
        };
        let prepared = self.prepared(statement, parameters).await?;
        let lock_rows = async {
            let Some((lock_rows, prepared, keys)) = &locking else { return Ok(()) };
            session.run(lock_rows, prepared.as_ref(), keys).await.map(drop)
        };
        let answers = async {
            let answers = tokio::join!(
                biased;
                client.batch_execute(&session.begin),
                lock_rows,
                session.run(statement, prepared.as_ref(), parameters),
                // After an error this rolls back.
                client.batch_execute("COMMIT"),
            );
            Ok(answers)
        };
        let (began, locked, rows, committed) = self.in_time(answers).await?;
        if let Err(error) = began {
            // Outside a transaction, the statement has committed on its own.
            let error = self.failed(error);
            return Err(if rows.is_ok() { error.after_a_part() } else { error });
        }
        let failed = |error| self.failed(error);
        locked.map_err(failed)?;
        let rows = rows.map_err(failed)?;
        committed.map_err(|error| blocked_commit(&error).unwrap_or_else(|| failed(error)))?;
        Ok(rows)
    }

    /// A server that refuses writes is left: another one may be the primary by now. So is a connection that lacks its
    /// tables, if the next one makes them.
    fn failed(&self, error: Error) -> BackendError {
        let is_read_only = error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION);
        let are_dropped = self.creates && error.code() == Some(&SqlState::UNDEFINED_TABLE);
        let error = if are_dropped { dropped_tables().because(error) } else { failure(error) };
        if is_read_only || are_dropped {
            self.broken.get_or_init(|| error.clone());
        }
        error
    }

    /// The server bounds each statement, so a connection that gives no answer for longer is unusable. Nothing more is sent on it.
    async fn in_time<T>(
        &self,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, BackendError> {
        if let Some(error) = self.broken() {
            return Err(error.clone().before_sending());
        }
        match timeout(self.limit, answer).await {
            Ok(answer) => answer.map_err(|error| self.failed(error)),
            Err(_) => Err(self.broken.get_or_init(no_answer).clone()),
        }
    }

    /// Why the connection is no longer usable.
    pub(crate) fn broken(&self) -> Option<&BackendError> {
        self.broken.get()
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
