//! Acquire requests.
//!
//! ```text
//! none ── put if the lock is free ──> granted
//! none ── put, find the one before ──> queued, watches it ── look ──> granted
//! ```
//!
//! A request that does not queue writes only if all its keys are free.

use std::time::Duration;

use crate::backend::etcd::acquiring::{Acquiring, FreeKeys, RoundEnd};
use crate::backend::etcd::leases::Leases;
use crate::backend::etcd::locks::{AbandonFlag, EtcdLocks, Looked};
use crate::backend::etcd::member::TransactionFailure;
use crate::backend::etcd::owned_key::OwnerKey;
use crate::backend::etcd::owned_keys::KeyTurn;
use crate::backend::etcd::protocol::key_value::KeyValue;
use crate::backend::etcd::protocol::transaction::{
    KeyCondition, KeyOperation, SearchOrder, Transaction, TransactionAnswer,
};
use crate::backend::etcd::server_error::{is_denied, unsteady};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, Owner, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::key::Key;

/// How many times a request looks again when it finds other keys than the previous answer said.
const MOST_ROUNDS: usize = 20;

/// The shortest time that a queued owner waits for a notification before it requests the key again.
const RECHECK: Duration = Duration::from_secs(5);

/// How long the key of a queued owner stays without a further request.
pub(crate) const QUEUED_FOR: Duration = Duration::from_secs(15);

impl EtcdLocks {
    pub(crate) async fn acquire(
        &self,
        request: &AcquireRequest,
        abandoned: &AbandonFlag,
    ) -> Result<AcquireOutcome, BackendError> {
        let began = self.now();
        let turn = self.keys.owners.begin(request.owner, request.kept_for()).await;
        let mut has_put = false;
        let outcome = self.rounds(request, &turn, began, abandoned, &mut has_put).await;
        // A key that was put meanwhile takes part in the queue.
        outcome.map_err(|error| if has_put { error.after_a_part() } else { error })
    }

    /// `has_put` says whether a key was put, also if the request fails after that.
    async fn rounds(
        &self,
        request: &AcquireRequest,
        turn: &KeyTurn,
        began: Instant,
        abandoned: &AbandonFlag,
        has_put: &mut bool,
    ) -> Result<AcquireOutcome, BackendError> {
        self.delete_leaving(request, turn, abandoned).await?;
        for _ in 0..MOST_ROUNDS {
            abandoned.check()?;
            let member = self.link.member().await?;
            let lease = self.leases.holding(&member, request.kept_for()).await?;
            let round_began = self.now();
            let until = round_began + request.kept_for();
            let acquiring = Acquiring { request, turn, member, lease, until };
            if let RoundEnd::Over(outcome) = self.round(&acquiring, abandoned, has_put).await? {
                return Ok(outcome.with_prepared_in(round_began.since(began)));
            }
        }
        Err(unsteady())
    }

    /// Deletes again the keys of this owner that have no answer to a deletion. It may still be executed, so they are not granted.
    async fn delete_leaving(
        &self,
        request: &AcquireRequest,
        turn: &KeyTurn,
        abandoned: &AbandonFlag,
    ) -> Result<(), BackendError> {
        let known = |key: &Key| self.keys.known(turn.owner(), key);
        let is_leaving = |key: &&Key| known(key).is_some_and(|known| known.is_leaving());
        let leaving: Vec<_> = request.keys.iter().filter(is_leaving).cloned().collect();
        if !leaving.is_empty() {
            abandoned.check()?;
            let member = self.link.member().await?;
            self.free(&member, turn, &leaving).await?;
        }
        Ok(())
    }

