//! `memory://`: locks between the tasks of one process, for first steps and for unit tests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use once_cell::sync::Lazy;
use tokio::runtime;

use super::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, Inspection, KeyList,
    KeyPattern, LeaseRef, LeaseStatus, LockHolder, Notifier, Owner, ReleaseOutcome, ReleaseRequest,
    WaitMode, Warning,
};
use crate::base::clock::{self, Clock, Instant};
use crate::base::error::{ErrorKind, LockError};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::owner_info::OwnerLabel;
use crate::base::process::OfProcess;
use crate::base::sync::{Mutex, MutexGuard};

/// The connection of one pool to a store. All pools of the process with the URL `memory://name` share the store with
/// that name; each pool with plain `memory://` has a private store. Dropping the connection removes its notifier from
/// the store.
#[derive(Debug)]
pub(crate) struct Memory {
    shared: Arc<SharedTable>,
    /// Identifies the connection.
    id: u64,
}

#[derive(Debug)]
struct SharedTable {
    clock: Clock,
    /// The runtime with the paused clock that it was opened on. `None` for a store of one pool.
    paused: Option<runtime::Id>,
    leases: Mutex<LeaseTable>,
    /// The notifier of each connection. The list is shared, so that notifiers run outside the mutex.
    notifiers: Mutex<Arc<[(u64, Notifier)]>>,
    /// Whether only one pool can use it.
    private: bool,
}

#[derive(Debug, Default)]
struct LeaseTable {
    by_key: HashMap<Key, StoredLease>,
    /// At this size, expired leases are removed.
    sweep_at: usize,
}

#[derive(Debug)]
struct StoredLease {
    owner: Owner,
    until: Instant,
    /// The first fence of the grant.
    fence: Option<Fence>,
    label: OwnerLabel,
}

impl Memory {
    /// An error if pools with another time use the store: a lease would expire there at another moment.
    pub(crate) fn open(name: &str, clock: Clock) -> Result<Self, LockError> {
        static NAMED: OfProcess<Mutex<HashMap<String, Weak<SharedTable>>>> = OfProcess::new();
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed) + 1;
        if name.is_empty() {
            return Ok(Self { shared: Arc::new(SharedTable::new(clock, None, true)), id });
        }
        let mut named =
            NAMED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        named.retain(|_, shared| shared.strong_count() > 0);
        let shared = named.get(name).and_then(Weak::upgrade);
        let paused = clock.paused_runtime();
        let shared = shared.unwrap_or_else(|| Arc::new(SharedTable::new(clock, paused, false)));
        if shared.paused != paused {
            return Err(other_time(name));
        }
        named.insert(name.to_owned(), Arc::downgrade(&shared));
        Ok(Self { shared, id })
    }

    fn attempt(&self, claim: &AcquireRequest) -> AcquireOutcome {
        let now = self.shared.clock.now();
        let mut table = self.leases();
        let busy = claim
            .keys
            .iter()
            .filter_map(|key| table.holder(key, now))
            .filter(|stored| stored.owner != claim.owner)
            .map(|stored| stored.until.since(now))
            .max();
        if busy.is_some() {
            // A release notifies; the end of a ttl does not.
            let retry_after = busy.unwrap_or_default() + Duration::from_millis(1);
            return AcquireOutcome::Contended {
                expires_in: busy,
                wait_mode: WaitMode::Watch { retry_after },
            };
        }
        table.sweep(now);
        // One counter for the process: fencing tokens keep growing when a named store is dropped and opened again. It starts at
        // the time of the clock, because the resource that checks the tokens may outlive the process.
        static LAST_FENCE: Lazy<AtomicU64> = Lazy::new(|| AtomicU64::new(clock::wall_micros()));
        // Not ahead of the clock: after a restart the tokens would go back.
        let reserves = claim.fencing
            && claim.extra_fences > 0
            && LAST_FENCE.load(Ordering::Relaxed) < clock::wall_micros();
        let extra_fences = if reserves { claim.extra_fences } else { 0 };
        let fence = claim.fencing.then(|| {
            let last = LAST_FENCE.fetch_add(1 + u64::from(extra_fences), Ordering::Relaxed);
            Fence::new(last + 1)
        });
        for key in claim.keys.iter() {
            // Never shortens the lease: this may be a late request with a shorter ttl.
            let until = table.holder(key, now).map_or(now, |stored| stored.until);
            let until = until.max(now + claim.kept_for());
            let (owner, label) = (claim.owner, claim.label);
            table.by_key.insert(key.clone(), StoredLease { owner, until, fence, label });
        }
        AcquireOutcome::Acquired {
            fence,
            reserved_fences: extra_fences,
            contended: self.shared.private.then_some(false),
        }
    }

    fn leases(&self) -> MutexGuard<'_, LeaseTable> {
        self.shared.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cold]
