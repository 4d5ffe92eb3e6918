//! Acquire requests on one connection.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::blocked_requests::Parts;
use crate::backend::postgres::schema::{Parameter, Parameters};
use crate::backend::postgres::server_error::is_lock_timeout;
use crate::backend::postgres::session::get;
use crate::backend::sql::claim_queue::ClaimQueue;
use crate::backend::sql::job::{Acquires, PendingRequest, answer, fail_all};
use crate::backend::sql::queued::queued;
use crate::backend::sql::stored_info::stored_info;
use crate::backend::sql::tables::{duration, micros};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, WaitMode};
use crate::base::fence::Fence;
use crate::base::key::Key;

/// The columns of an answer, in the order of the statements.
struct AcquireRow {
    fence: Option<i64>,
    contended: bool,
    expires_in: Option<Duration>,
    rank: Option<i64>,
}

impl Batch<'_> {
    /// Tries requests for one key together, by a statement that writes nothing for a key that is held. Requests that are left
    /// when the turn is over go back to `claims`.
    pub(super) async fn acquire_single(&self, requests: Acquires, claims: &mut ClaimQueue) {
        let mut parts = Parts::of(self.without_locked(requests, keys_of).await);
        let mut refused = Vec::new();
        while let Some(requests) = parts.next() {
            refused.extend(self.acquire_free(requests, &mut parts).await);
            if claims.is_over() {
                break;
            }
        }
        claims.put_back(parts.rest());
        let mut parts = Parts::of(refused);
        while let Some(requests) = parts.next() {
            self.enqueue(requests, &mut parts).await;
            if claims.is_over() {
                break;
            }
        }
        claims.put_back(parts.rest());
    }

    /// Answers requests for free keys, and those that are not to be queued. Returns the others.
    async fn acquire_free(
        &self,
        requests: Acquires,
        parts: &mut Parts<PendingRequest<AcquireRequest, AcquireOutcome>>,
    ) -> Acquires {
        let columns = AcquireColumns::of(&requests, self);
        let rows = self.query(&self.statements.acquire, &columns.parameters(self.channel())).await;
        let rows = match rows {
            Ok(rows) => rows,
            Err(error) => {
                fail_all(self.blocked(requests, keys_of, &error, parts).await, &error);
                return Vec::new();
            }
        };
        self.answer(requests, &rows, |request, answer| {
            request.enqueue && answer.fence.is_none() && answer.rank.is_none()
        })
    }

    /// Queues the owners of keys that are held.
    async fn enqueue(
        &self,
        requests: Acquires,
        parts: &mut Parts<PendingRequest<AcquireRequest, AcquireOutcome>>,
    ) {
        let columns = AcquireColumns::of(&requests, self);
        let (keys, parameters) =
            ((&columns.keys as _, Type::BYTEA_ARRAY), columns.parameters(self.channel()));
        match self.in_transaction(keys, &self.statements.enqueue, &parameters).await {
            Ok(rows) => {
                // The row of a lease may be gone by now: then the key is free.
                for (_, reply) in self.answer(requests, &rows, |_, _| false) {
                    let wait_mode = WaitMode::Watch { retry_after: Duration::ZERO };
                    answer(reply, Ok(AcquireOutcome::contended_until(None, wait_mode)));
                }
            }
            Err(error) => {
                fail_all(self.blocked(requests, keys_of, &error, parts).await, &error);
            }
        }
    }

    /// Answers each request that has a row, unless it `goes_on`. Returns the others.
    fn answer(
        &self,
        requests: Acquires,
        rows: &[Row],
        goes_on: impl Fn(&AcquireRequest, &AcquireRow) -> bool,
    ) -> Acquires {
        let mut open: Vec<_> = requests.into_iter().map(Some).collect();
        for row in rows {
            let number =
                get::<i64>(row, 0).ok().and_then(|number| usize::try_from(number - 1).ok());
            let Some(slot) = number.and_then(|number| open.get_mut(number)) else { continue };
            let Some((request, reply)) = slot.take() else { continue };
            match AcquireRow::of(row) {
                Ok(found) if goes_on(&request, &found) => *slot = Some((request, reply)),
                Ok(found) => answer(reply, Ok(self.outcome(&request, &found))),
                Err(error) => answer(reply, Err(error)),
            }
        }
        open.into_iter().flatten().collect()
    }

    fn outcome(&self, request: &AcquireRequest, answer: &AcquireRow) -> AcquireOutcome {
        if let Some(fence) = answer.fence {
            return self.granted(request, fence, answer.contended);
        }
        let Some(rank) = answer.rank.filter(|_| request.enqueue) else {
            return AcquireOutcome::contended(answer.expires_in);
        };
        queued(answer.expires_in, rank, self.recheck_interval(rank))
    }

    fn granted(&self, request: &AcquireRequest, fence: i64, contended: bool) -> AcquireOutcome {
        let fence = request.fencing.then_some(fence).and_then(|fence| Fence::try_from(fence).ok());
        let granted = AcquireOutcome::acquired(fence)
            .with_reserved_fences(self.statements.pins.further_fences(request));
        // Without a channel this process does not learn of owners that queue later.
        if contended || self.is_notified() { granted.with_contended(contended) } else { granted }
    }

    /// How long a queued owner waits for a notification before it requests the key again. Without notifications, this is how
    /// often the owner looks.
    pub(super) fn recheck_interval(&self, rank: i64) -> Duration {
        Duration::from_millis(match (self.is_notified(), rank) {
            (true, ..3) => 500,
            (true, _) => 1_000,
            (false, ..2) => 25,
            (false, _) => 150,
        })
    }

    /// The text about the owner, where the leases have a column for it.
    fn info(&self, request: &AcquireRequest) -> Vec<u8> {
        if self.session.has_info() {
            stored_info(&request.owner, &request.label)
        } else {
            Vec::new()
        }
    }

    pub(super) async fn acquire_several(
        &self,
        pending: PendingRequest<AcquireRequest, AcquireOutcome>,
    ) {
        for (request, reply) in self.without_locked(vec![pending], keys_of).await {
            let outcome = self.acquire_all(&request).await;
            if outcome.as_ref().is_err_and(is_lock_timeout) {
                self.remember_locked(request.keys.iter().cloned());
            }
            answer(reply, outcome);
        }
    }

    async fn acquire_all(&self, request: &AcquireRequest) -> Result<AcquireOutcome, BackendError> {
        let keys = texts(&request.keys);
        let (owner, kept) = (request.owner.as_bytes(), micros(request.kept_for()));
        let further = i64::from(self.statements.pins.further_fences(request));
        let info = self.info(request);
        let parameters: Parameters<'_> = vec![
            (&keys, Type::BYTEA_ARRAY),
            (&owner, Type::BYTEA),
            (&kept, Type::INT8),
            (&further, Type::INT8),
            self.channel(),
            (&info, Type::BYTEA),
        ];
        self.query(&self.statements.add_rows, &parameters[..1])
            .await
            // It grants nothing.
            .map_err(BackendError::before_sending)?;
        let keys = parameters[0].clone();
        let rows = self.in_transaction(keys, &self.statements.acquire_all, &parameters).await?;
        let Some(row) = rows.first() else {
            return Ok(AcquireOutcome::contended(None));
        };
        let expires_in = get::<Option<i64>>(row, 2)?.map(duration);
        Ok(match get(row, 0)? {
            Some(fence) => self.granted(request, fence, get::<Option<bool>>(row, 1)? == Some(true)),
            None => AcquireOutcome::contended(expires_in),
        })
    }
}