    async fn round(
        &self,
        it: &Acquiring<'_>,
        abandoned: &AbandonFlag,
        has_put: &mut bool,
    ) -> Result<RoundEnd, BackendError> {
        let (owner, keys) = (it.owner(), &it.request.keys);
        let is_missing = |key: &&Key| self.keys.known(owner, key).is_none();
        let missing: Vec<_> = keys.iter().filter(is_missing).cloned().collect();
        if missing.is_empty() {
            let looked = self.look(&it.member, owner, keys).await?;
            return self.judge(it, looked).await;
        }
        abandoned.check()?;
        let sign = self.early_sign(&it.lease, it.until);
        let expected = self.keys.expect_puts(owner, &missing);
        let putting = self.putting(it, &missing);
        let answered = self.transact(&it.member, &putting).await;
        if answered.as_ref().is_err_and(TransactionFailure::has_applied_nothing) {
            for key in &expected {
                self.keys.remove(owner, key);
            }
        }
        let (answer, confirmed) = match answered {
            Ok(answered) => answered,
            Err(TransactionFailure::WithoutLease) => {
                self.leases.end(&it.lease);
                return Ok(RoundEnd::Again);
            }
            Err(TransactionFailure::Other(error)) => {
                // With a lease of keys that the user may put, it may succeed.
                let is_denied =
                    is_denied(&error) && self.leases.close_if_denied(&it.member, &it.lease).await;
                return if is_denied { Ok(RoundEnd::Again) } else { Err(error) };
            }
        };
        if !answer.is_met {
            return self.on_refusal(it, &answer, &expected).await;
        }
        *has_put = true;
        let revision = answer.origin.revision;
        let new = OwnerKey::new(revision, revision, it.lease.clone());
        for key in &missing {
            if !self.keys.set(owner, key, new.clone()) {
                return Ok(RoundEnd::Again);
            }
        }
        if it.is_queuing() {
            // The newest key is the owner's.
            if let Some(predecessor) = answer.found(1)?.get(1) {
                return Ok(self.wait_behind(owner, &missing[0], &new, predecessor));
            }
        } else if missing.len() < keys.len() {
            // A key that was known before may be lost, or queued.
            return Ok(RoundEnd::Again);
        }
        let keys = keys.iter().map(|key| (key.clone(), new.clone())).collect();
        let free = FreeKeys { keys, is_contended: false, fenced: 0, answer: confirmed, sign };
        self.grant(it, free).await
    }

    /// Puts `missing` keys, at the end of the queue or only if all of them are free.
    fn putting(&self, it: &Acquiring<'_>, missing: &[Key]) -> Transaction {
        let (owner, names) = (it.owner(), &self.keys.names);
        let get_lease = KeyOperation::Get { key: names.of_lease(it.lease.id) };
        let belongs = self.leases.belongs_to(&it.member, &it.lease);
        let put = |key| self.put((owner, it.request.label), key, &it.lease);
        let mut puts: Vec<_> = missing.iter().map(put).collect();
        if it.is_queuing()
            && let [key] = missing
        {
            let own = names.of_owner(key, owner);
            puts.push(KeyOperation::Find(names.search(key, SearchOrder::NewestFirst, 2)));
            let absent = KeyCondition::Created { key: own.clone(), revision: 0 };
            return Transaction {
                conditions: vec![belongs, absent],
                success: puts,
                failure: vec![get_lease, KeyOperation::Get { key: own }],
            };
        }
        let condition = |key: &Key| match self.keys.known(owner, key) {
            Some(known) if !missing.contains(key) => {
                KeyCondition::Created { key: names.of_owner(key, owner), revision: known.created }
            }
            Some(_) | None => names.is_free(key),
        };
        let keys = &it.request.keys;
        let oldest = |key| KeyOperation::Find(names.search(key, SearchOrder::OldestFirst, 1));
        Transaction {
            conditions: std::iter::once(belongs).chain(keys.iter().map(condition)).collect(),
            success: puts,
            failure: std::iter::once(get_lease).chain(keys.iter().map(oldest)).collect(),
        }
    }

    /// Nothing was put: a lock is not free, or the owner already has a key, or the lease belongs to another connection. No other
    /// request has put the keys that were `expected`.
    async fn on_refusal(
        &self,
        it: &Acquiring<'_>,
        answer: &TransactionAnswer,
        expected: &[Key],
    ) -> Result<RoundEnd, BackendError> {
        let (owner, keys) = (it.owner(), &it.request.keys);
        let seen = answer.found(0)?.first();
        if !Leases::is_of(&it.member, seen) {
            self.leases.repair(&it.member, &it.lease, seen).await?;
        }
        let mut is_held = false;
        for (at, key) in keys.iter().enumerate() {
            let found = answer.found(at + 1)?.first();
            let own = self.keys.names.of_owner(key, owner);
            match found {
                Some(found) if found.key == own => self.adopt(it, key, found, answer).await?,
                Some(_) if !it.is_queuing() => {
                    is_held = true;
                    if keys.len() > 1 && expected.contains(key) {
                        self.keys.remove(owner, key);
                    }
                }
                Some(_) | None => self.keys.remove(owner, key),
            }
        }
        if !is_held {
            return Ok(RoundEnd::Again);
        }
        if let [key] = &**keys {
            // An earlier attempt may have queued.
            if it.request.attempt > 0 {
                self.delete(it, key).await?;
            }
            self.keys.remove(owner, key);
        }
        Ok(RoundEnd::Over(AcquireOutcome::contended(None)))
    }

