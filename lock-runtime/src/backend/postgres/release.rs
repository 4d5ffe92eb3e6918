//! Releases on one connection.

use std::collections::HashSet;
use std::time::Duration;

use tokio_postgres::types::Type;

use crate::backend::postgres::batch::{
    Batch, Parameters, by_distinct_keys, in_transaction, micros,
};
use crate::backend::postgres::job::{Pending, answer};
use crate::backend::postgres::server_error::failure;
use crate::backend::postgres::session::get;
use crate::backend::{BackendError, ReleaseOutcome, ReleaseRequest, Successor};
use crate::base::jitter;

type Releases = Vec<Pending<ReleaseRequest, ReleaseOutcome>>;

/// A key of a release, and its owner.
type OwnedKey = (Vec<u8>, Vec<u8>);

impl Batch<'_> {
    /// Ends all leases: those without a wait queue together, by one statement.
    pub(super) async fn release(&self, requests: Releases) {
        for requests in by_distinct_keys(requests, |(request, _)| &request.lease.keys) {
            let outcomes = self.release_distinct(&requests).await;
            match outcomes {
                Ok(outcomes) => {
                    for ((_, reply), outcome) in requests.into_iter().zip(outcomes) {
                        answer(reply, Ok(outcome));
                    }
                }
                Err(error) => super::job::fail_all(requests, &error),
            }
        }
    }

    async fn release_distinct(
        &self,
        requests: &Releases,
    ) -> Result<Vec<ReleaseOutcome>, BackendError> {
        let plain = |(request, _): &&Pending<ReleaseRequest, _>| request.barging_window.is_zero();
        let columns = Columns::of(requests.iter().filter(plain).map(|(request, _)| request));
        let mut freed = HashSet::new();
        if !columns.keys.is_empty() {
            let parameters: Parameters<'_> = vec![
                (&columns.keys, Type::BYTEA_ARRAY),
                (&columns.owners, Type::BYTEA_ARRAY),
                (&columns.free_after, Type::INT8_ARRAY),
                (&columns.successors, Type::BYTEA_ARRAY),
                (&columns.kept, Type::INT8_ARRAY),
            ];
            let rows = self.query(&self.statements.release, &parameters).await.map_err(failure)?;
            for row in &rows {
                freed.insert((get(row, 0)?, get(row, 1)?));
            }
        }
        let handed_off = self.hand_off(requests, &freed).await?;
        Ok(requests
            .iter()
            .map(|(request, _)| self.outcome_of(request, &freed, &handed_off))
            .collect())
    }

    /// Ends what is left: leases with a wait queue, and places of owners in one. Returns the keys that were held, in two
    /// groups: those that their head of the queue has, and the others.
    async fn hand_off(
        &self,
        requests: &Releases,
        freed: &HashSet<OwnedKey>,
    ) -> Result<[HashSet<Vec<u8>>; 2], BackendError> {
        let mut columns = Columns::of(requests.iter().map(|(request, _)| request));
        columns.retain(|key, owner| !freed.contains(&(key.to_vec(), owner.to_vec())));
        let mut held = [HashSet::new(), HashSet::new()];
        if columns.keys.is_empty() {
            return Ok(held);
        }
        let parameters: Parameters<'_> = vec![
            (&columns.keys, Type::BYTEA_ARRAY),
            (&columns.owners, Type::BYTEA_ARRAY),
            (&columns.reservations, Type::INT8_ARRAY),
            (&columns.successors, Type::BYTEA_ARRAY),
            (&columns.kept, Type::INT8_ARRAY),
            (&columns.windows, Type::INT8_ARRAY),
            self.channel(),
        ];
        let statement = (&*self.statements.hand_off, &*parameters);
        let rows = in_transaction(
            self.client(),
            &self.statements.lock_rows,
            (&columns.keys, Type::BYTEA_ARRAY),
            statement,
        )
        .await
        .map_err(failure)?;
        for row in &rows {
            held[usize::from(!get::<bool>(row, 1)?)].insert(get(row, 0)?);
        }
        Ok(held)
    }

    fn outcome_of(
        &self,
        request: &ReleaseRequest,
        freed: &HashSet<OwnedKey>,
        [handed_off, ended]: &[HashSet<Vec<u8>>; 2],
    ) -> ReleaseOutcome {
        let owner = request.lease.owner.as_bytes();
        let is_held = request.lease.keys.iter().all(|key| {
            let key = key.as_str().as_bytes();
            handed_off.contains(key)
                || ended.contains(key)
                || freed.contains(&(key.to_vec(), owner.to_vec()))
        });
        let successor = successor(request).is_some() && request.free_after.is_zero();
        match &*request.lease.keys {
            _ if !is_held => ReleaseOutcome::NotHeld,
            [key] if successor && handed_off.contains(key.as_str().as_bytes()) => {
                ReleaseOutcome::successor_queued(jitter::below(self.recheck_interval(1)))
            }
            [_] if successor => ReleaseOutcome::SuccessorGranted,
            _ => ReleaseOutcome::Freed,
        }
    }
}

/// The next owner of the process. Not for several keys, and not behind a barging window.
fn successor(request: &ReleaseRequest) -> Option<&Successor> {
    let is_single = request.lease.keys.len() == 1 && request.barging_window.is_zero();
    request.successor.as_ref().filter(|_| is_single)
}

/// How long a release of a lease of `ttl` reserves the key for the head of the queue: the longest time for which a process that
/// is frozen at that moment delays the other waiters.
fn reservation_time(ttl: Duration) -> Duration {
    (ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(1)).min(ttl)
}

/// The releases as arrays, one element for each key.
#[derive(Default)]
struct Columns<'a> {
    keys: Vec<&'a [u8]>,
    owners: Vec<&'a [u8]>,
    free_after: Vec<i64>,
    reservations: Vec<i64>,
    successors: Vec<&'a [u8]>,
    kept: Vec<i64>,
    windows: Vec<i64>,
}

impl<'a> Columns<'a> {
    fn of(requests: impl Iterator<Item = &'a ReleaseRequest>) -> Self {
        let mut columns = Self::default();
        for request in requests {
            let next = successor(request);
            for key in request.lease.keys.iter() {
                columns.keys.push(key.as_str().as_bytes());
                columns.owners.push(request.lease.owner.as_bytes());
                columns.free_after.push(micros(request.free_after));
                columns.reservations.push(micros(reservation_time(request.lease.ttl)));
                columns.successors.push(next.map_or(&[], |next| next.owner.as_bytes()));
                columns.kept.push(next.map_or(0, |next| micros(next.ttl)));
                columns.windows.push(micros(request.barging_window));
            }
        }
        columns
    }

    /// Keeps the elements with these keys and owners.
    fn retain(&mut self, is_kept: impl Fn(&[u8], &[u8]) -> bool) {
        let kept: Vec<bool> =
            self.keys.iter().zip(&self.owners).map(|(key, owner)| is_kept(key, owner)).collect();
        fn retain<T>(column: &mut Vec<T>, kept: &[bool]) {
            let mut kept = kept.iter();
            column.retain(|_| kept.next().is_some_and(|kept| *kept));
        }
        retain(&mut self.keys, &kept);
        retain(&mut self.owners, &kept);
        retain(&mut self.free_after, &kept);
        retain(&mut self.reservations, &kept);
        retain(&mut self.successors, &kept);
        retain(&mut self.kept, &kept);
        retain(&mut self.windows, &kept);
    }
}
