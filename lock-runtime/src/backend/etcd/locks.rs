//! What the requests of a pool have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::etcd::keep_alives::{AwaitedSign, KeepAlives};
use crate::backend::etcd::leases::{Leases, LifeSign, PoolLease};
use crate::backend::etcd::member::{Member, TransactionFailure, WithoutToken};
use crate::backend::etcd::member_task::MemberLink;
use crate::backend::etcd::owned_key::OwnerKey;
use crate::backend::etcd::owned_keys::OwnedKeys;
use crate::backend::etcd::protocol::key_value::KeyValue;
use crate::backend::etcd::protocol::transaction::{
    KeyCondition, KeyOperation, KeySearch, SearchOrder, Transaction, TransactionAnswer,
};
use crate::backend::etcd::server_error::{closed, is_denied, lease_denied, malformed, unanswered};
use crate::backend::{BackendError, FailureKind, Owner};
use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::owner_info::OwnerLabel;

/// How many keys one transaction reads or deletes. The servers' default limit is 128 steps.
pub(crate) const KEYS_AT_ONCE: usize = 30;

const STEPS_OF_A_LOOK: usize = 4;

pub(crate) struct EtcdLocks {
    pub(crate) keys: Arc<OwnedKeys>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) signs: KeepAlives,
    pub(crate) link: Arc<MemberLink>,
    /// The time for what a renewal asks, and for the next connection after the end of a token.
    pub(crate) renewal_limit: Duration,
}

/// Whether the caller of a request is gone.
#[derive(Clone, Default)]
pub(crate) struct AbandonFlag(Arc<AtomicBool>);

impl AbandonFlag {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// # Errors
    /// If no caller waits for what is about to be sent.
    pub(crate) fn check(&self) -> Result<(), BackendError> {
        if self.0.load(Ordering::SeqCst) { Err(closed()) } else { Ok(()) }
    }
}

/// An answer that a majority has confirmed.
#[derive(Clone, Copy)]
pub(crate) struct ConfirmedAnswer {
    /// When its request was sent.
    pub(crate) sent: Instant,
    pub(crate) term: u64,
}

/// A key of an owner as it was found, and what is around it.
pub(crate) struct KeyLook {
    pub(crate) own: Option<KeyValue>,
    /// The key right before it.
    pub(crate) predecessor: Option<KeyValue>,
    pub(crate) has_successor: bool,
    /// The last write of a fence beside the queue.
    pub(crate) fenced: i64,
}

impl KeyLook {
    pub(crate) fn is_first(&self) -> bool {
        self.own.is_some() && self.predecessor.is_none()
    }
}

/// The keys of an owner, as they were found at one revision or later.
pub(crate) struct Looked {
    pub(crate) keys: Vec<KeyLook>,
    /// Before all reads.
    pub(crate) revision: i64,
    pub(crate) answer: ConfirmedAnswer,
}

impl EtcdLocks {
    pub(crate) fn now(&self) -> Instant {
        self.keys.owners.clock.now()
    }

    /// Runs `call`, and once more on the next connection if it fails because its connection has no valid token. The token of an
    /// idle pool ends without a request that would have shown it.
    pub(crate) async fn with_token<T, F: Future<Output = Result<T, BackendError>>>(
        &self,
        call: impl Fn() -> F,
    ) -> Result<T, BackendError> {
        let outcome = call().await;
        let Err(error) = &outcome else { return outcome };
        let Some(WithoutToken(number)) = error.cause() else { return outcome };
        if error.kind() != FailureKind::NotApplied {
            return outcome;
        }
        match timeout(self.renewal_limit, self.link.next_member(*number)).await {
            Ok(Some(_)) => call().await,
            Ok(None) | Err(_) => outcome,
        }
    }

    /// Runs a transaction that is sent from now on.
    pub(crate) async fn transact(
        &self,
        member: &Arc<Member>,
        transaction: &Transaction,
    ) -> Result<(TransactionAnswer, ConfirmedAnswer), TransactionFailure> {
        let sent = self.now();
        let answer = member.transact(transaction).await?;
        let confirmed = ConfirmedAnswer { sent, term: answer.origin.term };
        Ok((answer, confirmed))
    }

    /// A sign of life ahead of an answer, if that answer will need one.
    pub(crate) fn early_sign(&self, lease: &Arc<PoolLease>, until: Instant) -> Option<AwaitedSign> {
        let is_needed = lease.last_sign().sent < lease.needed_sign(until);
        is_needed.then(|| self.signs.sign(lease))
    }

    /// Waits until it is known that the keys of `lease` stay until `until`.
    pub(crate) async fn outlasts(
        &self,
        lease: &Arc<PoolLease>,
        until: Instant,
        answer: ConfirmedAnswer,
        mut sign: Option<AwaitedSign>,
    ) -> Result<(), BackendError> {
        const TRIES: usize = 3;
        let needed = lease.needed_sign(until);
        let counts = |sign: LifeSign| sign.counts(answer.sent, answer.term, needed);
        for _ in 0..TRIES {
            if counts(lease.last_sign()) {
                return Ok(());
            }
            sign.take().unwrap_or_else(|| self.signs.sign(lease)).get().await?;
        }
        if counts(lease.last_sign()) { Ok(()) } else { Err(unanswered()) }
    }

