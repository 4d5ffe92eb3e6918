//! Whether the store of a pool answers.
//!
//! The outcomes of acquires, renewals and probes are reported to [`StoreStatus`]. After a failure it sends probes until the
//! store answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use once_cell::sync::OnceCell;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::backend::DynBackend;
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::metrics::PoolMetrics;
use crate::base::options::OnOutage;
use crate::base::sync::Mutex;
use crate::exec::events;
use crate::exec::throttle::Throttle;

/// What the requests to a store have shown so far.
#[derive(Debug)]
enum Reachability {
    Up,
    /// A request has failed at this moment, and none was answered since.
    Failing {
        since: Instant,
    },
    /// A request that was sent after `since` has failed, too, and [`TOLERANCE`](Reachability::TOLERANCE) is over.
    Down {
        since: Instant,
        error: BackendError,
        /// One acquire is tried from this moment on, whatever probes show.
        next_trial: Instant,
    },
    /// The pool is shut down.
    Closed,
}

/// What a report has changed.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    None,
    /// The first failure.
    Suspected,
    /// The store has refused a request, which may be about this request only.
    Refused,
    /// The store is down.
    Lost,
    /// The store answers, after it was down for this time.
    Back(Duration),
}

impl Reachability {
    /// A server that restarts, and a connection that is replaced, are not an outage.
    const TOLERANCE: Duration = Duration::from_millis(500);
    /// Between two acquires that are tried during an outage.
    const TRIAL: Duration = Duration::from_secs(1);

    fn on_answer(&mut self, now: Instant) -> Change {
        let change = match self {
            Self::Up | Self::Closed => return Change::None,
            Self::Failing { .. } => Change::None,
            Self::Down { since, .. } => Change::Back(now.since(*since)),
        };
        *self = Self::Up;
        change
    }

    /// A request that was sent at `sent` has failed. One that was sent before the first failure says nothing new: it may
    /// have been in flight with that one.
    fn on_failure(&mut self, sent: Instant, now: Instant, error: &BackendError) -> Change {
        match *self {
            Self::Up if error.kind() == FailureKind::Rejected => Change::Refused,
            Self::Up => {
                *self = Self::Failing { since: now };
                Change::Suspected
            }
            Self::Failing { since } if sent >= since && now.since(since) >= Self::TOLERANCE => {
                *self = Self::Down { since, error: error.clone(), next_trial: now + Self::TRIAL };
                Change::Lost
            }
            Self::Down { error: ref mut last, .. } => {
                // The latest says what to mend.
                *last = error.clone();
                Change::None
            }
            Self::Failing { .. } | Self::Closed => Change::None,
        }
    }
}

/// Whether the store of a pool answers, and what an acquire does while it does not.
pub(crate) struct StoreStatus {
    clock: Clock,
    on_outage: OnOutage,
    metrics: Arc<PoolMetrics>,
    /// Rejects all waiters.
    reject_waiters: Box<dyn Fn(&LockError) + Send + Sync>,
    /// The name of the pool, for events.
    pool: OnceCell<Arc<str>>,
    /// Whether a request has failed since the last answer, for a look without the mutex.
    is_failing: AtomicBool,
    reachability: Mutex<Reachability>,
    /// Bounds the events about requests that the store refuses.
    refusals: Throttle,
    /// Wakes [`probe`](Self::probe).
    suspected: Notify,
}

impl StoreStatus {
    /// Between two probes. It doubles with each that fails.
    const INTERVAL: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(1);

