//! What a pool measures, by the facade crate `metrics`. Without the feature of that name all of it is empty.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::outcome::Outcome;

/// Whether anything is measured. Values that only a measurement needs are computed behind it.
pub(crate) const IS_ON: bool = cfg!(feature = "metrics");

/// One fact about the locks of a template.
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Measurement {
    /// A call begins to wait for a lock, or for the answer to its first request.
    WaitBegan,
    /// That wait is over.
    WaitEnded(Outcome),
    /// A lease begins, after a wait of this time.
    Granted(Duration),
    /// The hold has ended after this time.
    HoldEnded(Duration),
    HandedOff,
    Renewal(RenewalResult),
    /// The reason, one of [`LOSSES`].
    Lost(&'static str),
    Release(ReleaseResult),
}

/// What one renewal of a lease led to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RenewalResult {
    Renewed,
    Failed,
    NotHeld,
}

/// What one request to release a lease led to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReleaseResult {
    Released,
    NotHeld,
    Failed,
}

/// A call to a store.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreOperation {
    Acquire,
    Renew,
    Release,
    IsHeld,
    Health,
    Probe,
}

/// How a call to a store ended.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreResult {
    Answered,
    /// At least one entry of the call has failed.
    Failed,
    /// The call was given up.
    Unanswered,
}

/// The measurements of one template.
#[derive(Clone, Default)]
pub(crate) struct LockMetrics {
    #[cfg(feature = "metrics")]
    handles: Option<Arc<recorded::LockHandles>>,
}

impl LockMetrics {
    pub(crate) fn record(&self, measurement: Measurement) {
        #[cfg(feature = "metrics")]
        if let Some(handles) = &self.handles {
            recorded::contained(|| handles.record(measurement));
        }
        let _ = measurement;
    }
}

impl fmt::Debug for LockMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockMetrics").finish_non_exhaustive()
    }
}

/// The measurements of a pool and its store.
#[derive(Default)]
pub(crate) struct PoolMetrics {
    #[cfg(feature = "metrics")]
    cache: recorded::Cache,
}

impl PoolMetrics {
    /// The pool has this name from now on.
    pub(crate) fn set_pool(&self, name: &Arc<str>) {
        #[cfg(feature = "metrics")]
        self.cache.set_pool(name);
        let _ = name;
    }

    /// The measurements of the locks of `template`.
    pub(crate) fn of(&self, template: &'static str) -> LockMetrics {
        #[cfg(feature = "metrics")]
        return LockMetrics { handles: recorded::contained(|| self.cache.of(template)) };
        #[cfg(not(feature = "metrics"))]
        {
            let _ = template;
            LockMetrics::default()
        }
    }

    /// A call to the store has ended after `taken`.
    #[cfg(feature = "metrics")]
    pub(crate) fn store_call(
        &self,
        operation: StoreOperation,
        result: StoreResult,
        taken: Duration,
    ) {
        recorded::contained(|| self.cache.store().call(operation, result, taken));
    }

    /// Whether the store answers has changed.
    pub(crate) fn store_is_up(&self, is_up: bool) {
        #[cfg(feature = "metrics")]
        recorded::contained(|| self.cache.set_up(is_up));
        let _ = is_up;
    }
}

impl fmt::Debug for PoolMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolMetrics").finish_non_exhaustive()
    }
}

/// Why a lease was lost: the words of events and metrics.
pub(crate) const LOSSES: [&str; 5] = ["expired", "taken", "ttl_over", "max_hold", "pool_closed"];

