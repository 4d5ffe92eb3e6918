//! `memory://`: locks among the tasks of one process. For a first run, and for unit tests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use super::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, LeaseRef, LeaseStatus,
    Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use crate::base::clock::{Clock, Instant};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::process::OfProcess;
use crate::base::sync::{Mutex, MutexGuard};

/// The store of `memory://name`, shared by all pools of the process with that name; plain `memory://`
/// is a store of its own.
///
/// Each value is the connection of one pool. Dropped, it takes its notifier out of the store.
#[derive(Debug)]
pub(crate) struct Memory {
    shelf: Arc<Shelf>,
    /// Tells the connection from the others.
    id: u64,
}

#[derive(Debug)]
struct Shelf {
    clock: Clock,
    slots: Mutex<Slots>,
    /// Of each pool that is there, by connection. Shared, so that none is called under the mutex.
    notifiers: Mutex<Arc<[(u64, Notifier)]>>,
    /// Whether one pool alone can get at it.
    private: bool,
}

#[derive(Debug, Default)]
struct Slots {
    taken: HashMap<Key, Slot>,
    /// Expired slots are swept when the map has grown to this.
    sweep_at: usize,
}

#[derive(Debug)]
struct Slot {
    owner: Owner,
    until: Instant,
}

impl Memory {
    pub(crate) fn open(name: &str, clock: Clock) -> Self {
        static NAMED: OfProcess<Mutex<HashMap<String, Weak<Shelf>>>> = OfProcess::new();
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed) + 1;
        if name.is_empty() {
            return Self { shelf: Arc::new(Shelf::new(clock, true)), id };
        }
        let mut named =
            NAMED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        named.retain(|_, shelf| shelf.strong_count() > 0);
        let shelf = named.get(name).and_then(Weak::upgrade);
        let shelf = shelf.unwrap_or_else(|| Arc::new(Shelf::new(clock, false)));
        named.insert(name.to_owned(), Arc::downgrade(&shelf));
        Self { shelf, id }
    }

    fn attempt(&self, claim: &AcquireRequest) -> AcquireOutcome {
        let now = self.shelf.clock.now();
        let mut slots = self.slots();
        let busy = claim
            .keys
            .iter()
            .filter_map(|key| slots.holder(key, now))
            .filter(|slot| slot.owner != claim.owner)
            .map(|slot| slot.until.since(now))
            .max();
        if busy.is_some() {
            // A release rings; an end of the ttl does not.
            let retry_after = busy.unwrap_or_default() + Duration::from_millis(1);
            return AcquireOutcome::Contended {
                expires_in: busy,
                wait_mode: WaitMode::Watch { retry_after },
            };
        }
        slots.sweep(now);
        for key in claim.keys.iter() {
            // Never shorter: this may be a late request of one that wanted it for less time.
            let until = slots.holder(key, now).map_or(now, |slot| slot.until);
            let until = until.max(now + claim.kept_for());
            slots.taken.insert(key.clone(), Slot { owner: claim.owner, until });
        }
        // One for the process, so that a store that is opened again under its name goes on growing.
        static LAST_FENCE: AtomicU64 = AtomicU64::new(0);
        let extra_fences = if claim.fencing { claim.extra_fences } else { 0 };
        let fence = claim.fencing.then(|| {
            let last = LAST_FENCE.fetch_add(1 + u64::from(extra_fences), Ordering::Relaxed);
            Fence::new(last + 1)
        });
        AcquireOutcome::Acquired {
            fence,
            reserved_fences: extra_fences,
            contended: self.shelf.private.then_some(false),
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.shelf.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn new(clock: Clock, private: bool) -> Self {
        Self { clock, slots: Mutex::default(), notifiers: Mutex::new(Arc::default()), private }
    }

    fn notifiers(&self) -> Arc<[(u64, Notifier)]> {
        self.notifiers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a new list of notifiers of the present one.
    fn list(&self, change: impl FnOnce(&mut Vec<(u64, Notifier)>)) {
        let mut notifiers = self.notifiers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut listed = notifiers.to_vec();
        change(&mut listed);
        *notifiers = listed.into();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shelf.list(|listed| listed.retain(|(id, _)| *id != self.id));
    }
}

impl Slots {
    fn holder(&self, key: &Key, now: Instant) -> Option<&Slot> {
        self.taken.get(key).filter(|slot| slot.until > now)
    }

    fn is_held(&self, lease: &LeaseRef, now: Instant) -> bool {
        lease
            .keys
            .iter()
            .all(|key| self.holder(key, now).is_some_and(|slot| slot.owner == lease.owner))
    }

    fn sweep(&mut self, now: Instant) {
        if self.taken.len() < self.sweep_at {
            return;
        }
        self.taken.retain(|_, slot| slot.until > now);
        self.sweep_at = (2 * self.taken.len()).max(1024);
    }
}

fn yes_if(held: bool) -> LeaseStatus {
    if held { LeaseStatus::Held } else { LeaseStatus::NotHeld }
}

impl Backend for Memory {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.local = true;
        capabilities
    }

    fn subscribe(&self, notifier: Notifier) {
        self.shelf.list(|listed| listed.push((self.id, notifier)));
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        claims.iter().map(|claim| Ok(self.attempt(claim))).collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let now = self.shelf.clock.now();
        let mut slots = self.slots();
        let mut renew = |lease: &LeaseRef| {
            let held = slots.is_held(lease, now);
            if held {
                for key in lease.keys.iter() {
                    let slot = Slot { owner: lease.owner, until: now + lease.kept_for() };
                    slots.taken.insert(key.clone(), slot);
                }
            }
            Ok(yes_if(held))
        };
        leases.iter().map(&mut renew).collect()
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let now = self.shelf.clock.now();
        let mut slots = self.slots();
        let mut release = |ReleaseRequest { lease, free_after, .. }: &ReleaseRequest| {
            let held = slots.is_held(lease, now);
            for key in lease.keys.iter() {
                match slots.taken.get_mut(key) {
                    Some(slot) if slot.owner != lease.owner => {}
                    Some(slot) if !free_after.is_zero() => slot.until = now + *free_after,
                    _ => drop(slots.taken.remove(key)),
                }
            }
            Ok(if held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
        };
        let outcomes = releases.iter().map(&mut release).collect();
        drop(slots);
        let notifiers = self.shelf.notifiers();
        for key in releases.iter().flat_map(|release| release.lease.keys.iter()) {
            notifiers.iter().for_each(|(_, notifier)| notifier.key_changed(key.as_str()));
        }
        outcomes
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(yes_if(self.slots().is_held(lease, self.shelf.clock.now())))
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::pool::LockPool;

    /// A pool that is gone is told nothing, and costs the others nothing.
    #[tokio::test(start_paused = true)]
    async fn a_dropped_pool_leaves_no_notifier_in_a_shared_store() {
        let url = "memory://dropped-pools";
        let connect = || LockPool::builder(url).on_current_runtime().connect();
        let stays = connect().await.unwrap();
        let store = Memory::open("dropped-pools", Clock::runtime());
        for _ in 0..50 {
            let pool = connect().await.unwrap();
            pool.lock("order:42").acquire().await.unwrap().release().await.unwrap();
            assert!(store.shelf.notifiers().len() >= 2, "both are told");
        }
        // The tasks of a dropped pool end when the runtime comes to them.
        for _ in 0..1_000 {
            if store.shelf.notifiers().len() == 1 {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(store.shelf.notifiers().len(), 1, "the pool that is there, and no other");
        stays.lock("order:42").acquire().await.unwrap().release().await.unwrap();
    }
}
