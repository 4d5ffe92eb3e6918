//! Renewals: a sign of life for each lease, and a read of keys that a majority confirms. Both are sent when the call begins.
//! Only what has no answer fails: signs of life by the lease, reads by the transaction.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::backend::coordination::positions::in_positions;
use crate::backend::etcd::keep_alives::AwaitedSign;
use crate::backend::etcd::leases::{Leases, PoolLease};
use crate::backend::etcd::locks::{ConfirmedAnswer, EtcdLocks};
use crate::backend::etcd::member::Member;
use crate::backend::etcd::owned_key::{KeyPlace, OwnerKey};
use crate::backend::etcd::protocol::transaction::{KeyOperation, Transaction};
use crate::backend::etcd::server_error::{unanswered, unsteady};
use crate::backend::{BackendError, FailureKind, LeaseRef, LeaseStatus, Owner};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// How many keys one transaction reads. The servers' default limit is 128 steps.
const READ_AT_ONCE: usize = 100;

/// A lease of the pool, and until when its keys must stay.
struct SignedLease {
    lease: Arc<PoolLease>,
    until: Instant,
    sign: Option<AwaitedSign>,
}

/// A held key that is read.
#[derive(Clone)]
struct ReadKey {
    /// The position of its lease in the call.
    at: usize,
    owner: Owner,
    key: Key,
    created: i64,
}

/// The keys of a lease that is renewed.
struct LeaseKeys {
    /// Its position among the leases of the call.
    at: usize,
    lease: LeaseRef,
    keys: Vec<(Key, OwnerKey)>,
}

/// What a renewal has no answer for. All other leases of the call are renewed.
#[derive(Default)]
struct RenewalFailures {
    of_all: Option<BackendError>,
    /// By the position of a lease in the call: its keys were not read.
    of_reads: HashMap<usize, BackendError>,
    /// By the number of a lease of the pool: it has no sign of life.
    of_leases: HashMap<i64, BackendError>,
}

impl RenewalFailures {
    fn of(&self, renewed: &LeaseKeys) -> Option<&BackendError> {
        let of_lease = |(_, own): &(Key, OwnerKey)| self.of_leases.get(&own.lease.id);
        let of_signs = || renewed.keys.iter().find_map(of_lease);
        self.of_all.as_ref().or_else(|| self.of_reads.get(&renewed.at)).or_else(of_signs)
    }
}

type RenewalOutcomes = Vec<(usize, Result<LeaseStatus, BackendError>)>;

impl EtcdLocks {
    /// Only what has no answer in time fails.
    pub(crate) async fn renew(
        self: &Arc<Self>,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let began = self.now();
        let (mut held, mut unknown) = (Vec::new(), Vec::new());
        for (at, lease) in leases.iter().enumerate() {
            let takes_signs = |(_, own): &(Key, OwnerKey)| own.lease.takes_signs();
            match self.held_keys(lease).filter(|keys| keys.iter().all(takes_signs)) {
                Some(keys) => held.push(LeaseKeys { at, lease: lease.clone(), keys }),
                None => unknown.push((at, lease.clone())),
            }
        }
        let mut renewing: JoinSet<RenewalOutcomes> = JoinSet::new();
        if !held.is_empty() {
            let locks = self.clone();
            renewing.spawn(async move { locks.renew_held(held, began).await });
        }
        for (at, lease) in unknown {
            let locks = self.clone();
            renewing.spawn(async move {
                let renewed = timeout(locks.renewal_limit, locks.renew_by_name(&lease)).await;
                vec![(at, renewed.unwrap_or_else(|_| Err(unanswered())))]
            });
        }
        in_positions(renewing, leases.iter().map(|_| Err(unanswered())).collect()).await
    }

    /// The keys of a lease, if all of them are held under leases that are long enough.
    fn held_keys(&self, lease: &LeaseRef) -> Option<Vec<(Key, OwnerKey)>> {
        let needed = Leases::length_for(lease.kept_for());
        let held = |key: &Key| {
            let known = self.keys.known(&lease.owner, key)?;
            (known.is_granted() && known.lease.length >= needed).then(|| (key.clone(), known))
        };
        lease.keys.iter().map(held).collect()
    }

    async fn renew_held(self: Arc<Self>, held: Vec<LeaseKeys>, began: Instant) -> RenewalOutcomes {
        let mut signs: Vec<SignedLease> = Vec::new();
        for LeaseKeys { lease, keys, .. } in &held {
            let until = began + lease.kept_for();
            for (_, own) in keys {
                match signs.iter_mut().find(|it| it.lease.id == own.lease.id) {
                    Some(known) => known.until = known.until.max(until),
                    None => {
                        let lease = own.lease.clone();
                        lease.on_use(began);
                        let sign = Some(self.signs.sign(&lease));
                        signs.push(SignedLease { lease, until, sign });
                    }
                }
            }
        }
        let mut failures = RenewalFailures::default();
        match self.read_held(&held, &mut failures).await {
            Ok(answer) => self.await_signs(signs, answer, began, &mut failures).await,
            Err(error) => failures.of_all = Some(error),
        }
        let outcome = |of: &LeaseKeys| match failures.of(of) {
            None => Ok(self.extend(&of.lease)),
            Some(error) => Err(error.clone()),
        };
        held.iter().map(|of| (of.at, outcome(of))).collect()
    }

