//! What happens without a request: keys that are over are deleted, held keys are watched and looked at, and ended leases are
//! forgotten.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::backend::etcd::key_names::KeyNames;
use crate::backend::etcd::leases::Leases;
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::member::Member;
use crate::backend::etcd::owned_key::OwnerKey;
use crate::backend::etcd::owned_keys::MissedChanges;
use crate::backend::etcd::protocol::transaction::{KeyOperation, Transaction};
use crate::backend::etcd::release::DELETE_AGAIN;
use crate::backend::etcd::server_error::is_denied;
use crate::backend::{BackendError, FailureKind, Owner};
use crate::base::key::Key;

/// The longest time after which a deletion that was refused is repeated.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// When a look without an answer is repeated.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Runs until the pool is dropped. Dropping the future ends what it has started.
pub(crate) async fn run(
    locks: Arc<EtcdLocks>,
    mut ended_leases: mpsc::UnboundedReceiver<i64>,
    mut misses: mpsc::UnboundedReceiver<MissedChanges>,
) {
    let (keys, mut work) = (locks.keys.clone(), JoinSet::new());
    let mut connection = 0;
    loop {
        let first = keys.first_due();
        tokio::select! {
            () = keys.owners.clock.sleep_until_due(first) => {
                let now = keys.owners.clock.now();
                keys.watch_held(now);
                for owner in keys.owners.take_due(now) {
                    let locks = locks.clone();
                    work.spawn(async move { locks.end(owner).await });
                }
            }
            ended = ended_leases.recv() => match ended {
                Some(lease) => keys.lose_lease(lease),
                None => return,
            },
            missed = misses.recv() => match missed {
                Some(missed) => {
                    let locks = locks.clone();
                    work.spawn(async move { locks.look_again(missed).await });
                }
                None => return,
            },
            Some(member) = locks.link.next_member(connection) => {
                connection = member.number;
                let locks = locks.clone();
                // The next connection looks again.
                work.spawn(async move { drop(locks.delete_unknown(&member).await) });
            }
            () = keys.owners.earlier.notified() => {}
            _ = work.join_next(), if !work.is_empty() => {}
        }
    }
}

impl EtcdLocks {
    async fn look_again(&self, missed: MissedChanges) {
        match missed {
            MissedChanges::OfHeld { owner, key } => {
                while self.look_around_held(&owner, &key).await.is_err() {
                    sleep(LOOK_AGAIN).await;
                }
            }
            MissedChanges::OfPredecessor { watch, predecessor, created } => {
                // The watch of the next connection begins earlier, and a waiter looks again after a while.
                if let Ok(false) = self.is_there(&predecessor, created).await {
                    self.keys.predecessor_gone(watch);
                }
            }
        }
    }

    /// Whether the member that serves the pool has this key, made by a revision before `created`. After the creation of a watch, it
    /// has all changes that the watch does not report.
    async fn is_there(&self, name: &[u8], created: i64) -> Result<bool, BackendError> {
        let member = self.link.member().await?;
        let read = Transaction::of(vec![KeyOperation::GetHere { key: name.to_vec() }]);
        let answer = member.transact(&read).await?;
        Ok(answer.found(0)?.iter().any(|found| found.created < created))
    }

    /// Looks whether a held key is still held, and whether other owners wait.
    async fn look_around_held(&self, owner: &Owner, key: &Key) -> Result<(), BackendError> {
        if self.keys.known(owner, key).is_none() {
            return Ok(());
        }
        let member = self.link.member().await?;
        let looked = self.look(&member, owner, std::slice::from_ref(key)).await?;
        let Some(known) = self.keys.known(owner, key).filter(OwnerKey::is_granted) else {
            return Ok(());
        };
        let Some(look) = looked.keys.first() else { return Ok(()) };
        if look.own.as_ref().is_none_or(|own| own.created != known.created) {
            self.keys.lose(owner, key);
            return Ok(());
        }
        if look.has_successor {
            self.keys.events.contended(key.as_str());
        }
        self.keys.on_seen(owner, key, known.created, looked.revision);
        Ok(())
    }

    /// Deletes keys that end with a lease of this pool and belong to no owner of it. Members that were restored from a copy
    /// have the keys of locks that were released since then, and the lease keeps them alive.
    async fn delete_unknown(&self, member: &Arc<Member>) -> Result<(), BackendError> {
        for lease in self.leases.all() {
            let names = match Leases::keys_of(member, lease.id).await {
                // The user has no right to one of them.
                Err(error) if is_denied(&error) => continue,
                names => names?,
            };
            for name in names {
                let (lock, owner) = (self.keys.names.lock_of(&name), KeyNames::owner_in(&name));
                let (Some(lock), Some(owner)) = (lock, owner) else { continue };
                // An owner is known before its first request is sent.
                if self.keys.locks_of(&owner).contains(&lock) {
                    continue;
                }
                let turn = self.keys.owners.begin(owner, DELETE_AGAIN).await;
                self.free(member, &turn, &[lock]).await?;
            }
        }
        Ok(())
    }

    /// Deletes what an owner has left when its time is over.
    async fn end(&self, owner: Owner) {
        let turn = self.keys.owners.turn(owner, DELETE_AGAIN).await;
        if !self.keys.owners.is_over(&owner) {
            return;
        }
        let locks = self.keys.locks_of(&owner);
        if locks.is_empty() {
            return;
        }
        let ended = match self.link.member().await {
            Ok(member) => self.free(&member, &turn, &locks).await.map_err(|error| error.kind()),
            // Nothing was sent.
            Err(_) => Err(FailureKind::NotApplied),
        };
        let pause = match ended {
            Ok(_) => return,
            Err(FailureKind::Rejected) => self.leave_to_lease(&owner),
            Err(_) => DELETE_AGAIN,
        };
        self.keys.owners.end_at(&owner, self.now() + pause, false);
    }

    /// The deletion of what an owner has left was refused. It ends with its lease, once no held key needs that lease. Returns when
    /// to try again.
    fn leave_to_lease(&self, owner: &Owner) -> Duration {
        let mut pause = DELETE_AGAIN;
        for lease in self.keys.mark_refused(owner) {
            pause = pause.max(lease.length / 4).min(LONGEST_PAUSE);
            lease.close();
            if !self.keys.needs(&lease) {
                lease.abandon();
            }
            if !lease.is_current() && lease.has_run_out(self.now()) {
                self.leases.end(&lease);
            }
        }
        pause
    }
}