    /// Reads the queue around the keys of `owner`: confirmed by a majority, and sent from now on.
    pub(crate) async fn look(
        &self,
        member: &Arc<Member>,
        owner: &Owner,
        locks: &[Key],
    ) -> Result<Looked, BackendError> {
        let (mut keys, mut first) = (Vec::with_capacity(locks.len()), None);
        for locks in locks.chunks(KEYS_AT_ONCE) {
            let created: Vec<_> = locks.iter().map(|lock| self.created(owner, lock)).collect();
            let reads = locks.iter().zip(&created).flat_map(|(lock, created)| {
                let around = match created {
                    Some(created) => self.around(lock, *created),
                    // Its position is not known yet.
                    None => self.oldest(lock),
                };
                let [key, fence] =
                    [self.keys.names.of_owner(lock, owner), self.keys.names.of_fence(lock)];
                let gets = [KeyOperation::Get { key }, KeyOperation::Get { key: fence }];
                gets.into_iter().chain(around)
            });
            let reads = Transaction::of(reads.collect());
            let (answer, confirmed) = self.transact(member, &reads).await?;
            first.get_or_insert((answer.origin.revision, confirmed));
            for (at, (lock, created)) in locks.iter().zip(created).enumerate() {
                let found = |step| answer.found(STEPS_OF_A_LOOK * at + step);
                let [own, fence, one, other] = [found(0)?, found(1)?, found(2)?, found(3)?];
                let own = own.first().cloned();
                let fenced = fence.first().map_or(0, |fence| fence.modified);
                let mut look = KeyLook {
                    own,
                    predecessor: one.first().cloned(),
                    has_successor: !other.is_empty(),
                    fenced,
                };
                let is_as_known = match (&look.own, created) {
                    (Some(own), Some(created)) => own.created == created,
                    (Some(_), None) => false,
                    (None, _) => true,
                };
                if !is_as_known && let Some(own) = look.own.take() {
                    look = self.look_around(member, lock, own, fenced).await?;
                }
                keys.push(look);
            }
        }
        let (revision, answer) = first.ok_or_else(malformed)?;
        Ok(Looked { keys, revision, answer })
    }

    /// The queue around a key in a position that was not known before.
    async fn look_around(
        &self,
        member: &Arc<Member>,
        lock: &Key,
        own: KeyValue,
        fenced: i64,
    ) -> Result<KeyLook, BackendError> {
        let around = self.around(lock, own.created).into_iter().collect();
        let (answer, _) = self.transact(member, &Transaction::of(around)).await?;
        let predecessor = answer.found(0)?.first().cloned();
        let has_successor = !answer.found(1)?.is_empty();
        Ok(KeyLook { own: Some(own), predecessor, has_successor, fenced })
    }

    fn created(&self, owner: &Owner, lock: &Key) -> Option<i64> {
        self.keys.known(owner, lock).map(|known| known.created)
    }

    /// The keys right before and after a position.
    fn around(&self, lock: &Key, created: i64) -> [KeyOperation; 2] {
        let search = |order| self.keys.names.search(lock, order, 1);
        [
            KeyOperation::Find(KeySearch {
                created_to: created - 1,
                ..search(SearchOrder::NewestFirst)
            }),
            KeyOperation::Find(KeySearch {
                created_from: created + 1,
                ..search(SearchOrder::OldestFirst)
            }),
        ]
    }

    /// As many steps as [`around`](Self::around).
    fn oldest(&self, lock: &Key) -> [KeyOperation; 2] {
        let oldest =
            || KeyOperation::Find(self.keys.names.search(lock, SearchOrder::OldestFirst, 1));
        [oldest(), oldest()]
    }

    /// The key as it was found, perhaps under the lease of another connection or class. `None` if that lease is not of this pool.
    pub(crate) fn adopted(&self, found: &KeyValue, revision: i64) -> Option<OwnerKey> {
        let lease = self.leases.find(found.lease)?;
        Some(OwnerKey::new(found.created, revision, lease))
    }

    /// Puts the keys again under `lease`, in the same positions. `false` if a key is gone.
    pub(crate) async fn move_keys(
        &self,
        member: &Arc<Member>,
        owner: &Owner,
        keys: &[(Key, i64)],
        lease: &Arc<PoolLease>,
    ) -> Result<bool, BackendError> {
        let name = |lock: &Key| self.keys.names.of_owner(lock, owner);
        let created = keys
            .iter()
            .map(|(lock, created)| KeyCondition::Created { key: name(lock), revision: *created });
        let belongs = self.leases.belongs_to(member, lease);
        let puts =
            keys.iter().map(|(lock, _)| KeyOperation::Move { key: name(lock), lease: lease.id });
        let moving = Transaction {
            conditions: std::iter::once(belongs).chain(created).collect(),
            success: puts.collect(),
            failure: vec![KeyOperation::Get { key: self.keys.names.of_lease(lease.id) }],
        };
        let moved = self.transact(member, &moving).await.map_err(BackendError::from);
        if moved.as_ref().is_err_and(is_denied) && self.leases.close_if_denied(member, lease).await
        {
            // The next attempt has another lease.
            return Err(lease_denied());
        }
        let (answer, _) = moved?;
        if !answer.is_met {
            let seen = answer.found(0)?.first();
            if !Leases::is_of(member, seen) {
                self.leases.repair(member, lease, seen).await?;
            }
        }
        Ok(answer.is_met)
    }

    /// Makes the key of an owner for a lock. Other clients do not read the value.
    pub(crate) fn put(
        &self,
        (owner, label): (&Owner, OwnerLabel),
        lock: &Key,
        lease: &PoolLease,
    ) -> KeyOperation {
        let (key, value) = (self.keys.names.of_owner(lock, owner), label.to_string().into_bytes());
        KeyOperation::Put { key, value, lease: lease.id }
    }
}