fn other_time(name: &str) -> LockError {
    let message = format!(
        "pools with a different clock use `memory://{name}`: one of them is on a runtime with a paused clock"
    );
    LockError::new(ErrorKind::Config, message).remedy(
        "give the pool of each test a name of its own, or build all pools with `.on_current_runtime()` on one runtime",
    )
}

impl SharedTable {
    fn new(clock: Clock, paused: Option<runtime::Id>, private: bool) -> Self {
        let (leases, notifiers) = (Mutex::default(), Mutex::new(Arc::default()));
        Self { clock, paused, leases, notifiers, private }
    }

    fn notifiers(&self) -> Arc<[(u64, Notifier)]> {
        self.notifiers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the list of notifiers.
    fn update_notifiers(&self, change: impl FnOnce(&mut Vec<(u64, Notifier)>)) {
        let mut notifiers = self.notifiers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut listed = notifiers.to_vec();
        change(&mut listed);
        *notifiers = listed.into();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shared.update_notifiers(|listed| listed.retain(|(id, _)| *id != self.id));
    }
}

impl LeaseTable {
    fn holder(&self, key: &Key, now: Instant) -> Option<&StoredLease> {
        self.by_key.get(key).filter(|stored| stored.until > now)
    }

    fn is_held(&self, lease: &LeaseRef, now: Instant) -> bool {
        lease
            .keys
            .iter()
            .all(|key| self.holder(key, now).is_some_and(|stored| stored.owner == lease.owner))
    }