    /// Waits for all signs at the same time.
    async fn await_signs(
        self: &Arc<Self>,
        signs: Vec<SignedLease>,
        answer: ConfirmedAnswer,
        began: Instant,
        failures: &mut RenewalFailures,
    ) {
        let left = self.renewal_limit.saturating_sub(self.now().since(began));
        let mut awaiting = JoinSet::new();
        for SignedLease { lease, until, sign } in signs {
            let locks = self.clone();
            awaiting.spawn(async move {
                let outlasts = timeout(left, locks.outlasts(&lease, until, answer, sign)).await;
                (lease, outlasts.unwrap_or_else(|_| Err(unanswered())))
            });
        }
        while let Some(awaited) = awaiting.join_next().await {
            match awaited {
                Ok((_, Ok(()))) => {}
                // Its keys are forgotten, which `extend` finds.
                Ok((lease, Err(_))) if !lease.is_current() => {}
                Ok((lease, Err(error))) => drop(failures.of_leases.insert(lease.id, error)),
                Err(_) => failures.of_all = Some(unanswered()),
            }
        }
    }

    /// Reads keys that are not watched, and some that are, all at the same time. Keys that are gone are forgotten.
    ///
    /// # Errors
    /// If nothing was read.
    async fn read_held(
        self: &Arc<Self>,
        held: &[LeaseKeys],
        failures: &mut RenewalFailures,
    ) -> Result<ConfirmedAnswer, BackendError> {
        let (mut read, mut watched) = (Vec::new(), Vec::new());
        for LeaseKeys { at, lease, keys } in held {
            for (key, own) in keys {
                let (key, created) = (key.clone(), own.created);
                let of = ReadKey { at: *at, owner: lease.owner, key, created };
                if own.watch.is_some() { watched.push(of) } else { read.push(of) }
            }
        }
        // The deletion of a watched key is reported, so a read of one only adds certainty.
        let room = READ_AT_ONCE - read.len() % READ_AT_ONCE;
        read.extend(watched.into_iter().take(room));
        let member = self.link.member().await?;
        let mut reads = JoinSet::new();
        for keys in read.chunks(READ_AT_ONCE) {
            let (locks, member, keys) = (self.clone(), member.clone(), keys.to_vec());
            reads.spawn(async move {
                let read = timeout(locks.renewal_limit, locks.read_each(&member, &keys)).await;
                read.unwrap_or_else(|_| vec![(keys, Err(unanswered()))])
            });
        }
        let reads = reads.join_all().await.into_iter().flatten();
        let (mut oldest, mut failed): (Option<ConfirmedAnswer>, _) = (None, unanswered());
        for (keys, read) in reads {
            match read {
                // The earliest answer counts for all, with the latest term.
                Ok(answer) => {
                    oldest = Some(oldest.map_or(answer, |it| ConfirmedAnswer {
                        sent: it.sent.min(answer.sent),
                        term: it.term.max(answer.term),
                    }));
                }
                Err(error) => {
                    failures.of_reads.extend(keys.iter().map(|of| (of.at, error.clone())));
                    failed = error;
                }
            }
        }
        oldest.ok_or(failed)
    }

    /// Reads keys by one transaction, or one by one if it is refused: the user may lack the right to one of them.
    async fn read_each(
        self: &Arc<Self>,
        member: &Arc<Member>,
        keys: &[ReadKey],
    ) -> Vec<(Vec<ReadKey>, Result<ConfirmedAnswer, BackendError>)> {
        let read = self.read_keys(member, keys).await;
        let is_refused = read.as_ref().is_err_and(|error| error.kind() == FailureKind::Rejected);
        if !is_refused || keys.len() == 1 {
            return vec![(keys.to_vec(), read)];
        }
        let mut reads = JoinSet::new();
        for key in keys {
            let (locks, member, key) = (self.clone(), member.clone(), [key.clone()]);
            reads.spawn(async move {
                let read = locks.read_keys(&member, &key).await;
                (key.to_vec(), read)
            });
        }
        reads.join_all().await
    }