/// The requests as arrays, one element for each.
struct AcquireColumns<'a> {
    keys: Vec<&'a [u8]>,
    owners: Vec<&'a [u8]>,
    kept: Vec<i64>,
    further: Vec<i64>,
    infos: Vec<Vec<u8>>,
}

impl<'a> AcquireColumns<'a> {
    fn of(requests: &'a Acquires, batch: &Batch<'_>) -> Self {
        let requests = || requests.iter().map(|(request, _)| request);
        let pins = batch.statements.pins;
        Self {
            keys: requests().map(|request| request.keys[0].as_str().as_bytes()).collect(),
            owners: requests().map(|request| request.owner.as_bytes()).collect(),
            kept: requests().map(|request| micros(request.kept_for())).collect(),
            further: requests().map(|request| i64::from(pins.further_fences(request))).collect(),
            infos: requests().map(|request| batch.info(request)).collect(),
        }
    }

    fn parameters(&'a self, channel: Parameter<'a>) -> Parameters<'a> {
        vec![
            (&self.keys, Type::BYTEA_ARRAY),
            (&self.owners, Type::BYTEA_ARRAY),
            (&self.kept, Type::INT8_ARRAY),
            (&self.further, Type::INT8_ARRAY),
            channel,
            // Unused without the column `info`.
            (&self.infos, Type::BYTEA_ARRAY),
        ]
    }
}

impl AcquireRow {
    fn of(row: &Row) -> Result<Self, BackendError> {
        Ok(Self {
            fence: get(row, 1)?,
            contended: get::<Option<bool>>(row, 2)? == Some(true),
            expires_in: get::<Option<i64>>(row, 3)?.map(duration),
            rank: get(row, 4)?,
        })
    }
}

fn keys_of(request: &AcquireRequest) -> &[Key] {
    &request.keys
}

pub(super) fn texts(keys: &[Key]) -> Vec<&[u8]> {
    keys.iter().map(|key| key.as_str().as_bytes()).collect()
}
