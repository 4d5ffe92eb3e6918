//! Acquire requests on one connection.

use std::collections::HashMap;
use std::fmt::Write;
use std::time::Duration;

use crate::backend::mysql::batch::{MysqlBatch, incomplete};
use crate::backend::mysql::packet::{BYTES_IN_LISTS, BYTES_OF_TRANSITION, by_count_of_keys};
use crate::backend::mysql::script::{ByteList, Literal, SqlScript, push_bytes};
use crate::backend::mysql::server_error::is_lock_timeout;
use crate::backend::mysql::session::Fields;
use crate::backend::sql::claim_queue::ClaimQueue;
use crate::backend::sql::job::{Acquires, PendingRequest, answer, fail_all};
use crate::backend::sql::queued::queued;
use crate::backend::sql::stored_info::stored_info;
use crate::backend::sql::tables::{InfoColumn, Pins, duration, micros};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, Owner, WaitMode};
use crate::base::fence::Fence;
use crate::base::key::Key;

/// How many requests for free keys one statement serves.
const ACQUIRED_TOGETHER: usize = 1_024;

/// How many owners one transaction queues. Their rows are locked until its flush.
const QUEUED_TOGETHER: usize = 32;

/// The row of a lease, as an answer has it.
struct LeaseRow {
    owner: Option<Owner>,
    expires_in: i64,
    fence: i64,
    contended: bool,
}

impl LeaseRow {
    fn of(row: &Fields) -> Option<Self> {
        Some(Self {
            owner: row.owner(1),
            expires_in: row.number(2)?,
            fence: row.number(3)?,
            contended: row.is_true(4),
        })
    }
}

