//! `memory://`: locks between the tasks of one process, for first steps and for unit tests.
//!
//! Pools on one `memory://name` wait in the queues of the store, in FIFO order. A plain `memory://` has one pool, and the queue of
//! that pool is enough.

mod lease_table;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use once_cell::sync::Lazy;
use tokio::runtime;

use self::lease_table::{ConnectionId, LeaseTable, TableEvent};
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, Inspection, KeyList,
    KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::clock::{self, Clock};
use crate::base::error::{ErrorKind, LockError};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::mutex::Mutex as StdMutex;
use crate::base::process::OfProcess;
use crate::base::sync::{Mutex, MutexGuard};

/// The connection of one pool to a store. All pools of the process with the URL `memory://name` share the store with
/// that name; each pool with plain `memory://` has a private store. Dropping the connection removes its notifier and its
/// waiting owners from the store.
#[derive(Debug)]
pub(crate) struct Memory {
    shared: Arc<SharedTable>,
    id: ConnectionId,
}

#[derive(Debug)]
struct SharedTable {
    clock: Clock,
    /// The runtime with the paused clock that it was opened on. `None` for a store of one pool.
    paused: Option<runtime::Id>,
    leases: Mutex<LeaseTable>,
    /// The notifier of each connection. The list is shared, so that notifiers run outside the mutex.
    notifiers: Mutex<Arc<[(ConnectionId, Notifier)]>>,
    /// Whether only one pool can use it.
    private: bool,
}

impl Memory {
    /// An error if pools with another time use the store: a lease would expire there at another moment.
    pub(crate) fn open(name: &str, clock: Clock) -> Result<Self, LockError> {
        // Not a mutex of `base::sync`: under the test scheduler it would be one of another schedule.
        static NAMED: OfProcess<StdMutex<HashMap<String, Weak<SharedTable>>>> = OfProcess::new();
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let id = ConnectionId(LAST_ID.fetch_add(1, Ordering::Relaxed) + 1);
        if name.is_empty() {
            return Ok(Self { shared: Arc::new(SharedTable::new(clock, None, true)), id });
        }
        let mut named = NAMED.get_or_init(Default::default).lock();
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

    fn attempt(
        &self,
        table: &mut LeaseTable,
        request: &AcquireRequest,
        events: &mut Vec<TableEvent>,
    ) -> AcquireOutcome {
        let (now, has_queue) = (self.shared.clock.now(), !self.shared.private);
        if let Some(refused) = table.refuse_or_enqueue(request, self.id, has_queue, now, events) {
            return refused;
        }
        let (fence, reserved_fences) = if request.fencing {
            let (fence, reserved) = next_fences(request.extra_fences);
            (Some(fence), reserved)
        } else {
            (None, 0)
        };
        let contended = table.grant(request, self.id, fence, now);
        let granted = AcquireOutcome::acquired(fence).with_reserved_fences(reserved_fences);
        granted.with_contended(contended)
    }

    /// Notifies the pools. A grant that its pool does not know goes to the next owner.
    fn notify(&self, mut events: Vec<TableEvent>) {
        if events.is_empty() {
            return;
        }
        let notifiers = self.shared.notifiers();
        let notifier_of = |connection| {
            let listed = notifiers.iter().find(|(id, _)| *id == connection);
            listed.map(|(_, notifier)| notifier)
        };
        while !events.is_empty() {
            for event in std::mem::take(&mut events) {
                match event {
                    TableEvent::Changed(key) => {
                        notifiers
                            .iter()
                            .for_each(|(_, notifier)| notifier.key_changed(key.as_str()));
                    }
                    TableEvent::Contended { key, connection } => {
                        if let Some(notifier) = notifier_of(connection) {
                            notifier.contended(key.as_str());
                        }
                    }
                    TableEvent::Granted { key, owner, connection } => {
                        let is_known = notifier_of(connection).is_some_and(|notifier| {
                            notifier.head_of_queue(key.as_str(), &owner, Duration::ZERO)
                        });
                        if !is_known {
                            let now = self.shared.clock.now();
                            self.leases().pass_on(&key, owner, now, &mut events);
                        }
                    }
                }
            }
        }
    }

    fn leases(&self) -> MutexGuard<'_, LeaseTable> {
        self.shared.leases.lock()
    }
}

/// The next fencing token, and how many of the numbers that follow it are reserved, `extra` at most.
fn next_fences(extra: u32) -> (Fence, u32) {
    // One counter for the process: fencing tokens keep growing when a named store is dropped and opened again. It starts at
    // the time of the clock, because the resource that checks the tokens may outlive the process.
    static LAST_FENCE: Lazy<AtomicU64> = Lazy::new(|| AtomicU64::new(clock::wall_micros()));
    // Not ahead of the clock: after a restart the tokens would go back.
    let reserves = extra > 0 && LAST_FENCE.load(Ordering::Relaxed) < clock::wall_micros();
    let reserved = if reserves { extra } else { 0 };
    let last = LAST_FENCE.fetch_add(1 + u64::from(reserved), Ordering::Relaxed);
    (Fence::new(last + 1), reserved)
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

    fn notifiers(&self) -> Arc<[(ConnectionId, Notifier)]> {
        self.notifiers.lock().clone()
    }

    /// Replaces the list of notifiers.
    fn update_notifiers(&self, change: impl FnOnce(&mut Vec<(ConnectionId, Notifier)>)) {
        let mut notifiers = self.notifiers.lock();
        let mut listed = notifiers.to_vec();
        change(&mut listed);
        *notifiers = listed.into();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.leases().disconnect(self.id);
        self.shared.update_notifiers(|listed| listed.retain(|(id, _)| *id != self.id));
    }
}

impl Backend for Memory {
    fn capabilities(&self) -> Capabilities {
        Capabilities { local: true, wait_queue: !self.shared.private, ..Capabilities::default() }
    }

    fn subscribe(&self, notifier: Notifier) {
        self.shared.update_notifiers(|listed| listed.push((self.id, notifier)));
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let mut events = Vec::new();
        let mut table = self.leases();
        let mut attempt = |request| Ok(self.attempt(&mut table, request, &mut events));
        let outcomes = requests.iter().map(&mut attempt).collect();
        drop(table);
        self.notify(events);
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let now = self.shared.clock.now();
        let mut table = self.leases();
        leases.iter().map(|lease| Ok(table.renew(lease, now))).collect()
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let now = self.shared.clock.now();
        let mut events = Vec::new();
        let mut table = self.leases();
        let mut release = |request| Ok(table.release(request, now, &mut events));
        let outcomes = requests.iter().map(&mut release).collect();
        drop(table);
        self.notify(events);
        outcomes
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(LeaseStatus::of(self.leases().is_held(lease, self.shared.clock.now())))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let (now, has_queue) = (self.shared.clock.now(), !self.shared.private);
        Ok(Some(self.leases().inspect(key, has_queue, now)))
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        let now = self.shared.clock.now();
        // Requests wait for the table. They do not wait for the pattern.
        let mut keys: Vec<Key> = self.leases().held(now).cloned().collect();
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
