//! Release requests.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::etcd::acquiring::RoundEnd;
use crate::backend::etcd::leases::{Leases, PoolLease};
use crate::backend::etcd::locks::{EtcdLocks, KEYS_AT_ONCE};
use crate::backend::etcd::member::{Member, TransactionFailure};
use crate::backend::etcd::owned_key::{KeyPlace, OwnerKey, leases_of};
use crate::backend::etcd::owned_keys::KeyTurn;
use crate::backend::etcd::protocol::transaction::{
    KeyCondition, KeyOperation, SearchOrder, Transaction,
};
use crate::backend::etcd::server_error::{lease_ended, unsteady};
use crate::backend::{
    AcquireOutcome, BackendError, FailureKind, Owner, ReleaseOutcome, ReleaseRequest, Successor,
    WaitMode,
};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// When a deletion without an answer is repeated.
pub(crate) const DELETE_AGAIN: Duration = Duration::from_secs(1);

/// How many keys one transaction deletes together with the fences beside their queues.
const FENCED_AT_ONCE: usize = 20;

/// How many times a deletion is repeated when it finds other keys than were seen.
const MOST_DELETIONS: usize = 5;

/// What an owner had before its keys were marked as about to be deleted.
struct FormerKeys {
    keys: Vec<(Key, OwnerKey)>,
    deadline: Option<Instant>,
}

