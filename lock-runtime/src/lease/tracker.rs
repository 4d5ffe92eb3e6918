//! The leases and requests of a pool, and its phase.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use foldhash::HashMap;
use tokio::sync::watch;

use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::lease::lease::Lease;

/// How far a pool is on its way to its end. Phases are entered in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PoolPhase {
    Open,
    /// No new acquires. Holders may finish.
    Draining,
    /// All leases are released or given up. Those of bodies that block their threads may still be there.
    Closed,
    /// The store is closed too, and the events are delivered.
    Ended,
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
    /// Acquires and clean-ups that may have a request in flight.
    pub(crate) in_flight: usize,
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
        *self.phase.borrow() >= PoolPhase::Closed
    }

    /// Counts an acquire, or returns `None` if the pool accepts no more.
    pub(crate) fn try_begin(self: &Arc<Self>) -> Option<InFlightToken> {
        let mut tracked = self.tracked.lock();
        if !self.is_open() {
            return None;
        }
        tracked.in_flight += 1;
        Some(InFlightToken(self.clone()))
    }

    /// Counts work that cleans up after an acquire, in any phase.
    pub(crate) fn begin_cleanup(self: &Arc<Self>) -> InFlightToken {
        self.tracked.lock().in_flight += 1;
        InFlightToken(self.clone())
    }

    /// The number of a new lease.
    pub(crate) fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn insert(&self, lease: &Arc<Lease>) {
        self.tracked.lock().leases.insert(lease.id, lease.clone());
    }

    /// Inserts `lease`, which has taken over the grant of `former`, in its place. A shutdown finds one of the two.
    pub(crate) fn replace(&self, former: &Lease, lease: &Arc<Lease>) {
        let mut tracked = self.tracked.lock();
        let removed = tracked.leases.remove(&former.id);
        tracked.leases.insert(lease.id, lease.clone());
        drop(tracked);
        drop(removed);
    }

    /// Removes a lease that ended; `confirmed` if the store said so.
    pub(crate) fn remove_ended(&self, lease: &Lease, confirmed: bool) {
        let mut tracked = self.tracked.lock();
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
        self.tracked.lock().leases.get(&id).cloned()
    }

    pub(crate) fn leases(&self) -> Vec<Arc<Lease>> {
        self.tracked.lock().leases.values().cloned().collect()
    }

    pub(crate) fn counts(&self) -> Counts {
        let tracked = self.tracked.lock();
        let Tracked { released, abandoned, in_flight, .. } = *tracked;
        Counts { released, abandoned, held: tracked.leases.len(), in_flight }
    }

    /// Enters `phase`, one after `Open`. `false` if the pool had reached it before.
    pub(crate) fn advance(&self, phase: PoolPhase) -> bool {
        // Under the lock of `try_begin`, so that no acquire begins after it.
        let _tracked = self.tracked.lock();
        self.is_open.store(false, Ordering::Release);
        self.phase.send_if_modified(|now| {
            let is_later = phase > *now;
            if is_later {
                *now = phase;
            }
            is_later
        })
    }

    /// Resolves when the pool accepts no more acquires.
    pub(crate) async fn closing(&self) {
        self.reached(PoolPhase::Draining).await;
    }

    /// Resolves when the pool accepts no more leases, and all are released or given up. Leases of bodies that block their
    /// threads may still be there.
    pub(crate) async fn closed(&self) {
        self.reached(PoolPhase::Closed).await;
    }

    /// Resolves when the shutdown of the pool is over.
    pub(crate) async fn ended(&self) {
        self.reached(PoolPhase::Ended).await;
    }

    async fn reached(&self, phase: PoolPhase) {
        let _ = self.phase.subscribe().wait_for(|now| *now >= phase).await;
    }

    /// Resolves when there is no lease, and no work in flight.
    pub(crate) async fn idle(&self) {
        self.fewer_than(1).await;
    }

    /// Resolves when there are fewer leases and work in flight than `count`.
    pub(crate) async fn fewer_than(&self, count: usize) {
        let mut removed = self.removed.subscribe();
        loop {
            removed.mark_unchanged();
            let Counts { held, in_flight, .. } = self.counts();
            if held + in_flight < count {
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
}

/// Work in flight that a shutdown waits for. Dropping it ends the work.
#[derive(Debug)]
pub(crate) struct InFlightToken(Arc<LeaseTracker>);

impl Drop for InFlightToken {
    fn drop(&mut self) {
        if !self.0.is_inherited() {
            self.0.tracked.lock().in_flight -= 1;
            self.0.on_removed();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;
    use crate::lease::lease::tests::lease_with;

    fn tracker() -> Arc<LeaseTracker> {
        Arc::new(LeaseTracker::new())
    }

    fn is_over(wait: impl Future) -> bool {
        pin!(wait).as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    /// Whether `wait` is not over before `end`, and is over after it.
    fn ends_by(wait: impl Future, end: impl FnOnce()) -> bool {
        let mut wait = pin!(wait);
        let is_early = is_over(wait.as_mut());
        end();
        !is_early && is_over(wait)
    }

    #[test]
    fn an_open_pool_numbers_its_leases_and_finds_them() {
        let tracker = tracker();
        assert!(tracker.is_open() && !tracker.is_closed() && !tracker.is_inherited());
        assert_eq!([tracker.next_id(), tracker.next_id(), tracker.next_id()], [1, 2, 3]);
        let leases = [lease_with(1), lease_with(2)];
        leases.iter().for_each(|lease| tracker.insert(lease));
        assert!(Arc::ptr_eq(&tracker.lease(2).unwrap(), &leases[1]));
        assert!(tracker.lease(3).is_none());
        let mut ids: Vec<_> = tracker.leases().iter().map(|lease| lease.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [1, 2]);
    }

    #[test]
    fn ended_leases_are_counted_once_and_transferred_ones_are_not() {
        let tracker = tracker();
        let counts = || {
            let Counts { released, abandoned, held, .. } = tracker.counts();
            (released, abandoned, held)
        };
        let leases: Vec<_> = (1..=6).map(lease_with).collect();
        leases.iter().for_each(|lease| tracker.insert(lease));
        assert_eq!(counts(), (0, 0, 6));
        let next = lease_with(7);
        tracker.replace(&leases[0], &next);
        assert!(tracker.lease(1).is_none() && tracker.lease(7).is_some());
        assert_eq!(counts(), (0, 0, 6));
        for lease in &leases[..3] {
            tracker.remove_ended(lease, true);
        }
        tracker.remove_ended(&leases[2], false);
        assert_eq!(counts(), (2, 0, 4));
        leases.iter().for_each(|lease| tracker.remove_ended(lease, false));
        assert_eq!(counts(), (2, 3, 1));
    }

    #[test]
    fn phases_are_entered_once_and_never_left_backwards() {
        let tracker = tracker();
        assert!(tracker.is_open());
        assert!(ends_by(tracker.closing(), || {
            assert!(tracker.advance(PoolPhase::Draining));
        }));
        assert!(!tracker.is_open() && !tracker.is_closed());
        assert!(!tracker.advance(PoolPhase::Draining));
        assert!(ends_by(tracker.closed(), || {
            assert!(tracker.advance(PoolPhase::Closed));
        }));
        assert!(tracker.is_closed());
        assert!(!tracker.advance(PoolPhase::Draining));
        assert!(!tracker.advance(PoolPhase::Closed));
        assert!(tracker.is_closed() && is_over(tracker.closing()) && is_over(tracker.closed()));
        assert!(ends_by(tracker.ended(), || {
            assert!(tracker.advance(PoolPhase::Ended));
        }));
        assert!(!tracker.advance(PoolPhase::Closed) && tracker.is_closed());
    }

    #[test]
    fn a_pool_that_drains_begins_no_acquire_and_still_cleans_up() {
        let tracker = tracker();
        let acquire = tracker.try_begin().unwrap();
        assert!(ends_by(tracker.idle(), || drop(acquire)));
        tracker.advance(PoolPhase::Draining);
        assert!(tracker.try_begin().is_none());
        assert!(is_over(tracker.idle()));
        let cleanup = tracker.begin_cleanup();
        assert!(ends_by(tracker.idle(), || drop(cleanup)));
    }

    #[test]
    fn a_pool_is_idle_without_a_lease_and_without_work() {
        let tracker = tracker();
        let (lease, acquire) = (lease_with(1), tracker.try_begin());
        tracker.insert(&lease);
        let mut idle = pin!(tracker.idle());
        assert!(!is_over(idle.as_mut()));
        drop(acquire);
        assert!(!is_over(idle.as_mut()));
        assert!(ends_by(idle, || tracker.remove_ended(&lease, true)));
    }

    #[test]
    fn a_wait_for_fewer_entries_ends_with_the_one_that_makes_it_so() {
        let tracker = tracker();
        let leases = [lease_with(1), lease_with(2)];
        leases.iter().for_each(|lease| tracker.insert(lease));
        assert!(is_over(tracker.fewer_than(3)));
        assert!(!is_over(tracker.fewer_than(1)));
        assert!(ends_by(tracker.fewer_than(2), || tracker.remove_ended(&leases[0], true)));
        let acquire = tracker.try_begin();
        assert!(!is_over(tracker.fewer_than(2)));
        assert!(ends_by(tracker.fewer_than(2), || drop(acquire)));
    }
}