#[cfg(feature = "metrics")]
mod recorded {
    use std::collections::HashMap;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, PoisonError, RwLock};
    use std::time::Duration;

    use metrics::{
        Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge,
        describe_histogram, gauge, histogram, with_recorder,
    };

    use super::{
        LOSSES, Measurement, Outcome, ReleaseResult, RenewalResult, StoreOperation, StoreResult,
    };
    use crate::base::error::ErrorKind;

    /// Runs code of the program's recorder. A panic in it ends one measurement.
    pub(super) fn contained<T: Default>(code: impl FnOnce() -> T) -> T {
        catch_unwind(AssertUnwindSafe(code)).unwrap_or_default()
    }

    /// The outcomes that an attempt can have.
    const OUTCOMES: [Outcome; 11] = [
        Outcome::Acquired,
        Outcome::Passed,
        Outcome::Cancelled,
        Outcome::Failed(ErrorKind::Conflict),
        Outcome::Failed(ErrorKind::Backend),
        Outcome::Failed(ErrorKind::QueueFull),
        Outcome::Failed(ErrorKind::PoolClosed),
        Outcome::Failed(ErrorKind::WouldDeadlock),
        Outcome::Failed(ErrorKind::InvalidKey),
        Outcome::Failed(ErrorKind::Config),
        Outcome::Failed(ErrorKind::Lost),
    ];
    const RENEWALS: [&str; 3] = ["renewed", "failed", "not_held"];
    const RELEASES: [&str; 3] = ["released", "not_held", "failed"];
    const OPERATIONS: [&str; 6] = ["acquire", "renew", "release", "is_held", "health", "probe"];
    const RESULTS: [&str; 3] = ["answered", "failed", "unanswered"];

    /// The handles of one template. All of them exist from the first call on, at zero.
    pub(crate) struct LockHandles {
        attempts: [Counter; OUTCOMES.len()],
        wait: Histogram,
        hold: Histogram,
        waiting: Gauge,
        held: Gauge,
        hand_offs: Counter,
        renewals: [Counter; 3],
        losses: [Counter; LOSSES.len()],
        releases: [Counter; 3],
    }

    impl LockHandles {
        fn new(pool: &Arc<str>, template: &'static str) -> Self {
            let pool = || pool.clone();
            macro_rules! counters {
                ($name:literal, $label:literal, $values:expr) => {
                    $values.map(|value| {
                        counter!($name, "pool" => pool(), "template" => template, $label => value)
                    })
                };
            }
            Self {
                attempts: counters!("lock.attempts", "outcome", OUTCOMES.map(Outcome::as_str)),
                wait: histogram!("lock.wait.duration", "pool" => pool(), "template" => template),
                hold: histogram!("lock.hold.duration", "pool" => pool(), "template" => template),
                waiting: gauge!("lock.waiting", "pool" => pool(), "template" => template),
                held: gauge!("lock.held", "pool" => pool(), "template" => template),
                hand_offs: counter!("lock.handoffs", "pool" => pool(), "template" => template),
                renewals: counters!("lock.renewals", "outcome", RENEWALS),
                losses: counters!("lock.losses", "reason", LOSSES),
                releases: counters!("lock.releases", "outcome", RELEASES),
            }
        }

        pub(super) fn record(&self, measurement: Measurement) {
            match measurement {
                Measurement::WaitBegan => self.waiting.increment(1.0),
                Measurement::WaitEnded(outcome) => {
                    self.waiting.decrement(1.0);
                    if let Some(at) = OUTCOMES.iter().position(|one| *one == outcome) {
                        self.attempts[at].increment(1);
                    }
                }
                Measurement::Granted(waited) => {
                    self.held.increment(1.0);
                    self.wait.record(waited);
                }
                Measurement::HoldEnded(held) => {
                    self.held.decrement(1.0);
                    self.hold.record(held);
                }
                Measurement::HandedOff => self.hand_offs.increment(1),
                Measurement::Renewal(result) => {
                    let [renewed, failed, not_held] = &self.renewals;
                    match result {
                        RenewalResult::Renewed => renewed,
                        RenewalResult::Failed => failed,
                        RenewalResult::NotHeld => not_held,
                    }
                    .increment(1);
                }
                Measurement::Lost(reason) => {
                    if let Some(at) = LOSSES.iter().position(|one| *one == reason) {
                        self.losses[at].increment(1);
                    }
                }
                Measurement::Release(result) => {
                    let [released, not_held, failed] = &self.releases;
                    match result {
                        ReleaseResult::Released => released,
                        ReleaseResult::NotHeld => not_held,
                        ReleaseResult::Failed => failed,
                    }
                    .increment(1);
                }
            }
        }
    }

    /// The handles of a store.
    pub(crate) struct StoreHandles {
        requests: [[Counter; 3]; OPERATIONS.len()],
        durations: [Histogram; OPERATIONS.len()],
        up: Gauge,
    }

    impl StoreHandles {
        fn new(pool: &Arc<str>) -> Self {
            let pool = || pool.clone();
            let requests = OPERATIONS.map(|operation| {
                RESULTS.map(|result| {
                    counter!("lock.store.requests", "pool" => pool(), "operation" => operation, "outcome" => result)
                })
            });
            let durations = OPERATIONS.map(|operation| {
                histogram!("lock.store.request.duration", "pool" => pool(), "operation" => operation)
            });
            Self { requests, durations, up: gauge!("lock.store.up", "pool" => pool()) }
        }

        pub(super) fn call(&self, operation: StoreOperation, result: StoreResult, taken: Duration) {
            let operation = match operation {
                StoreOperation::Acquire => 0,
                StoreOperation::Renew => 1,
                StoreOperation::Release => 2,
                StoreOperation::IsHeld => 3,
                StoreOperation::Health => 4,
                StoreOperation::Probe => 5,
            };
            let [answered, failed, unanswered] = &self.requests[operation];
            match result {
                StoreResult::Answered => answered,
                StoreResult::Failed => failed,
                StoreResult::Unanswered => unanswered,
            }
            .increment(1);
            self.durations[operation].record(taken);
        }

        fn set_up(&self, is_up: bool) {
            self.up.set(f64::from(u8::from(is_up)));
        }
    }

    /// The handles that a pool uses: those of one recorder, and of one name of the pool. They are made anew when either
    /// changes.
    pub(crate) struct Cache(RwLock<Handles>);

    struct Handles {
        /// The address of the recorder.
        recorder: usize,
        pool: Arc<str>,
        locks: HashMap<&'static str, Arc<LockHandles>>,
        store: Option<Arc<StoreHandles>>,
        is_up: bool,
    }

    impl Default for Cache {
        fn default() -> Self {
            let pool = Arc::from("unnamed");
            let locks = HashMap::new();
            Self(RwLock::new(Handles { recorder: 0, pool, locks, store: None, is_up: true }))
        }
    }

    impl Cache {
        pub(super) fn set_pool(&self, name: &Arc<str>) {
            let mut handles = self.0.write().unwrap_or_else(PoisonError::into_inner);
            handles.pool = name.clone();
            handles.clear();
        }

        pub(super) fn of(&self, template: &'static str) -> Option<Arc<LockHandles>> {
            let recorder = recorder();
            {
                let handles = self.0.read().unwrap_or_else(PoisonError::into_inner);
                if handles.recorder == recorder
                    && let Some(found) = handles.locks.get(template)
                {
                    return Some(found.clone());
                }
            }
            let mut handles = self.0.write().unwrap_or_else(PoisonError::into_inner);
            handles.follow(recorder);
            let Handles { pool, locks, .. } = &mut *handles;
            let made = || Arc::new(LockHandles::new(pool, template));
            Some(locks.entry(template).or_insert_with(made).clone())
        }

        pub(super) fn store(&self) -> Arc<StoreHandles> {
            let recorder = recorder();
            {
                let handles = self.0.read().unwrap_or_else(PoisonError::into_inner);
                if handles.recorder == recorder
                    && let Some(store) = &handles.store
                {
                    return store.clone();
                }
            }
            let mut handles = self.0.write().unwrap_or_else(PoisonError::into_inner);
            handles.follow(recorder);
            let Handles { pool, store, is_up, .. } = &mut *handles;
            let made = || {
                let store = StoreHandles::new(pool);
                store.set_up(*is_up);
                Arc::new(store)
            };
            store.get_or_insert_with(made).clone()
        }

        pub(super) fn set_up(&self, is_up: bool) {
            self.0.write().unwrap_or_else(PoisonError::into_inner).is_up = is_up;
            self.store().set_up(is_up);
        }
    }

    impl Handles {
        fn clear(&mut self) {
            self.locks.clear();
            self.store = None;
        }

        /// Replaces the handles of another recorder.
        fn follow(&mut self, recorder: usize) {
            if self.recorder != recorder {
                self.recorder = recorder;
                self.store = None;
                describe();
                for (template, handles) in &mut self.locks {
                    *handles = Arc::new(LockHandles::new(&self.pool, template));
                }
            }
        }
    }

    /// The address of the recorder that handles are made by now.
    fn recorder() -> usize {
        with_recorder(|recorder| std::ptr::from_ref(recorder).cast::<()>().addr())
    }

    fn describe() {
        describe_counter!("lock.attempts", Unit::Count, "Calls for a lock, by what they led to");
        describe_histogram!("lock.wait.duration", Unit::Seconds, "From the call to the grant");
        describe_histogram!("lock.hold.duration", Unit::Seconds, "From the grant to its end");
        describe_gauge!("lock.waiting", Unit::Count, "Calls that wait for a lock or an answer");
        describe_gauge!("lock.held", Unit::Count, "Leases that are held now");
        describe_counter!("lock.handoffs", Unit::Count, "Locks given to a task of the process");
        describe_counter!("lock.renewals", Unit::Count, "Renewals of leases, by their outcome");
        describe_counter!("lock.losses", Unit::Count, "Leases that were lost, by the reason");
        describe_counter!("lock.releases", Unit::Count, "Releases at the store, by their outcome");
        describe_counter!("lock.store.requests", Unit::Count, "Calls to the store");
        describe_histogram!("lock.store.request.duration", Unit::Seconds, "Times of these calls");
        describe_gauge!(
            "lock.store.up",
            Unit::Count,
            "1 while the store answers, 0 while it does not"
        );
    }
}