    pub(crate) fn new(
        clock: Clock,
        on_outage: OnOutage,
        metrics: Arc<PoolMetrics>,
        reject_waiters: impl Fn(&LockError) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            clock,
            on_outage,
            metrics,
            reject_waiters: Box::new(reject_waiters),
            pool: OnceCell::new(),
            is_failing: AtomicBool::new(false),
            reachability: Mutex::new(Reachability::Up),
            refusals: Throttle::default(),
            suspected: Notify::new(),
        })
    }

    pub(crate) fn set_pool(&self, name: &Arc<str>) {
        let _ = self.pool.set(name.clone());
    }

    /// The outcome of a request that was sent at `sent`. A rejection ends no outage: a store that was restarted with another
    /// password rejects every connection.
    pub(crate) fn report(&self, sent: Instant, outcome: Result<(), &BackendError>) {
        if outcome.is_ok() && !self.is_failing.load(Ordering::Relaxed) {
            return;
        }
        let now = self.clock.now();
        let change = self.change(|reachability| match outcome {
            Ok(()) => reachability.on_answer(now),
            Err(error) => reachability.on_failure(sent, now, error),
        });
        if change == Change::Refused
            && let Err(error) = outcome
            && let Some(failed) = self.refusals.report(now)
        {
            events::store_refused(self.pool(), failed, error);
        }
        if change == Change::Lost && self.on_outage == OnOutage::Fail {
            // Even behind a holder of this process: its release would wait for the store.
            if let Some(refusal) = self.refusal_at(now) {
                (self.reject_waiters)(&refusal);
            }
        }
    }

    /// The connection to the store has ended, or a new one has failed. Probes show whether the store is down.
    pub(crate) fn report_disconnect(&self, error: &BackendError) {
        if error.kind() != FailureKind::Rejected && !self.is_failing.load(Ordering::Relaxed) {
            let now = self.clock.now();
            self.change(|reachability| reachability.on_failure(now, now, error));
        }
    }

    /// The store has a new connection: the next probe is due.
    pub(crate) fn report_connect(&self) {
        if self.is_failing.load(Ordering::Relaxed) {
            self.suspected.notify_one();
        }
    }

    /// The pool is shut down or dropped: no event follows, and the metrics no longer say that the store is down.
    pub(crate) fn close(&self) {
        {
            let mut reachability = self.reachability.lock();
            // The next pool may have the name by now.
            if matches!(*reachability, Reachability::Closed) {
                return;
            }
            *reachability = Reachability::Closed;
            self.is_failing.store(false, Ordering::Relaxed);
            self.metrics.set_store_up(true);
        }
        self.metrics.publish_status();
    }

    /// Applies `change` to the state. Events are sent under the mutex, so in its order. The recorder of metrics runs in
    /// this thread, and so after the mutex is released.
    fn change(&self, change: impl FnOnce(&mut Reachability) -> Change) -> Change {
        let change = self.change_locked(change);
        if matches!(change, Change::Lost | Change::Back(_)) {
            self.metrics.publish_status();
        }
        change
    }

    fn change_locked(&self, change: impl FnOnce(&mut Reachability) -> Change) -> Change {
        let mut reachability = self.reachability.lock();
        let change = change(&mut reachability);
        let is_failing = !matches!(*reachability, Reachability::Up | Reachability::Closed);
        self.is_failing.store(is_failing, Ordering::Relaxed);
        let pool = self.pool();
        match (&change, &*reachability) {
            (Change::Suspected, _) => self.suspected.notify_one(),
            (Change::Lost, Reachability::Down { error, .. }) => {
                events::store_lost(pool, error);
                self.metrics.set_store_up(false);
            }
            (Change::Back(after), _) => {
                events::store_back(pool, *after);
                self.metrics.set_store_up(true);
            }
            (Change::None | Change::Refused | Change::Lost, _) => {}
        }
        change
    }

    /// Whether an acquire must end after a failed request.
    pub(crate) fn is_refusing(&self) -> bool {
        self.on_outage == OnOutage::Fail
            && self.is_failing.load(Ordering::Relaxed)
            && matches!(*self.reachability.lock(), Reachability::Down { .. })
    }

    /// The error of an acquire that must not wait for a store that is down. One acquire per second is tried.
    pub(crate) fn refusal_unless_trial(&self) -> Option<LockError> {
        if self.on_outage == OnOutage::Wait || !self.is_failing.load(Ordering::Relaxed) {
            return None;
        }
        let now = self.clock.now();
        if let Reachability::Down { next_trial, .. } = &mut *self.reachability.lock()
            && now >= *next_trial
        {
            *next_trial = now + Reachability::TRIAL;
            return None;
        }
        self.refusal_at(now)
    }

    /// Like [`refusal_unless_trial`](Self::refusal_unless_trial), for an acquire that would wait behind others.
    pub(crate) fn refusal_without_trial(&self) -> Option<LockError> {
        if self.is_refusing() { self.refusal_at(self.clock.now()) } else { None }
    }

    #[cold]
    fn refusal_at(&self, now: Instant) -> Option<LockError> {
        let Reachability::Down { since, error, .. } = &*self.reachability.lock() else {
            return None;
        };
        let down_for = now.since(*since);
        let text = format!("the store has been down for {down_for:.1?}: {}", error.message());
        Some(LockError::backend(
            BackendError::new(FailureKind::NotApplied, text).remedy(
                "check that the store is up and reachable; the pool returns to it on its own",
            ),
        ))
    }

    /// Sends probes while requests fail. Runs on the driver for the life of the pool.
    pub(crate) async fn probe(self: Arc<Self>, store: Arc<dyn DynBackend>, limit: Duration) {
        let limit = limit.min(Self::LONGEST);
        loop {
            self.suspected.notified().await;
            let mut pause = Self::INTERVAL;
            while self.is_failing.load(Ordering::Relaxed) {
                let due = self.clock.now() + pause;
                tokio::select! {
                    biased;
                    () = self.clock.sleep_until(due) => pause = (pause * 2).min(Self::LONGEST),
                    () = self.suspected.notified() => {}
                }
                let sent = self.clock.now();
                let silence =
                    || BackendError::new(FailureKind::MaybeApplied, "the store does not answer");
                let answer = timeout(limit, store.probe()).await;
                self.report(sent, answer.unwrap_or_else(|_| Err(silence())).as_ref().map(|&()| ()));
            }
        }
    }

    fn pool(&self) -> &str {
        self.pool.get().map_or("unnamed", |name| name)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

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
        assert_eq!(store.on_failure(at(1100), at(1500), &error), Change::None);
        assert_eq!(store.on_failure(at(1490), at(1501), &error), Change::Lost);
        assert_eq!(store.on_failure(at(1600), at(1700), &error), Change::None, "once");
        assert_eq!(store.on_answer(at(3001)), Change::Back(Duration::from_secs(2)));
        assert_eq!(store.on_answer(at(3002)), Change::None, "once");
    }

    /// Such as those of one batch, and of a connection that was reset.
    #[test]
    fn failures_of_requests_that_were_in_flight_together_are_no_outage() {
        let (mut store, error) = (Reachability::Up, failure());
        assert_eq!(store.on_failure(at(1000), at(5000), &error), Change::Suspected);
        assert_eq!(store.on_failure(at(1000), at(9000), &error), Change::None);
        assert_eq!(store.on_answer(at(9001)), Change::None);
        assert_eq!(store.on_failure(at(4000), at(9002), &error), Change::Suspected);
        assert_eq!(store.on_failure(at(9003), at(9503), &error), Change::Lost);
    }

    #[test]
    fn an_answer_in_between_begins_the_tolerance_anew() {
        let (mut store, error) = (Reachability::Up, failure());
        assert_eq!(store.on_failure(at(1000), at(1400), &error), Change::Suspected);
        assert_eq!(store.on_answer(at(1450)), Change::None);
        assert_eq!(store.on_failure(at(1460), at(1950), &error), Change::Suspected);
        assert_eq!(store.on_failure(at(1960), at(2000), &error), Change::None);
    }

    #[test]
    fn after_a_shutdown_nothing_changes() {
        let (mut store, error) = (Reachability::Closed, failure());
        assert_eq!(store.on_failure(at(1), at(1000), &error), Change::None);
        assert_eq!(store.on_failure(at(2000), at(3000), &error), Change::None);
        assert_eq!(store.on_answer(at(4000)), Change::None);
    }

    #[test]
    fn acquires_are_refused_during_an_outage_but_for_one_in_a_second() {
        for on_outage in [OnOutage::Wait, OnOutage::Fail] {
            let rejections = Arc::<AtomicUsize>::default();
            let counted = rejections.clone();
            let reject = move |_: &LockError| {
                counted.fetch_add(1, Ordering::SeqCst);
            };
            let (clock, error) = (Clock::Boot, failure());
            let status = StoreStatus::new(clock, on_outage, Arc::default(), reject);
            status.report(clock.now(), Err(&BackendError::new(FailureKind::Rejected, "READONLY")));
            assert!(!status.is_failing.load(Ordering::SeqCst), "a rejection is an answer");
            status.report_disconnect(&error);
            assert!(status.refusal_unless_trial().is_none(), "too early");
            assert!(!status.is_refusing());
            *status.reachability.lock() = Reachability::Failing { since: Instant::ORIGIN };
            status.report(clock.now(), Err(&error));
            let fails = on_outage == OnOutage::Fail;
            assert_eq!(status.is_refusing(), fails);
            assert_eq!(rejections.load(Ordering::SeqCst), usize::from(fails));
            let refusal = status.refusal_unless_trial();
            assert_eq!(refusal.is_some(), fails);
            assert!(refusal.is_none_or(|error| error.to_string().contains("no connection")));
            if let Reachability::Down { next_trial, .. } = &mut *status.reachability.lock() {
                *next_trial = clock.now();
            }
            assert!(status.refusal_unless_trial().is_none(), "a trial");
            assert_eq!(status.refusal_unless_trial().is_some(), fails, "one trial");
            status.report(clock.now(), Ok(()));
            assert!(status.refusal_unless_trial().is_none() && !status.is_refusing());
        }
    }

    #[test]
    fn a_refusal_begins_no_outage_and_ends_none() {
        let clock = Clock::Boot;
        let status = StoreStatus::new(clock, OnOutage::Fail, Arc::default(), |_| ());
        let refused = BackendError::new(FailureKind::Rejected, "another password");
        status.report(clock.now(), Err(&refused));
        assert!(!status.is_failing.load(Ordering::SeqCst));
        status.report_disconnect(&failure());
        *status.reachability.lock() = Reachability::Failing { since: Instant::ORIGIN };
        status.report(clock.now(), Err(&failure()));
        status.report(clock.now(), Err(&refused));
        assert!(status.is_refusing());
        let text = status.refusal_unless_trial().unwrap().to_string();
        assert!(text.contains("another password"), "{text}");
        status.report(clock.now(), Ok(()));
        assert!(!status.is_refusing());
        // After the end of the pool nothing is reported.
        let later = clock.now() + Duration::from_secs(2);
        status.refusals.report(later);
        status.close();
        status.report(clock.now(), Err(&refused));
        assert_eq!(status.refusals.report(later + Duration::from_secs(2)), Some(1));
    }

    /// The recorder of the program blocks in the gauge. Acquires are refused all the same.
    #[cfg(feature = "metrics")]
    #[test]
    fn a_recorder_that_blocks_stops_no_other_call() {
        use std::sync::mpsc;

        use metrics::{Counter, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Unit};

        struct Blocks {
            gauge: Arc<BlockingGauge>,
        }
        struct BlockingGauge {
            entered: mpsc::SyncSender<()>,
            leave: std::sync::Mutex<mpsc::Receiver<()>>,
        }
        impl GaugeFn for BlockingGauge {
            fn increment(&self, _: f64) {}

            fn decrement(&self, _: f64) {}

            fn set(&self, _: f64) {
                self.entered.send(()).unwrap();
                self.leave.lock().unwrap().recv().unwrap();
            }
        }
        impl metrics::Recorder for Blocks {
            fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: metrics::SharedString) {}

            fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: metrics::SharedString) {}

            fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: metrics::SharedString) {}

            fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
                Counter::noop()
            }

            fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
                Gauge::from_arc(self.gauge.clone())
            }

            fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
                Histogram::noop()
            }
        }

        let (entered, is_entered) = mpsc::sync_channel(8);
        let (leave, leaves) = mpsc::channel();
        let gauge = Arc::new(BlockingGauge { entered, leave: std::sync::Mutex::new(leaves) });
        let metrics = Arc::<PoolMetrics>::default();
        metrics.set_pool(&Arc::from("blocked"));
        let clock = Clock::Boot;
        let status = StoreStatus::new(clock, OnOutage::Fail, metrics, |_| ());
        *status.reachability.lock() = Reachability::Failing { since: Instant::ORIGIN };
        let reports = std::thread::spawn({
            let status = status.clone();
            move || {
                metrics::with_local_recorder(&Blocks { gauge }, || {
                    status.report(clock.now(), Err(&failure()));
                });
            }
        });
        is_entered.recv().unwrap();
        let (answer, answered) = mpsc::channel();
        let asks = std::thread::spawn(move || {
            answer.send(status.refusal_unless_trial().is_some()).unwrap();
        });
        let refused = answered.recv_timeout(Duration::from_secs(60));
        for _ in 0..8 {
            // Fails once the report has ended: the gauge is dropped with its recorder.
            let _ = leave.send(());
        }
        assert_eq!(refused, Ok(true));
        asks.join().unwrap();
        reports.join().unwrap();
    }
}
