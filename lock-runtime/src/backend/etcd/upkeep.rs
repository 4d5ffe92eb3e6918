//! What happens without a request: keys that are over are deleted, held keys are watched, and ended leases forgotten.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::backend::Owner;
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::release::DELETE_AGAIN;

/// Runs until the pool is dropped. Dropping the future ends what it has started.
pub(crate) async fn run(locks: Arc<EtcdLocks>, mut ended_leases: mpsc::UnboundedReceiver<i64>) {
    let (keys, mut work) = (locks.keys.clone(), JoinSet::new());
    loop {
        let first = keys.first_due();
        let due = async {
            match first {
                Some(first) => keys.clock.sleep_until(first).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = due => {
                let now = keys.clock.now();
                keys.watch_held(now);
                for owner in keys.take_due(now) {
                    let locks = locks.clone();
                    work.spawn(async move { locks.end(owner).await });
                }
            }
            ended = ended_leases.recv() => match ended {
                Some(lease) => keys.lose_lease(lease),
                None => return,
            },
            () = keys.earlier.notified() => {}
            _ = work.join_next(), if !work.is_empty() => {}
        }
    }
}

impl EtcdLocks {
    /// Deletes what an owner has left whose time is over.
    async fn end(&self, owner: Owner) {
        let turn = self.keys.begin(owner, DELETE_AGAIN).await;
        if !self.keys.is_over(&owner) {
            return;
        }
        let locks = self.keys.locks_of(&owner);
        if locks.is_empty() {
            return;
        }
        let ended = match self.link.member().await {
            Ok(member) => self.free(&member, &turn, &locks).await,
            Err(error) => Err(error),
        };
        if ended.is_err() {
            self.keys.end_at(&owner, self.now() + DELETE_AGAIN, false);
        }
    }
}
