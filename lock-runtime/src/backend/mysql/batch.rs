//! The requests that a connection sends together.
//!
//! Each statement costs a flush of the server's disk, so all requests of a kind go in one statement. A script of statements is
//! one packet, so a process that is paused keeps no row locked. All scripts lock rows in the order of their keys.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::backend::mysql::packet::BYTES_IN_LISTS;
use crate::backend::mysql::pool_state::MysqlPoolState;
use crate::backend::mysql::schema::MysqlStatements;
use crate::backend::mysql::script::{ByteList, SqlScript};
use crate::backend::mysql::server_error::{
    LONG_TRANSACTIONS, ends_connection, failure, is_about_info, is_lock_timeout, is_rolled_back,
    lacks_table, of_locked_row,
};
use crate::backend::mysql::session::{Fields, MysqlSession, ScriptAnswer};
use crate::backend::sql::claim_queue::ClaimStep;
use crate::backend::sql::job::{Jobs, PendingRequest, answer, dropped_tables, fail_all, no_answer};
use crate::backend::sql::locked_rows::{LockedRows, fail_locked, split_locked};
use crate::backend::sql::pending_jobs::PendingJobs;
use crate::backend::sql::tables::InfoColumn;
use crate::backend::{BackendError, FailureKind, Limits};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::key::Key;

/// How long an answer to one script may take: longer than the shortest wait for a row that servers can limit, a second.
/// Otherwise a locked row would end the connection.
pub(super) fn script_limit(limits: Limits) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(1_500);
    (2 * limits.request).max(SHORTEST)
}

/// How many rows one statement checks for locks of other sessions.
const LOOKED_TOGETHER: usize = 1_024;

/// How many times a script that was rolled back is sent again.
const REPEATS: u32 = 20;

/// What the statements of a batch need.
pub(crate) struct MysqlBatch<'a> {
    pub(super) session: &'a mut MysqlSession,
    pub(super) state: &'a MysqlPoolState,
    pub(super) locked: &'a mut LockedRows,
    /// The named lock of this process's connection for upkeep, or nothing.
    pub(super) channel: String,
    /// The time limit for the answer to one script.
    limit: Duration,
    /// Why the connection is no longer usable.
    broken: Option<BackendError>,
}

impl<'a> MysqlBatch<'a> {
    pub(crate) fn new(
        session: &'a mut MysqlSession,
        state: &'a MysqlPoolState,
        locked: &'a mut LockedRows,
    ) -> Self {
        let limit = script_limit(state.connector.limits);
        Self { session, state, locked, channel: state.channel().clone(), limit, broken: None }
    }

    /// Sends all requests and answers each, except the ones that stay in `pending`.
    pub(crate) async fn run(&mut self, mut jobs: Jobs, pending: &mut PendingJobs) {
        pending.begin_turn(&mut jobs);
        let PendingJobs { claims, renewals } = pending;
        while let Some(step) = claims.next_step() {
            match step {
                ClaimStep::Release(requests) => self.release(requests).await,
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
                let found = self.inspect(&key).await;
                answer(reply, found);
            }
        }
        for (from, reply) in lists {
            let found = self.list(&from).await;
            answer(reply, found);
        }
        for reply in health {
            let found = self.health().await;
            answer(reply, found);
        }
        for reply in probes {
            let found = self.check().await;
            answer(reply, found);
        }
    }

    /// Runs statements that each commit. A failure after the first `harmless` statements may follow a change.
    pub(super) async fn execute(
        &mut self,
        script: &SqlScript,
        harmless: usize,
    ) -> Result<ScriptAnswer, BackendError> {
        let mut repeats = 0;
        loop {
            let (error, done) = match self.send(script).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            if is_rolled_back(&error) && repeats < REPEATS {
                repeats += 1;
                self.pause(repeats).await;
                continue;
            }
            return Err(if done > harmless { error.after_a_part() } else { error });
        }
    }

    /// Runs statements that commit together, or have no effect.
    pub(super) async fn in_transaction(
        &mut self,
        script: SqlScript,
    ) -> Result<ScriptAnswer, BackendError> {
        let statements = self.statements();
        let script = script.then(&statements.commit, &[]);
        let mut repeats = 0;
        loop {
            let error = match self.send(&script).await {
                Ok(answer) => return Ok(answer),
                Err((error, _)) => error,
            };
            self.roll_back().await;
            if !is_rolled_back(&error) || repeats == REPEATS || self.is_broken() {
                return Err(error);
            }
            repeats += 1;
            self.pause(repeats).await;
        }
    }

    /// The start of a script for [`in_transaction`](Self::in_transaction).
    pub(super) fn begin(&self) -> SqlScript {
        let statements = self.statements();
        SqlScript::of(&statements.clock, &[]).then(&statements.begin, &[])
    }

    /// The statements after the one that failed were not run, so its transaction is still open.
    async fn roll_back(&mut self) {
        if self.is_broken() {
            return;
        }
        let script = SqlScript::of(&self.statements().roll_back, &[]);
        if let Err((error, _)) = self.send(&script).await {
            self.broken = Some(error);
        }
    }

    async fn pause(&self, repeats: u32) {
        sleep(jitter::below(Duration::from_millis(2) * repeats)).await;
    }

