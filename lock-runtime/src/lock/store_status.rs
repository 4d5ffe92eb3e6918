//! Whether the store of a pool answers.
//!
//! The outcomes of acquires, renewals and probes are reported to [`StoreStatus`]. After a failure it sends probes until the
//! store answers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::backend::DynBackend;
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::options::OnOutage;
use crate::base::sync::{Mutex, MutexGuard};
use crate::exec::events;

/// What the requests to a store have shown so far.
#[derive(Debug)]
enum Reachability {
    Up,
    /// All requests since then have failed.
    Failing {
        since: Instant,
    },
    /// As `Failing`, for longer than [`Reachability::TOLERANCE`].
    Down {
        since: Instant,
        error: BackendError,
    },
}

/// What a report has changed.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    /// The first failure.
    Suspected,
    /// The store is down.
    Lost,
    /// The store answers, after it was down for this time.
    Back(Duration),
}

impl Reachability {
    /// A server that restarts, and a connection that is replaced, are not an outage.
    const TOLERANCE: Duration = Duration::from_millis(500);

    fn on_answer(&mut self, now: Instant) -> Change {
        match std::mem::replace(self, Self::Up) {
            Self::Up | Self::Failing { .. } => Change::None,
            Self::Down { since, .. } => Change::Back(now.since(since)),
        }
    }

    /// A request that was sent at `sent` has failed.
    fn on_failure(&mut self, sent: Instant, now: Instant, error: &BackendError) -> Change {
        let (since, change) = match *self {
            Self::Up => (sent, Change::Suspected),
            Self::Failing { since } => (since.min(sent), Change::None),
            Self::Down { .. } => return Change::None,
        };
        if now.since(since) < Self::TOLERANCE {
            *self = Self::Failing { since };
            return change;
        }
        *self = Self::Down { since, error: error.clone() };
        Change::Lost
    }
}

/// Whether the store of a pool answers, and what an acquire does while it does not.
pub(crate) struct StoreStatus {
    clock: Clock,
    on_outage: OnOutage,
    /// Makes waiters send a request, which fails and rejects them.
    wake_waiters: Box<dyn Fn() + Send + Sync>,
    /// The name of the pool, for events.
    pool: OnceCell<Arc<str>>,
    /// As `reachability`, for a look without the mutex.
    is_up: AtomicBool,
    reachability: Mutex<Reachability>,
    /// Wakes [`probe`](Self::probe).
    suspected: Notify,
}

impl StoreStatus {
    /// Between two probes.
    const INTERVAL: Duration = Duration::from_millis(100);

    pub(crate) fn new(
        clock: Clock,
        on_outage: OnOutage,
        wake_waiters: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        let wake_waiters = Box::new(wake_waiters);
        let reachability = Mutex::new(Reachability::Up);
        let (is_up, suspected) = (AtomicBool::new(true), Notify::new());
        let pool = OnceCell::new();
        Arc::new(Self { clock, on_outage, wake_waiters, pool, is_up, reachability, suspected })
    }

    pub(crate) fn set_pool(&self, name: &Arc<str>) {
        let _ = self.pool.set(name.clone());
    }

    /// The outcome of a request that was sent at `sent`. A rejection is an answer.
    pub(crate) fn report(&self, sent: Instant, outcome: Result<(), &BackendError>) {
        let failure = outcome.err().filter(|error| error.kind() != FailureKind::Rejected);
        if failure.is_none() && self.is_up.load(Ordering::Relaxed) {
            return;
        }
        let now = self.clock.now();
        let change = {
            let mut reachability = self.reachability();
            let change = match failure {
                Some(error) => reachability.on_failure(sent, now, error),
                None => reachability.on_answer(now),
            };
            self.is_up.store(matches!(*reachability, Reachability::Up), Ordering::Relaxed);
            change
        };
        let pool = self.pool.get().map_or("unnamed", |name| name);
        match (change, failure) {
            (Change::Suspected, _) => self.suspected.notify_one(),
            (Change::Lost, Some(error)) => {
                self.suspected.notify_one();
                events::store_lost(pool, error);
                if self.on_outage == OnOutage::Fail {
                    (self.wake_waiters)();
                }
            }
            (Change::Back(after), _) => events::store_back(pool, after),
            (Change::None | Change::Lost, _) => {}
        }
    }