impl EtcdLocks {
    pub(crate) async fn release(
        &self,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome, BackendError> {
        let lease = &request.lease;
        let turn = self.keys.owners.begin(lease.owner, DELETE_AGAIN).await;
        let member = self.link.member().await?;
        if !request.free_after.is_zero() {
            return self.keep(&member, &turn, request).await;
        }
        if let (Some(successor), [key]) = (&request.successor, &*lease.keys)
            && let Some(own) = self.keys.known(&lease.owner, key).filter(OwnerKey::is_granted)
        {
            let handed_on = self.pass_on(&member, &own, key, &lease.owner, successor).await?;
            if let Some(outcome) = handed_on {
                return Ok(outcome);
            }
        }
        let is_held = self.free(&member, &turn, &lease.keys).await?;
        Ok(if is_held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
    }

    /// Deletes what the owner has for these locks. Returns whether it held all of them.
    ///
    /// Earlier requests of the owner have an answer, or belong to a former connection. In that case their puts no longer change
    /// anything, and their deletions only delete the key that they name by its creation.
    pub(crate) async fn free(
        &self,
        member: &Arc<Member>,
        turn: &KeyTurn,
        locks: &[Key],
    ) -> Result<bool, BackendError> {
        let owner = turn.owner();
        let before = self.mark_leaving(owner, locks);
        let (mut is_held, mut is_first) = (true, true);
        let has_fence_key = |lock| self.has_fence_key(owner, lock);
        let at_once = if locks.iter().any(has_fence_key) { FENCED_AT_ONCE } else { KEYS_AT_ONCE };
        for locks in locks.chunks(at_once) {
            match self.free_chunk(member, owner, locks).await {
                Ok(was_held) => is_held &= was_held,
                Err(error) if error.kind() == FailureKind::MaybeApplied => return Err(error),
                Err(error) => {
                    self.restore(owner, before);
                    return Err(if is_first { error } else { error.after_a_part() });
                }
            }
            is_first = false;
        }
        Ok(is_held)
    }

    /// Deletes keys by one transaction, each under the condition that it is still the one that was seen. A deletion that is
    /// executed late finds another key.
    async fn free_chunk(
        &self,
        member: &Arc<Member>,
        owner: &Owner,
        locks: &[Key],
    ) -> Result<bool, BackendError> {
        let names = &self.keys.names;
        let created = |lock| self.keys.known(owner, lock).map(|known| known.created);
        let mut creations: Option<Vec<i64>> = locks.iter().map(created).collect();
        for _ in 0..MOST_DELETIONS {
            // Each step after a look at which key was the first one.
            let step = |of: fn(Vec<u8>) -> KeyOperation| {
                let steps = locks.iter().flat_map(move |lock| {
                    let oldest = names.search(lock, SearchOrder::OldestFirst, 1);
                    [KeyOperation::Find(oldest), of(names.of_owner(lock, owner))]
                });
                steps.collect::<Vec<_>>()
            };
            let look = step(|key| KeyOperation::Get { key });
            let deleting = match &creations {
                None => Transaction::of(look),
                Some(creations) => {
                    let pairs = locks.iter().zip(creations);
                    let condition = |(lock, &revision): (&Key, &i64)| KeyCondition::Created {
                        key: names.of_owner(lock, owner),
                        revision,
                    };
                    let fences = locks.iter().filter(|lock| self.has_fence_key(owner, lock));
                    let mut deletes = step(|key| KeyOperation::Delete { key });
                    deletes.extend(fences.map(|lock| self.deleting_fence(owner, lock)));
                    Transaction {
                        conditions: pairs.map(condition).collect(),
                        success: deletes,
                        failure: look,
                    }
                }
            };
            let answer = member.delete(deleting).await?;
            if creations.is_some() && answer.is_met {
                let mut is_held = true;
                for (at, lock) in locks.iter().enumerate() {
                    let own = names.of_owner(lock, owner);
                    let was_first = answer.found(2 * at)?.first().is_some_and(|it| it.key == own);
                    is_held &= was_first && answer.step(2 * at + 1)?.deleted()? > 0;
                    self.keys.remove(owner, lock);
                }
                return Ok(is_held);
            }
            let mut found = Vec::with_capacity(locks.len());
            for at in 0..locks.len() {
                found.push(answer.found(2 * at + 1)?.first().map_or(0, |own| own.created));
            }
            creations = Some(found);
        }
        Err(unsteady())
    }

    fn has_fence_key(&self, owner: &Owner, lock: &Key) -> bool {
        self.keys.known(owner, lock).is_some_and(|known| known.has_fence_key)
    }

    /// Deletes the fence beside the queue if no other owner is in the queue: later keys are made by later revisions.
    fn deleting_fence(&self, owner: &Owner, lock: &Key) -> KeyOperation {
        let names = &self.keys.names;
        KeyOperation::Nested(Transaction {
            conditions: names.has_no_other(lock, owner).into(),
            success: vec![KeyOperation::Delete { key: names.of_fence(lock) }],
            failure: Vec::new(),
        })
    }

    /// Marks the keys as about to be deleted, even if no answer comes. Returns what they were.
    fn mark_leaving(&self, owner: &Owner, locks: &[Key]) -> FormerKeys {
        let deadline = self.keys.owners.deadline(owner);
        let mut keys = Vec::new();
        for lock in locks {
            if let Some(known) = self.keys.known(owner, lock) {
                let place = KeyPlace::Leaving;
                self.keys.set(owner, lock, OwnerKey { place, watch: None, ..known.clone() });
                keys.push((lock.clone(), known));
            }
        }
        // Keys without an answer have to go too.
        if !self.keys.locks_of(owner).is_empty() {
            self.keys.owners.end_at(owner, self.now() + DELETE_AGAIN, false);
        }
        FormerKeys { keys, deadline }
    }

    /// A request that was not sent has changed nothing: the release that repeats it finds what was there before.
    fn restore(&self, owner: &Owner, before: FormerKeys) {
        for (lock, known) in before.keys {
            if self.keys.known(owner, &lock).is_some() {
                self.keys.set(owner, &lock, OwnerKey { watch: None, ..known });
            }
        }
        if let Some(deadline) = before.deadline {
            self.keys.owners.end_at(owner, deadline, false);
        }
    }

    /// Keeps the keys locked for the time that the request says, even if the process ends.
    async fn keep(
        &self,
        member: &Arc<Member>,
        turn: &KeyTurn,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome, BackendError> {
        let (owner, locks) = (turn.owner(), &request.lease.keys);
        let until = self.now() + request.free_after;
        let lease = self.leases.holding(member, request.free_after).await?;
        let mut sign = self.early_sign(&lease, until);
        let looked = self.look(member, owner, locks).await?;
        let (mut kept, mut short, mut not_held) = (Vec::new(), Vec::new(), Vec::new());
        for (lock, look) in locks.iter().zip(&looked.keys) {
            let Some(found) = look.own.as_ref().filter(|_| look.is_first()) else {
                not_held.push(lock.clone());
                continue;
            };
            let known = self.keys.known(owner, lock).filter(|known| known.created == found.created);
            let known = known.or_else(|| self.adopted(found, looked.revision));
            match known {
                Some(known) if known.lease.lasts_like(&lease) => kept.push((lock, known)),
                _ => {
                    short.push((lock.clone(), found.created));
                    let new = OwnerKey::new(found.created, looked.revision, lease.clone());
                    let moved = OwnerKey { has_fence_key: look.fenced > 0, ..new };
                    kept.push((lock, moved));
                }
            }
        }
        let sign_of = lease.id;
        if !short.is_empty() && !self.move_keys(member, owner, &short, &lease).await? {
            return Err(unsteady());
        }
        // An idle lease has few signs of life, and no more follow if the process ends now.
        for lease in leases_of(kept.iter().map(|(_, own)| own)) {
            let sign = if lease.id == sign_of { sign.take() } else { None };
            self.outlasts(&lease, until, looked.answer, sign).await?;
            if !lease.is_current() {
                return Err(lease_ended());
            }
        }
        for (lock, own) in kept {
            let own = OwnerKey { place: KeyPlace::Granted, ..own };
            if !self.keys.set(owner, lock, own) {
                not_held.push(lock.clone());
            }
        }
        let is_held = not_held.is_empty();
        let freed = if is_held { Ok(true) } else { self.free(member, turn, &not_held).await };
        // Even if those were not freed, the other keys stay for the requested time.
        self.keys.owners.end_at(owner, self.now() + request.free_after, true);
        freed?;
        Ok(if is_held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
    }

    /// Deletes the key and puts one for the successor, in one transaction. `None` if the lease has to be looked at first.
    async fn pass_on(
        &self,
        member: &Arc<Member>,
        own: &OwnerKey,
        lock: &Key,
        owner: &Owner,
        successor: &Successor,
    ) -> Result<Option<ReleaseOutcome>, BackendError> {
        let next = self.keys.owners.begin(successor.owner, successor.ttl).await;
        let next = next.owner();
        let Ok(lease) = self.leases.holding(member, successor.ttl).await else { return Ok(None) };
        let passing = self.passing(member, own, lock, (owner, successor), &lease);
        let before = self.mark_leaving(owner, std::slice::from_ref(lock));
        self.keys.expect_puts(next, std::slice::from_ref(lock));
        let answer = match self.transact(member, &passing).await {
            Ok((answer, _)) => answer,
            Err(TransactionFailure::WithoutLease) => {
                self.leases.end(&lease);
                self.keys.remove(next, lock);
                self.restore(owner, before);
                return Ok(None);
            }
            Err(failure) if failure.has_applied_nothing() => {
                // The release itself needs no put.
                self.keys.remove(next, lock);
                self.restore(owner, before);
                return Ok(None);
            }
            Err(TransactionFailure::Other(error)) => return Err(error.after_a_part()),
        };
        if !answer.is_met {
            self.keys.remove(next, lock);
            self.restore(owner, before);
            let seen = answer.found(0)?.first();
            if !Leases::is_of(member, seen) {
                // The release itself needs no put.
                let _ = self.leases.repair(member, &lease, seen).await;
            }
            return Ok(None);
        }
        self.keys.remove(owner, lock);
        let revision = answer.origin.revision;
        let queued = OwnerKey::new(revision, revision, lease);
        if !self.keys.set(next, lock, queued.clone()) {
            return Ok(Some(ReleaseOutcome::Freed));
        }
        let Some(predecessor) = answer.found(2)?.get(1) else {
            return Ok(Some(ReleaseOutcome::SuccessorGranted));
        };
        Ok(Some(match self.wait_behind(next, lock, &queued, predecessor) {
            RoundEnd::Over(AcquireOutcome::Contended {
                wait_mode: WaitMode::Queued { retry_after },
                ..
            }) => ReleaseOutcome::successor_queued(retry_after),
            // The successor looks on its own.
            RoundEnd::Over(_) | RoundEnd::Again => ReleaseOutcome::successor_queued(Duration::ZERO),
        }))
    }

    fn passing(
        &self,
        member: &Arc<Member>,
        own: &OwnerKey,
        lock: &Key,
        (owner, next): (&Owner, &Successor),
        lease: &PoolLease,
    ) -> Transaction {
        let names = &self.keys.names;
        let key = names.of_owner(lock, owner);
        Transaction {
            conditions: vec![
                self.leases.belongs_to(member, lease),
                KeyCondition::Created { key: key.clone(), revision: own.created },
            ],
            success: vec![
                KeyOperation::Delete { key },
                self.put((&next.owner, next.label), lock, lease),
                KeyOperation::Find(names.search(lock, SearchOrder::NewestFirst, 2)),
            ],
            failure: vec![KeyOperation::Get { key: names.of_lease(lease.id) }],
        }
    }
}