    /// The server bounds each statement, so a connection that gives no answer for longer is unusable. Nothing more is sent on it.
    async fn send(&mut self, script: &SqlScript) -> Result<ScriptAnswer, (BackendError, usize)> {
        if let Some(error) = &self.broken {
            return Err((error.clone().before_sending(), 0));
        }
        if let Some(error) = self.session.refuses(script) {
            return Err((error, 0));
        }
        let (error, done) = match timeout(self.limit, self.session.run(script)).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err((error, done)))
                if self.state.connector.database.params.creates && lacks_table(&error) =>
            {
                (dropped_tables().because(error), done)
            }
            Ok(Err((error, done))) => (failure(error), done),
            Err(_) => (no_answer(), 0),
        };
        if ends_connection(&error) {
            self.broken = Some(error.clone());
        }
        Err((error, done))
    }

    /// Whether this connection may still keep locks. Otherwise another one is opened.
    async fn check(&mut self) -> Result<(), BackendError> {
        if let Some(error) = &self.broken {
            return Err(error.clone().before_sending());
        }
        let answered = timeout(self.limit, self.session.check(&self.state.connector)).await;
        let answered = answered.unwrap_or_else(|_| Err(no_answer()));
        self.broken = answered.as_ref().err().cloned();
        answered
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Why the connection is no longer usable.
    pub(crate) fn take_broken(&mut self) -> Option<BackendError> {
        self.broken.take()
    }

    pub(super) fn statements(&self) -> &'a MysqlStatements {
        self.state.connector.statements_for(self.session)
    }

    pub(super) fn now(&self) -> Instant {
        self.state.clock.now()
    }

    /// Fails the requests for rows that another session is known to have locked. Returns the others.
    pub(super) async fn without_locked<R, T>(
        &mut self,
        requests: Vec<PendingRequest<R, T>>,
        keys: impl Fn(&R) -> &[Key],
    ) -> Vec<PendingRequest<R, T>> {
        let suspects = self.locked.suspects(&requests, &keys, self.now());
        if suspects.is_empty() {
            return requests;
        }
        match self.locked_of(suspects.into_iter().collect()).await {
            Ok(locked) => fail_locked(requests, &locked, keys, LONG_TRANSACTIONS),
            Err(error) => {
                fail_all(requests, &error.before_sending());
                Vec::new()
            }
        }
    }

    /// Whether the server has refused a statement for the column `info`: it may be missing, have another type, or other rights.
    /// No lock depends on it. From now on the session leaves the column out.
    pub(super) fn give_up_info_after(&mut self, error: &BackendError) -> bool {
        let is_refused = self.session.info == InfoColumn::Named && is_about_info(error);
        if is_refused {
            self.session.info = InfoColumn::LeftOut;
        }
        is_refused
    }

    /// After a script that failed with `error`: fails the requests for rows that are locked, and returns the others to send
    /// again. If the column `info` was the reason, returns all. For any other reason all fail.
    pub(super) async fn others<R, T>(
        &mut self,
        requests: Vec<PendingRequest<R, T>>,
        keys: impl Fn(&R) -> &[Key],
        error: BackendError,
    ) -> Vec<PendingRequest<R, T>> {
        if self.give_up_info_after(&error) {
            return requests;
        }
        let is_locked = is_lock_timeout(&error);
        if !is_locked || requests.len() < 2 {
            // A row may also be the reason for silence. Its key is looked at before a statement waits for it again.
            if is_locked || self.is_broken() {
                self.remember_locked(requests.iter().flat_map(|(request, _)| keys(request)));
            }
            fail_all(requests, &error);
            return Vec::new();
        }
        let asked = requests.iter().flat_map(|(request, _)| keys(request)).cloned().collect();
        match self.locked_of(asked).await {
            Ok(locked) if !locked.is_empty() => {
                let (blocked, free) = split_locked(requests, &locked, keys);
                fail_all(blocked, &of_locked_row(error));
                free
            }
            // Unlocked by now, or a lock of the table.
            _ => {
                fail_all(requests, &error);
                Vec::new()
            }
        }
    }

    pub(super) fn remember_locked<'k>(&mut self, keys: impl Iterator<Item = &'k Key>) {
        let now = self.now();
        for key in keys {
            self.locked.add(key.clone(), now);
        }
    }

    /// Which of the keys have a row that another transaction has locked for longer than a commit takes.
    async fn locked_of(&mut self, asked: Vec<Key>) -> Result<HashSet<Key>, BackendError> {
        let mut locked = self.locked_now(asked).await?;
        for _ in 0..2 {
            if locked.is_empty() {
                break;
            }
            sleep(Duration::from_millis(5)).await;
            locked = self.locked_now(locked.into_iter().collect()).await?;
        }
        Ok(locked)
    }

    /// Which of the keys have a row that another transaction has locked. Waits for no row.
    async fn locked_now(&mut self, mut asked: Vec<Key>) -> Result<HashSet<Key>, BackendError> {
        asked.sort_unstable();
        asked.dedup();
        let mut locked = HashSet::new();
        for asked in asked.chunks(self.session.parts(LOOKED_TOGETHER, BYTES_IN_LISTS)) {
            let keys = ByteList::of_keys(asked);
            let values = [("keys", keys.as_literal())];
            let script = SqlScript::of(&self.statements().free_rows, &values);
            let answer = self.execute(&script, usize::MAX).await?;
            let [free, all] = answer.sets.as_slice() else { return Err(incomplete()) };
            let texts = |rows: &'_ [Fields]| -> HashSet<Vec<u8>> {
                rows.iter().filter_map(|row| row.bytes(0)).map(<[u8]>::to_vec).collect()
            };
            let (free, all) = (texts(free), texts(all));
            let now = self.now();
            for key in asked {
                let text = key.as_str().as_bytes();
                if all.contains(text) && !free.contains(text) {
                    self.locked.add(key.clone(), now);
                    locked.insert(key.clone());
                } else {
                    self.locked.remove(key);
                }
            }
        }
        Ok(locked)
    }
}

/// The failure of a request whose part of the answer is missing.
#[cold]
pub(super) fn incomplete() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "the answer of MySQL was incomplete")
}