    /// The connection to the store has ended, or a new one has failed.
    pub(crate) fn report_disconnect(&self, error: &BackendError) {
        self.report(self.clock.now(), Err(error));
    }

    /// The error of an acquire that is not to wait for a store that is down.
    pub(crate) fn refusal(&self) -> Option<LockError> {
        if self.on_outage == OnOutage::Wait || self.is_up.load(Ordering::Relaxed) {
            return None;
        }
        let Reachability::Down { since, error } = &*self.reachability() else { return None };
        let down_for = self.clock.now().since(*since);
        let text = format!("the store has been down for {down_for:.1?}: {}", error.message());
        Some(LockError::backend(
            BackendError::new(FailureKind::NotApplied, text).remedy(
                "check that the store is up and reachable; the pool returns to it by itself",
            ),
        ))
    }

    /// Sends a probe now and then while requests fail. Runs on the driver for the life of the pool.
    pub(crate) async fn probe(self: Arc<Self>, store: Arc<dyn DynBackend>, limit: Duration) {
        loop {
            self.suspected.notified().await;
            while !self.is_up.load(Ordering::Relaxed) {
                self.clock.sleep_until(self.clock.now() + Self::INTERVAL).await;
                let sent = self.clock.now();
                let silence =
                    || BackendError::new(FailureKind::MaybeApplied, "the store does not answer");
                let answer = timeout(limit, store.health()).await;
                let answer = answer.unwrap_or_else(|_| Err(silence()));
                self.report(sent, answer.as_ref().map(|_| ()));
            }
        }
    }

    fn reachability(&self) -> MutexGuard<'_, Reachability> {
        self.reachability.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    fn failure() -> BackendError {
        BackendError::new(FailureKind::NotApplied, "no connection")
    }

    #[test]
    fn failures_for_longer_than_the_tolerance_are_an_outage() {
        let (mut store, error) = (Reachability::Up, failure());
        assert_eq!(store.on_failure(at(1000), at(1001), &error), Change::Suspected);
        assert_eq!(store.on_failure(at(1100), at(1499), &error), Change::None);
        assert_eq!(store.on_failure(at(1490), at(1500), &error), Change::Lost);
        assert_eq!(store.on_failure(at(1600), at(1700), &error), Change::None, "once");
        assert_eq!(store.on_answer(at(3000)), Change::Back(Duration::from_secs(2)));
        assert_eq!(store.on_answer(at(3001)), Change::None, "once");
    }

    #[test]
    fn a_request_that_was_silent_for_the_tolerance_is_an_outage() {
        let mut store = Reachability::Up;
        assert_eq!(store.on_failure(at(1000), at(2000), &failure()), Change::Lost);
    }

    #[test]
    fn an_answer_in_between_begins_the_tolerance_anew() {
        let (mut store, error) = (Reachability::Up, failure());
        assert_eq!(store.on_failure(at(1000), at(1400), &error), Change::Suspected);
        assert_eq!(store.on_answer(at(1450)), Change::None);
        assert_eq!(store.on_failure(at(1460), at(1950), &error), Change::Suspected);
        assert_eq!(store.on_failure(at(1900), at(1960), &error), Change::Lost);
    }

    #[test]
    fn an_acquire_is_refused_during_an_outage_alone() {
        let rejected = BackendError::new(FailureKind::Rejected, "READONLY");
        for on_outage in [OnOutage::Wait, OnOutage::Fail] {
            let clock = Clock::Boot;
            let status = StoreStatus::new(clock, on_outage, || {});
            let long_ago = Instant::from_nanos(0);
            status.report(long_ago, Err(&rejected));
            assert!(status.refusal().is_none(), "a rejection is an answer");
            status.report(clock.now(), Err(&failure()));
            assert!(status.refusal().is_none(), "too early");
            status.report(long_ago, Err(&failure()));
            let refusal = status.refusal();
            assert_eq!(refusal.is_some(), on_outage == OnOutage::Fail);
            assert!(refusal.is_none_or(
                |error| error.is_backend() && error.to_string().contains("no connection")
            ));
            status.report(clock.now(), Ok(()));
            assert!(status.refusal().is_none());
        }
    }
}
