//! Releases on one connection.

use std::collections::HashSet;

use tokio_postgres::types::Type;

use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::blocked_requests::Parts;
use crate::backend::postgres::schema::Parameters;
use crate::backend::postgres::session::get;
use crate::backend::sql::claim_queue::ClaimQueue;
use crate::backend::sql::job::{PendingRequest, Releases, answer, fail_all};
use crate::backend::sql::queued::successor;
use crate::backend::sql::tables::micros;
use crate::backend::{BackendError, ReleaseOutcome, ReleaseRequest};
use crate::base::jitter;
use crate::base::key::Key;

/// A key of a release, and its owner.
type OwnedKey = (Vec<u8>, Vec<u8>);

impl Batch<'_> {
    /// Ends leases with different keys: those without a wait queue together, by one statement. Requests that are left when the
    /// turn is over go back to `claims`.
    pub(super) async fn release(&self, requests: Releases, claims: &mut ClaimQueue) {
        let mut freed = HashSet::new();
        if let Err(error) = self.free(&requests, &mut freed).await {
            fail_all(requests, &error);
            return;
        }
        let is_open = |(request, _): &PendingRequest<ReleaseRequest, _>| {
            !request.lease.keys.iter().all(|key| freed.contains(&owned(key, request)))
        };
        let (open, ended): (Releases, Releases) = requests.into_iter().partition(is_open);
        for (request, reply) in ended {
            answer(reply, Ok(self.outcome_of(&request, &freed, &HashSet::new())));
        }
        // A request that has ended in part is not refused before it is sent.
        let (begun, whole): (Releases, Releases) = open.into_iter().partition(|(request, _)| {
            request.lease.keys.iter().any(|key| freed.contains(&owned(key, request)))
        });
        let mut parts = Parts::of(self.without_locked(whole, keys_of).await);
        while let Some(requests) = parts.next() {
            self.hand_off(requests, &freed, &mut parts).await;
            if claims.is_over() {
                break;
            }
        }
        claims.put_back_releases(parts.rest());
        // These stay: a later turn would find the keys that have ended as not held.
        let mut parts = Parts::of(begun);
        while let Some(requests) = parts.next() {
            self.hand_off(requests, &freed, &mut parts).await;
        }
    }

    /// Ends leases without a wait queue, and adds their keys.
    async fn free(
        &self,
        requests: &Releases,
        freed: &mut HashSet<OwnedKey>,
    ) -> Result<(), BackendError> {
        let plain =
            |(request, _): &&PendingRequest<ReleaseRequest, _>| request.barging_window.is_zero();
        let columns = ReleaseColumns::of(requests.iter().filter(plain).map(|(request, _)| request));
        if columns.keys.is_empty() {
            return Ok(());
        }
        let parameters: Parameters<'_> = vec![
            (&columns.keys, Type::BYTEA_ARRAY),
            (&columns.owners, Type::BYTEA_ARRAY),
            (&columns.free_after, Type::INT8_ARRAY),
            (&columns.successors, Type::BYTEA_ARRAY),
            (&columns.kept, Type::INT8_ARRAY),
        ];
        for row in &self.query(&self.statements.release, &parameters).await? {
            freed.insert((get(row, 0)?, get(row, 1)?));
        }
        Ok(())
    }

    /// Ends what is left: leases with a wait queue, and places of owners in one.
    async fn hand_off(
        &self,
        requests: Releases,
        freed: &HashSet<OwnedKey>,
        parts: &mut Parts<PendingRequest<ReleaseRequest, ReleaseOutcome>>,
    ) {
        let ended = self.hand_off_together(&requests, freed).await;
        match ended {
            Ok(ended) => {
                for (request, reply) in requests {
                    answer(reply, Ok(self.outcome_of(&request, freed, &ended)));
                }
            }
            Err(error) => {
                for (request, reply) in self.blocked(requests, keys_of, &error, parts).await {
                    let is_in_part =
                        request.lease.keys.iter().any(|key| freed.contains(&owned(key, &request)));
                    let error = error.clone();
                    answer(reply, Err(if is_in_part { error.after_a_part() } else { error }));
                }
            }
        }
    }

    /// The keys that their owner held, and whether each was handed off.
    async fn hand_off_together(
        &self,
        requests: &Releases,
        freed: &HashSet<OwnedKey>,
    ) -> Result<HashSet<(Vec<u8>, bool)>, BackendError> {
        let mut columns = ReleaseColumns::of(requests.iter().map(|(request, _)| request));
        columns.retain(|key, owner| !freed.contains(&(key.to_vec(), owner.to_vec())));
        let parameters: Parameters<'_> = vec![
            (&columns.keys, Type::BYTEA_ARRAY),
            (&columns.owners, Type::BYTEA_ARRAY),
            (&columns.reservations, Type::INT8_ARRAY),
            (&columns.successors, Type::BYTEA_ARRAY),
            (&columns.kept, Type::INT8_ARRAY),
            (&columns.windows, Type::INT8_ARRAY),
            self.channel(),
            (&columns.free_after, Type::INT8_ARRAY),
        ];
        let keys = parameters[0].clone();
        let rows = self.in_transaction(keys, &self.statements.hand_off, &parameters).await?;
        rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?))).collect()
    }

    fn outcome_of(
        &self,
        request: &ReleaseRequest,
        freed: &HashSet<OwnedKey>,
        ended: &HashSet<(Vec<u8>, bool)>,
    ) -> ReleaseOutcome {
        let is_ended =
            |key: &Key, handed_off| ended.contains(&(key.as_str().as_bytes().to_vec(), handed_off));
        let is_held = request.lease.keys.iter().all(|key| {
            freed.contains(&owned(key, request)) || is_ended(key, true) || is_ended(key, false)
        });
        let successor = successor(request).is_some() && request.free_after.is_zero();
        match &*request.lease.keys {
            _ if !is_held => ReleaseOutcome::NotHeld,
            [key] if successor && is_ended(key, true) => {
                ReleaseOutcome::successor_queued(jitter::below(self.recheck_interval(1)))
            }
            [_] if successor => ReleaseOutcome::SuccessorGranted,
            _ => ReleaseOutcome::Freed,
        }
    }
}

fn keys_of(request: &ReleaseRequest) -> &[Key] {
    &request.lease.keys
}

fn owned(key: &Key, request: &ReleaseRequest) -> OwnedKey {
    (key.as_str().as_bytes().to_vec(), request.lease.owner.as_bytes().to_vec())
}

/// The releases as arrays, one element for each key.
#[derive(Default)]
struct ReleaseColumns<'a> {
    keys: Vec<&'a [u8]>,
    owners: Vec<&'a [u8]>,
    free_after: Vec<i64>,
    reservations: Vec<i64>,
    successors: Vec<&'a [u8]>,
    kept: Vec<i64>,
    windows: Vec<i64>,
}

impl<'a> ReleaseColumns<'a> {
    fn of(requests: impl Iterator<Item = &'a ReleaseRequest>) -> Self {
        let mut columns = Self::default();
        for request in requests {
            let next = successor(request);
            for key in request.lease.keys.iter() {
                columns.keys.push(key.as_str().as_bytes());
                columns.owners.push(request.lease.owner.as_bytes());
                columns.free_after.push(micros(request.free_after));
                columns.reservations.push(micros(request.lease.reservation_time()));
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