    /// Records a key that an earlier request of the owner has put, here or elsewhere.
    async fn adopt(
        &self,
        it: &Acquiring<'_>,
        key: &Key,
        found: &KeyValue,
        answer: &TransactionAnswer,
    ) -> Result<(), BackendError> {
        let owner = it.owner();
        if self.keys.known(owner, key).is_some_and(|known| known.created == found.created) {
            return Ok(());
        }
        let revision = answer.origin.revision;
        let adopted = match self.adopted(found, revision) {
            Some(adopted) => Some(adopted),
            None => {
                let moved = [(key.clone(), found.created)];
                let is_moved = self.move_keys(&it.member, owner, &moved, &it.lease).await?;
                let ours = KeyValue { lease: it.lease.id, ..found.clone() };
                self.adopted(&ours, revision).filter(|_| is_moved)
            }
        };
        if let Some(adopted) = adopted {
            self.keys.set(owner, key, adopted);
        }
        Ok(())
    }

    /// Decides by the queues of all keys.
    async fn judge(&self, it: &Acquiring<'_>, looked: Looked) -> Result<RoundEnd, BackendError> {
        let (owner, keys) = (it.owner(), &it.request.keys);
        let (mut found, mut is_contended, mut predecessor) = (Vec::new(), false, None);
        let mut fenced = 0;
        for (key, look) in keys.iter().zip(looked.keys) {
            let known = self.keys.known(owner, key);
            let own = match (known, look.own) {
                (Some(known), Some(own)) if known.created == own.created => known,
                // The lease has ended while the owner waited, or another client has deleted the key.
                _ => {
                    self.keys.remove(owner, key);
                    return Ok(RoundEnd::Again);
                }
            };
            is_contended |= look.has_successor;
            fenced = look.fenced.max(fenced);
            predecessor = look.predecessor.or(predecessor);
            let has_fence_key = own.has_fence_key || look.fenced > 0;
            found.push((key.clone(), OwnerKey { seen: looked.revision, has_fence_key, ..own }));
        }
        let Some(predecessor) = predecessor else {
            let answer = looked.answer;
            let free = FreeKeys { keys: found, is_contended, fenced, answer, sign: None };
            return self.grant(it, free).await;
        };
        let [(key, own)] = &found[..] else {
            return Ok(RoundEnd::Over(AcquireOutcome::contended(None)));
        };
        if it.is_queuing() {
            return Ok(self.wait_behind(owner, key, own, &predecessor));
        }
        self.delete(it, key).await?;
        Ok(RoundEnd::Over(AcquireOutcome::contended(None)))
    }

    pub(crate) fn wait_behind(
        &self,
        owner: &Owner,
        key: &Key,
        own: &OwnerKey,
        predecessor: &KeyValue,
    ) -> RoundEnd {
        if !self.keys.queue_behind(owner, key, own, predecessor.key.clone()) {
            return RoundEnd::Again;
        }
        self.keys.owners.keep_until(owner, self.now() + QUEUED_FOR);
        let retry_after = RECHECK + jitter::below(RECHECK);
        let wait_mode = WaitMode::Queued { retry_after };
        RoundEnd::Over(AcquireOutcome::contended_until(None, wait_mode))
    }

    async fn delete(&self, it: &Acquiring<'_>, key: &Key) -> Result<(), BackendError> {
        let deleted = self.free(&it.member, it.turn, std::slice::from_ref(key)).await;
        deleted.map(drop).map_err(BackendError::after_a_part)
    }
}