    async fn read_keys(
        &self,
        member: &Arc<Member>,
        keys: &[ReadKey],
    ) -> Result<ConfirmedAnswer, BackendError> {
        let gets = keys
            .iter()
            .map(|of| KeyOperation::Get { key: self.keys.names.of_owner(&of.key, &of.owner) });
        let (answer, confirmed) = self.transact(member, &Transaction::of(gets.collect())).await?;
        for (at, of) in keys.iter().enumerate() {
            let is_there =
                answer.found(at)?.first().is_some_and(|found| found.created == of.created);
            let known = self.keys.known(&of.owner, &of.key);
            if !is_there && known.is_some_and(|known| known.created == of.created) {
                self.keys.lose(&of.owner, &of.key);
            }
        }
        Ok(confirmed)
    }

    /// Extends the time of a lease. Its keys were there a moment ago.
    fn extend(&self, lease: &LeaseRef) -> LeaseStatus {
        // If its time is over, the keys are being deleted.
        if self.held_keys(lease).is_none() || self.keys.owners.is_over(&lease.owner) {
            return LeaseStatus::NotHeld;
        }
        self.keys.owners.keep_until(&lease.owner, self.now() + lease.kept_for());
        LeaseStatus::Held
    }

    /// Renews a lease with keys that are unknown here, or under a lease that is too short or denied. The keys are put again.
    async fn renew_by_name(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let turn = self.keys.owners.begin(lease.owner, lease.kept_for()).await;
        let (owner, until) = (turn.owner(), self.now() + lease.kept_for());
        let member = self.link.member().await?;
        let longer = self.leases.holding(&member, lease.kept_for()).await?;
        let sign = self.early_sign(&longer, until);
        let looked = self.look(&member, owner, &lease.keys).await?;
        let mut moved = Vec::new();
        for (key, look) in lease.keys.iter().zip(&looked.keys) {
            match &look.own {
                // Without an answer, a deletion may still be executed.
                Some(_) if self.keys.known(owner, key).is_some_and(|it| it.is_leaving()) => {
                    return Ok(LeaseStatus::NotHeld);
                }
                Some(own) if look.is_first() => moved.push((key.clone(), own.created)),
                Some(_) | None => return Ok(LeaseStatus::NotHeld),
            }
        }
        if !self.move_keys(&member, owner, &moved, &longer).await? {
            return Err(unsteady());
        }
        self.outlasts(&longer, until, looked.answer, sign).await?;
        for (key, created) in moved {
            let former = self.keys.known(owner, &key).filter(|former| former.created == created);
            let renewed = OwnerKey {
                place: KeyPlace::Granted,
                fence: former.as_ref().and_then(|former| former.fence),
                has_fence_key: former.as_ref().is_some_and(|former| former.has_fence_key),
                watch: former.filter(OwnerKey::is_granted).and_then(|former| former.watch),
                ..OwnerKey::new(created, looked.revision, longer.clone())
            };
            if !self.keys.set(owner, &key, renewed) {
                return Ok(LeaseStatus::NotHeld);
            }
        }
        self.keys.owners.keep_until(owner, self.now() + lease.kept_for());
        Ok(LeaseStatus::Held)
    }

    pub(crate) async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let member = self.link.member().await?;
        let looked = self.look(&member, &lease.owner, &lease.keys).await?;
        let is_held = looked.keys.iter().all(|look| look.is_first());
        Ok(LeaseStatus::of(is_held))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_lease_without_a_sign_of_life_fails_alone() {
        let now = Instant::from_nanos(1);
        let renewed = |at: usize, leases: &[i64]| {
            let known = |id: &i64| OwnerKey {
                place: KeyPlace::Granted,
                ..OwnerKey::new(
                    7,
                    7,
                    Arc::new(PoolLease::granted(*id, Duration::from_secs(5), now)),
                )
            };
            let key = |id: &i64| (Key::from(format!("order:{id}")), known(id));
            let keys: Vec<_> = leases.iter().map(key).collect();
            let names: Vec<_> = keys.iter().map(|(key, _)| key.clone()).collect();
            let lease = LeaseRef::new(names, Owner::random().unwrap(), Duration::from_secs(4));
            LeaseKeys { at, lease, keys }
        };
        let (one, other, both) = (renewed(0, &[1]), renewed(1, &[2]), renewed(2, &[1, 2]));
        let mut failures = RenewalFailures::default();
        failures.of_leases.insert(2, unanswered());
        let failed = |failures: &RenewalFailures| {
            [&one, &other, &both].map(|renewed| failures.of(renewed).is_some())
        };
        assert_eq!(failed(&failures), [false, true, true]);
        failures.of_reads.insert(0, unanswered());
        assert_eq!(failed(&failures), [true, true, true]);
        let reads = RenewalFailures { of_leases: HashMap::new(), ..failures };
        assert_eq!(failed(&reads), [true, false, false]);
        let all = RenewalFailures { of_all: Some(unanswered()), ..RenewalFailures::default() };
        assert_eq!(failed(&all), [true, true, true]);
    }
}