    fn sweep(&mut self, now: Instant) {
        if self.by_key.len() < self.sweep_at {
            return;
        }
        self.by_key.retain(|_, stored| stored.until > now);
        self.sweep_at = (2 * self.by_key.len()).max(1024);
    }
}

impl Backend for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities { local: true, ..Capabilities::default() }
    }

    fn subscribe(&self, notifier: Notifier) {
        self.shared.update_notifiers(|listed| listed.push((self.id, notifier)));
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        claims.iter().map(|claim| Ok(self.attempt(claim))).collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let now = self.shared.clock.now();
        let mut table = self.leases();
        let mut renew = |lease: &LeaseRef| {
            let held = table.is_held(lease, now);
            if held {
                for key in lease.keys.iter() {
                    if let Some(stored) = table.by_key.get_mut(key) {
                        stored.until = now + lease.kept_for();
                    }
                }
            }
            Ok(LeaseStatus::of(held))
        };
        leases.iter().map(&mut renew).collect()
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let now = self.shared.clock.now();
        let mut table = self.leases();
        let mut release = |ReleaseRequest { lease, free_after, .. }: &ReleaseRequest| {
            let held = table.is_held(lease, now);
            for key in lease.keys.iter() {
                match table.by_key.get_mut(key) {
                    Some(stored) if stored.owner != lease.owner => {}
                    Some(stored) if !free_after.is_zero() => stored.until = now + *free_after,
                    _ => drop(table.by_key.remove(key)),
                }
            }
            Ok(if held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
        };
        let outcomes = releases.iter().map(&mut release).collect();
        drop(table);
        let notifiers = self.shared.notifiers();
        for key in releases.iter().flat_map(|release| release.lease.keys.iter()) {
            notifiers.iter().for_each(|(_, notifier)| notifier.key_changed(key.as_str()));
        }
        outcomes
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(LeaseStatus::of(self.leases().is_held(lease, self.shared.clock.now())))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let now = self.shared.clock.now();
        let holder = self.leases().holder(key, now).map(|stored| {
            let expires_in = Some(stored.until.since(now));
            LockHolder::new(Some(stored.owner.tag()))
                .with_token(Some(stored.owner))
                .with_expiry(expires_in)
                .with_fence(stored.fence)
                .with_info(stored.label.info())
        });
        Ok(Some(Inspection::new(holder)))
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        let now = self.shared.clock.now();
        // Requests wait for the table. They do not wait for the pattern.
        let mut keys: Vec<Key> = {
            let table = self.leases();
            let held = table.by_key.iter().filter(|(_, stored)| stored.until > now);
            held.map(|(key, _)| key.clone()).collect()
        };
        keys.retain(|key| pattern.key_of(key.as_str()).is_some());
        Ok(Some(KeyList::new(keys, true, limit)))
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::pool::LockPool;

    /// A database may check the fences, and outlives the process.
    #[tokio::test]
    async fn fences_begin_at_the_clock() {
        const DAY_MICROS: u64 = 24 * 60 * 60 * 1_000_000;
        let pool = LockPool::connect("memory://").await.unwrap();
        let fence = pool.lock("order:42").acquire().await.unwrap().fence().unwrap();
        assert!(fence.get() > clock::wall_micros() - DAY_MICROS, "{fence}");
    }

    /// Otherwise the fences would go back when the process restarts.
    #[tokio::test]
    async fn fences_do_not_get_ahead_of_the_clock() {
        let pool = LockPool::builder("memory://").on_current_runtime().connect().await.unwrap();
        let mut last = 0;
        let began = clock::wall_micros();
        for key in 0..5_000 {
            let linger = Duration::from_secs(9);
            let guard = pool.lock(format!("k:{key}")).linger(linger).acquire().await.unwrap();
            last = guard.fence().unwrap().get();
        }
        let passed = clock::wall_micros() - began;
        // Without the rule the last fence would be 640,000 ahead of a loop that takes no time.
        assert!(last < clock::wall_micros() + 10_000, "{last}: {passed} us have passed");
    }

    /// Otherwise the time of a test would decide when the lease of a service ends.
    #[tokio::test(start_paused = true)]
    async fn a_named_store_follows_one_clock() {
        const URL: &str = "memory://one-clock";
        let connect = || LockPool::builder(URL).on_current_runtime().connect();
        let paused = connect().await.unwrap();
        let again = connect().await.unwrap();
        let elsewhere = || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(LockPool::connect(URL)).map(drop)
        };
        let refused = std::thread::spawn(elsewhere).join().unwrap().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Config);
        assert!(refused.to_string().contains("a paused clock"), "{refused}");
        drop((paused, again));
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_pool_leaves_no_notifier_in_a_shared_store() {
        let url = "memory://dropped-pools";
        let connect = || LockPool::builder(url).on_current_runtime().connect();
        let stays = connect().await.unwrap();
        let store = Memory::open("dropped-pools", Clock::runtime()).unwrap();
        for _ in 0..50 {
            let pool = connect().await.unwrap();
            pool.lock("order:42").acquire().await.unwrap().release().await.unwrap();
            assert!(store.shared.notifiers().len() >= 2, "a notifier for each connection");
        }
        // The tasks of a dropped pool end when the runtime polls them.
        for _ in 0..1_000 {
            if store.shared.notifiers().len() == 1 {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert_eq!(store.shared.notifiers().len(), 1, "only the notifier of the remaining pool");
        stays.lock("order:42").acquire().await.unwrap().release().await.unwrap();
    }
}
