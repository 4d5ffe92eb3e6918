//! The leases and requests of a pool, and its phase.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use crate::base::process::Process;
use crate::base::sync::{Mutex, MutexGuard};
use crate::lease::lease::Lease;

/// Whether a pool accepts new acquires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolPhase {
    Open,
    /// No new acquires. Holders may finish.
    Draining,
    Closed,
}

/// Tracks live leases and work in flight, for a shutdown that waits for them.
#[derive(Debug)]
pub(crate) struct LeaseTracker {
    tracked: Mutex<Tracked>,
    last_id: AtomicU64,
    phase: watch::Sender<PoolPhase>,
    /// Whether `phase` is `Open`, for the check of every acquire and every end of a hold.
    is_open: AtomicBool,
    /// Counts up with every entry that is removed.
    removed: watch::Sender<u64>,
    /// The process of the pool.
    process: Process,
}

/// Numbers of leases at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) released: usize,
    pub(crate) abandoned: usize,
    pub(crate) held: usize,
}

#[derive(Debug, Default)]
struct Tracked {
    leases: HashMap<u64, Arc<Lease>>,
    /// Acquires and clean-ups that may have a request in flight.
    in_flight: usize,
    /// Ended leases whose release the store confirmed.
    released: usize,
    /// Ended leases without that confirmation.
    abandoned: usize,
}

impl LeaseTracker {
    pub(crate) fn new() -> Self {
        Self {
            tracked: Mutex::default(),
            last_id: AtomicU64::new(0),
            phase: watch::Sender::new(PoolPhase::Open),
            is_open: AtomicBool::new(true),
            removed: watch::Sender::new(0),
            process: Process::current(),
        }
    }

    /// Whether the pool belongs to a process that this one was forked from. Its mutexes must not be locked then: a
    /// thread that does not exist here may have held them at the fork.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.phase.borrow() == PoolPhase::Closed
    }

    /// Counts an acquire, or returns `None` if the pool accepts no more.
    pub(crate) fn try_begin(self: &Arc<Self>) -> Option<InFlightToken> {
        let mut tracked = self.tracked();
        if !self.is_open() {
            return None;
        }
        tracked.in_flight += 1;
        Some(InFlightToken(self.clone()))
    }

    /// Counts work that cleans up after an acquire, in any phase.
    pub(crate) fn begin_cleanup(self: &Arc<Self>) -> InFlightToken {
        self.tracked().in_flight += 1;
        InFlightToken(self.clone())
    }

    /// The number of a new lease.
    pub(crate) fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn insert(&self, lease: &Arc<Lease>) {
        self.tracked().leases.insert(lease.id, lease.clone());
    }

    /// Removes a lease whose grant another lease has taken over.
    pub(crate) fn remove_transferred(&self, lease: &Lease) {
        self.tracked().leases.remove(&lease.id);
    }

    /// Removes a lease that ended; `confirmed` if the store said so.
    pub(crate) fn remove_ended(&self, lease: &Lease, confirmed: bool) {
        let mut tracked = self.tracked();
        if tracked.leases.remove(&lease.id).is_none() {
            return;
        }
        if confirmed {
            tracked.released += 1;
        } else {
            tracked.abandoned += 1;
        }
        drop(tracked);
        self.on_removed();
    }

    pub(crate) fn lease(&self, id: u64) -> Option<Arc<Lease>> {
        self.tracked().leases.get(&id).cloned()
    }

    pub(crate) fn leases(&self) -> Vec<Arc<Lease>> {
        self.tracked().leases.values().cloned().collect()
    }

    pub(crate) fn counts(&self) -> Counts {
        let tracked = self.tracked();
        let Tracked { released, abandoned, .. } = *tracked;
        Counts { released, abandoned, held: tracked.leases.len() }
    }

    /// Enters `phase`. `false` if the pool had reached it before.
    pub(crate) fn advance(&self, phase: PoolPhase) -> bool {
        // Under the lock of `try_begin`, so that no acquire begins after it.
        let _tracked = self.tracked();
        if phase != PoolPhase::Open {
            self.is_open.store(false, Ordering::Release);
        }
        self.phase.send_if_modified(|now| {
            let is_later = *now != phase && *now != PoolPhase::Closed;
            if is_later {
                *now = phase;
            }
            is_later
        })
    }

    /// Resolves when the pool accepts no more acquires.
    pub(crate) async fn closing(&self) {
        let _ = self.phase.subscribe().wait_for(|phase| *phase != PoolPhase::Open).await;
    }

    /// Resolves when the pool has shut down.
    pub(crate) async fn closed(&self) {
        let _ = self.phase.subscribe().wait_for(|phase| *phase == PoolPhase::Closed).await;
    }

    /// Resolves when there is no lease, and no work in flight.
    pub(crate) async fn idle(&self) {
        self.until(|tracked| tracked.leases.is_empty() && tracked.in_flight == 0).await;
    }

    /// Resolves when there are fewer leases than `held`.
    pub(crate) async fn fewer_than(&self, held: usize) {
        self.until(|tracked| tracked.leases.len() < held).await;
    }

    async fn until(&self, is_reached: impl Fn(&Tracked) -> bool) {
        let mut removed = self.removed.subscribe();
        loop {
            removed.mark_unchanged();
            if is_reached(&self.tracked()) {
                return;
            }
            // The sender lives in `self`.
            let _ = removed.changed().await;
        }
    }

    fn on_removed(&self) {
        // A receiver that subscribes later reads `tracked` first, which has changed already.
        if self.removed.receiver_count() > 0 {
            self.removed.send_modify(|removed| *removed += 1);
        }
    }

    fn tracked(&self) -> MutexGuard<'_, Tracked> {
        self.tracked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Work in flight that a shutdown waits for. Dropping it ends the work.
#[derive(Debug)]
pub(crate) struct InFlightToken(Arc<LeaseTracker>);

impl Drop for InFlightToken {
    fn drop(&mut self) {
        if !self.0.is_inherited() {
            self.0.tracked().in_flight -= 1;
            self.0.on_removed();
        }
    }
}