impl MysqlBatch<'_> {
    /// Tries requests for one key together, by a statement that changes nothing for a key that is held. Requests
    /// that it has not queued when the turn is over go back to `claims`.
    pub(super) async fn acquire_single(&mut self, requests: Acquires, claims: &mut ClaimQueue) {
        let mut requests = self.without_locked(requests, |request| &request.keys).await;
        let acquired_together = self.session.parts(ACQUIRED_TOGETHER, BYTES_IN_LISTS);
        let queued_together = self.session.parts(QUEUED_TOGETHER, BYTES_OF_TRANSITION);
        requests.sort_by(|(one, _), (other, _)| one.keys.cmp(&other.keys));
        let mut refused = Vec::new();
        for mut requests in by_count_of_keys(requests, |_| 1, acquired_together) {
            if self.statements().pins == Pins::On {
                // The fence and the lease change in one transaction, which needs a row to lock.
                refused.extend(self.with_rows(requests).await);
                continue;
            }
            while !requests.is_empty() {
                let (again, held) = self.acquire_free(requests).await;
                requests = again;
                refused.extend(held);
            }
        }
        let mut parts = by_count_of_keys(refused, |_| 1, queued_together).into_iter();
        while let Some(mut requests) = parts.next() {
            while !requests.is_empty() {
                requests = self.enqueue(requests).await;
            }
            if claims.is_over() {
                claims.put_back(parts.flatten().collect());
                return;
            }
        }
    }

    pub(super) async fn acquire_several(
        &mut self,
        pending: PendingRequest<AcquireRequest, AcquireOutcome>,
    ) {
        // An earlier failure may have shown that a row is locked.
        let free = self.without_locked(vec![pending], |request| &request.keys).await;
        for (request, reply) in free {
            let mut outcome = self.acquire_all(&request).await;
            if outcome.as_ref().is_err_and(|error| self.give_up_info_after(error)) {
                outcome = self.acquire_all(&request).await;
            }
            if outcome.as_ref().is_err_and(is_lock_timeout) {
                self.remember_locked(request.keys.iter());
            }
            answer(reply, outcome);
        }
    }

    /// Answers requests for free keys, and requests that do not queue. Returns the requests to send again, and the requests to
    /// queue.
    ///
    /// The row is read after it is locked. A release that commits in between may have reserved the key for the owner, for less
    /// than the ttl. This request is sent again, and its own statement then extends the row.
    async fn acquire_free(&mut self, mut requests: Acquires) -> (Acquires, Acquires) {
        requests.retain(|(_, reply)| !reply.is_closed());
        if requests.is_empty() {
            return Default::default();
        }
        let statements = self.statements();
        let mut rows = String::new();
        for (request, _) in &requests {
            self.push_row(&mut rows, request);
        }
        let keys = ByteList::of_keys(requests.iter().map(|(request, _)| &request.keys[0]));
        let script = SqlScript::of(&statements.clock, &[])
            .then(&statements.acquire, &[("rows", Literal::Text(&rows))])
            .then(&statements.leases, &[("keys", keys.as_literal())]);
        let answered = match self.execute(&script, 1).await {
            Ok(answered) => answered,
            Err(error) => {
                return (self.others(requests, |request| &request.keys, error).await, Vec::new());
            }
        };
        let rows = answered.sets.first().map(Vec::as_slice).unwrap_or_default();
        let mut found: HashMap<&[u8], LeaseRow> =
            rows.iter().filter_map(|row| Some((row.bytes(0)?, LeaseRow::of(row)?))).collect();
        let (mut again, mut refused, mut left_queue) = (Vec::new(), Vec::new(), Vec::new());
        for (request, reply) in requests {
            let key = &request.keys[0];
            let row = found.remove(key.as_str().as_bytes()).filter(|row| row.expires_in > 0);
            match row {
                Some(row)
                    if row.owner == Some(request.owner)
                        && row.expires_in < micros(request.kept_for()) =>
                {
                    again.push((request, reply));
                }
                Some(row) if row.owner == Some(request.owner) => {
                    let (granted, was_queued) = self.granted(&request, row.fence, row.contended);
                    if was_queued {
                        left_queue.push((key.clone(), request.owner));
                    }
                    answer(reply, Ok(granted));
                }
                row => {
                    let expires_in = row.map(|row| duration(row.expires_in));
                    let rank = self.state.watch_list().rank(key, request.owner, self.now());
                    match rank {
                        Some(rank) if request.enqueue => {
                            answer(reply, Ok(queued(expires_in, rank, recheck_interval(rank))));
                        }
                        None if request.enqueue => refused.push((request, reply)),
                        _ => answer(reply, Ok(AcquireOutcome::contended(expires_in))),
                    }
                }
            }
        }
        self.leave_queues(&left_queue).await;
        (again, refused)
    }

    /// Makes rows for the keys that have none. Returns the requests.
    async fn with_rows(&mut self, mut requests: Acquires) -> Acquires {
        requests.retain(|(_, reply)| !reply.is_closed());
        match self.add_rows(requests.iter().flat_map(|(request, _)| request.keys.iter())).await {
            Ok(()) => requests,
            Err(error) => {
                // A row that is locked elsewhere fails only the requests for it.
                let others = self.others(requests, |request| &request.keys, error.clone()).await;
                fail_all(others, &error);
                Vec::new()
            }
        }
    }

    /// Makes rows of free locks. It grants nothing.
    async fn add_rows<'k>(
        &mut self,
        keys: impl Iterator<Item = &'k Key>,
    ) -> Result<(), BackendError> {
        let mut rows = String::new();
        for key in keys {
            rows.push_str(if rows.is_empty() { "SELECT " } else { " UNION ALL SELECT " });
            push_bytes(&mut rows, &[key.as_str().as_bytes()]);
            rows.push_str(" AS `key`");
        }
        if rows.is_empty() {
            return Ok(());
        }
        let statements = self.statements();
        let script = SqlScript::of(&statements.clock, &[])
            .then(&statements.add_rows, &[("keys", Literal::Text(&rows))]);
        self.execute(&script, usize::MAX).await.map(drop).map_err(BackendError::before_sending)
    }

    /// Queues the owners of keys that are held, and grants the others. Returns the requests to send again.
    async fn enqueue(&mut self, mut requests: Acquires) -> Acquires {
        requests.retain(|(_, reply)| !reply.is_closed());
        if requests.is_empty() {
            return requests;
        }
        let statements = self.statements();
        let mut script = self.begin();
        for (number, (request, _)) in requests.iter().enumerate() {
            let info = self.info(request);
            let values = [
                ("number", Literal::Number(i64::try_from(number).unwrap_or(i64::MAX))),
                ("key", Literal::Bytes(request.keys[0].as_str().as_bytes())),
                ("owner", Literal::Bytes(request.owner.as_bytes())),
                ("kept", Literal::Number(micros(request.kept_for()))),
                (
                    "further",
                    Literal::Number(i64::from(self.statements().pins.further_fences(request))),
                ),
                ("channel", Literal::Bytes(self.channel.as_bytes())),
                ("info", Literal::Bytes(&info)),
                ("queues", Literal::Number(i64::from(request.enqueue))),
            ];
            script.add(&statements.enqueue, &values);
        }
        let answered = match self.in_transaction(script).await {
            Ok(answered) => answered,
            Err(error) => return self.others(requests, |request| &request.keys, error).await,
        };
        let mut rows: HashMap<i64, &Fields> =
            answered.sets.iter().flatten().filter_map(|row| Some((row.number(0)?, row))).collect();
        for (number, (request, reply)) in (0_i64..).zip(requests) {
            let Some(row) = rows.remove(&number) else {
                // The row of a lease may be gone by now: then the key is free.
                let wait_mode = WaitMode::Watch { retry_after: Duration::ZERO };
                answer(reply, Ok(AcquireOutcome::contended_until(None, wait_mode)));
                continue;
            };
            if let Some(fence) = row.number(1) {
                answer(reply, Ok(self.granted(&request, fence, row.is_true(2)).0));
                continue;
            }
            let expires_in = row.number(3).map(duration);
            if !request.enqueue {
                answer(reply, Ok(AcquireOutcome::contended(expires_in)));
                continue;
            }
            let rank = row.number(4).unwrap_or_default();
            self.state.watch_list().queued(&request.keys[0], request.owner, rank, self.now());
            self.state.watched.notify_one();
            answer(reply, Ok(queued(expires_in, rank, recheck_interval(rank))));
        }
        Vec::new()
    }

    /// The outcome of a grant, and whether the owner was queued for the keys.
    fn granted(
        &mut self,
        request: &AcquireRequest,
        fence: i64,
        contended: bool,
    ) -> (AcquireOutcome, bool) {
        let until = self.now() + request.kept_for();
        let mut was_queued = false;
        {
            let mut watch_list = self.state.watch_list();
            let looked = watch_list.looks_at_held();
            for key in request.keys.iter() {
                was_queued |= watch_list.granted(key, request.owner, until, contended);
            }
            if !looked && !contended {
                self.state.watched.notify_one();
            }
        }
        let fence = request.fencing.then(|| Fence::new(fence.unsigned_abs()));
        let granted = AcquireOutcome::acquired(fence)
            .with_reserved_fences(self.statements().pins.further_fences(request));
        // Without a channel this process does not learn of owners that queue later.
        let is_told = contended || !self.channel.is_empty();
        (if is_told { granted.with_contended(contended) } else { granted }, was_queued)
    }

    /// Owners that have found their keys free are no longer queued. A failure does not matter: the release removes the entries,
    /// and they are not served before that.
    async fn leave_queues(&mut self, places: &[(Key, Owner)]) {
        if places.is_empty() {
            return;
        }
        let statements = self.statements();
        let keys = ByteList::of_keys(places.iter().map(|(key, _)| key));
        // As in all other scripts, the row of a lease is locked before those of its queue.
        let mut script = self.begin().then(&statements.lock_rows, &[("keys", keys.as_literal())]);
        for (key, owner) in places {
            let values = [
                ("key", Literal::Bytes(key.as_str().as_bytes())),
                ("owner", Literal::Bytes(owner.as_bytes())),
            ];
            script.add(&statements.leave_queue, &values);
        }
        let _ = self.in_transaction(script).await;
    }

    async fn acquire_all(
        &mut self,
        request: &AcquireRequest,
    ) -> Result<AcquireOutcome, BackendError> {
        let statements = self.statements();
        let keys = ByteList::of_keys(request.keys.iter());
        let info = self.info(request);
        self.add_rows(request.keys.iter()).await?;
        let values = [
            ("keys", keys.as_literal()),
            ("owner", Literal::Bytes(request.owner.as_bytes())),
            ("count", Literal::Number(i64::try_from(request.keys.len()).unwrap_or(i64::MAX))),
            ("kept", Literal::Number(micros(request.kept_for()))),
            ("further", Literal::Number(i64::from(self.statements().pins.further_fences(request)))),
            ("channel", Literal::Bytes(self.channel.as_bytes())),
            ("info", Literal::Bytes(&info)),
        ];
        let mut script = self
            .begin()
            .then(&statements.lock_rows, &values)
            .then(&statements.acquire_all, &values);
        for key in request.keys.iter() {
            let values = [("key", Literal::Bytes(key.as_str().as_bytes())), values[1]];
            script.add(&statements.leave_queue, &values);
        }
        let answered = self.in_transaction(script).await?;
        // This set follows that of the locked keys.
        let row = answered.sets.get(1).and_then(|rows| rows.first()).ok_or_else(incomplete)?;
        Ok(match row.number(0) {
            Some(fence) => self.granted(request, fence, row.is_true(1)).0,
            None => AcquireOutcome::contended(row.number(2).map(duration)),
        })
    }

    /// The text about the owner, where the leases have a column for it.
    fn info(&self, request: &AcquireRequest) -> Vec<u8> {
        match self.session.info {
            InfoColumn::Named => stored_info(&request.owner, &request.label),
            InfoColumn::LeftOut => Vec::new(),
        }
    }

    fn push_row(&self, rows: &mut String, request: &AcquireRequest) {
        rows.push_str(if rows.is_empty() { "(" } else { ",(" });
        push_bytes(rows, &[request.keys[0].as_str().as_bytes()]);
        rows.push(',');
        push_bytes(rows, &[request.owner.as_bytes()]);
        let (kept, further) =
            (micros(request.kept_for()), self.statements().pins.further_fences(request));
        let _ = write!(rows, ",@now+{kept},@now,@now+{further},");
        push_bytes(rows, &[self.channel.as_bytes()]);
        if self.statements().info == InfoColumn::Named {
            rows.push(',');
            push_bytes(rows, &[&self.info(request)]);
        }
        rows.push(')');
    }
}

/// How long a queued owner waits for a look to find its turn before it requests the key again.
pub(super) fn recheck_interval(rank: i64) -> Duration {
    Duration::from_millis(if rank < 3 { 500 } else { 1_000 })
}
