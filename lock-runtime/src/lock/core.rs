//! What a pool consists of.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use once_cell::sync::{Lazy, OnceCell};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

#[cfg(feature = "metrics")]
use crate::backend::measured::MeasuredBackend;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Capabilities, DynBackend, LeaseRef, LeaseStatus,
};
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::lock_order::LockOrder;
use crate::base::lock_spec::LockSpec;
use crate::base::metrics::PoolMetrics;
use crate::base::options::{Defaults, OnOutage, ReleaseMode};
use crate::base::problem::ProblemMap;
use crate::base::shared_policy::PolicyCache;
use crate::base::text::rounded;
use crate::exec::batcher::Batcher;
use crate::exec::driver::Driver;
use crate::exec::events::Origin;
use crate::exec::inline_task::poll_then_spawn;
use crate::exec::round_trip::RoundTrip;
use crate::exec::throttle::Throttle;
use crate::lease::held_lease::EndsHolds;
use crate::lease::lease::Lease;
use crate::lease::renewal::{RenewalConfig, RenewalScheduler};
use crate::lease::tracker::LeaseTracker;
use crate::lock::acquire::time_limits::TimeLimits;
use crate::lock::admission::{Admission, AdmissionSlot};
use crate::lock::linger_expiry;
use crate::lock::outgoing::OutgoingBatch;
use crate::lock::store_status::StoreStatus;
use crate::lock::undo_queue::UndoQueue;
use crate::lock::waiter::LockWaiter;
use crate::lock::wakeups;
use crate::queue::wait_queue::WaitQueues;

/// A pool: its store, its driver, and the state of its locks.
///
/// Dropping the last reference ends its background tasks. Leases and permits keep it alive.
pub(crate) struct PoolCore {
    /// Set when the pool is installed under a name.
    name: OnceCell<Arc<str>>,
    pub(crate) config: PoolConfig,
    pub(crate) capabilities: Capabilities,
    pub(crate) queue: Arc<WaitQueues<LockWaiter>>,
    pub(crate) renewals: Arc<RenewalScheduler>,
    pub(crate) tracker: Arc<LeaseTracker>,
    pub(crate) outgoing: Batcher<OutgoingBatch>,
    /// How long the store takes for an acquire.
    pub(crate) round_trip: RoundTrip,
    pub(crate) store_status: Arc<StoreStatus>,
    pub(crate) undo: UndoQueue,
    /// Until when a shutdown lets holders finish: the earliest of all calls.
    pub(super) grace_end: watch::Sender<Option<Instant>>,
    pub(crate) metrics: Arc<PoolMetrics>,
    pub(crate) policies: PolicyCache,
    /// Bounds the events about full queues.
    pub(crate) queue_full: Throttle,
    /// Bounds the warnings about releases that are repeated.
    pub(super) failed_releases: Throttle,
    /// Bounds the warnings about releases that are not repeated any more.
    pub(super) releases_given_up: Throttle,
    /// Bounds the acquires in flight at a store that asks for it.
    admission: Option<Arc<Admission>>,
    tasks: [AbortHandle; 4],
}

/// The settings and resources of a pool.
pub(crate) struct PoolConfig {
    pub(crate) key_prefix: Box<str>,
    pub(crate) defaults: Defaults,
    /// How long one request to the store may take.
    pub(crate) request_timeout: Duration,
    pub(crate) max_waiters: usize,
    /// How long the process hands a lock off among its own tasks while other processes wait for it.
    pub(crate) local_handoff_limit: Duration,
    pub(crate) barging_window: Option<BargingWindow>,
    pub(crate) on_outage: OnOutage,
    pub(crate) lock_order: LockOrder,
    #[cfg_attr(not(any(feature = "actix", feature = "tower")), allow(dead_code))]
    pub(crate) problem: ProblemMap,
    /// Whether requests may take a connection on the runtime of their caller.
    pub(crate) connection_per_runtime: bool,
    pub(crate) backend: Arc<dyn DynBackend>,
    pub(crate) clock: Clock,
    pub(crate) driver: Driver,
}

/// How often, and for how long, a contended lock is left free for clients that are in no queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BargingWindow {
    pub(crate) interval: Duration,
    pub(crate) length: Duration,
}

impl PoolCore {
    pub(crate) fn start(mut config: PoolConfig) -> Arc<Self> {
        let PoolConfig { clock, request_timeout, max_waiters, .. } = config;
        let metrics = Arc::<PoolMetrics>::default();
        #[cfg(feature = "metrics")]
        {
            config.backend = MeasuredBackend::wrap(config.backend, metrics.clone(), clock);
        }
        let capabilities = config.backend.capabilities();
        if !capabilities.local_handoff {
            config.local_handoff_limit = Duration::ZERO;
        }
        let queue = Arc::new(WaitQueues::<LockWaiter>::new(max_waiters, clock));
        let renewals = Arc::<RenewalScheduler>::default();
        let tracker = Arc::new(LeaseTracker::new());
        let waiting = Arc::downgrade(&queue);
        let store_status =
            StoreStatus::new(clock, config.on_outage, metrics.clone(), move |refusal| {
                if let Some(queue) = waiting.upgrade() {
                    queue.reject_waiting(refusal);
                }
            });
        let notifier =
            wakeups::notifier(&queue, &renewals, &tracker, &store_status, clock, &config.driver);
        {
            // A store may start tasks that listen. They must not end with the runtime of the caller.
            let _driver = config.driver.enter();
            config.backend.subscribe(notifier);
        }
        Arc::new_cyclic(|core: &Weak<Self>| {
            let (core, status) = (core.clone(), store_status.clone());
            let release = move |lease: &Arc<Lease>| {
                if let Some(core) = core.upgrade() {
                    drop(core.end_hold(lease, ReleaseMode::Background));
                }
            };
            let lingers = linger_expiry::expire(queue.clone(), tracker.clone(), release.clone());
            let renewal_config = RenewalConfig {
                most_together: capabilities.most_renewals.max(1),
                backend: config.backend.clone(),
                clock,
                driver: config.driver.clone(),
                request_timeout,
                end_hold: Box::new(release),
                on_outcome: {
                    let queue = queue.clone();
                    Box::new(move |sent, outcome| {
                        if outcome.is_ok() {
                            queue.clear_failure();
                        }
                        status.report(sent, outcome);
                    })
                },
                failures: Throttle::default(),
            };
            let driver = &config.driver;
            let probing = store_status.clone().probe(config.backend.clone(), request_timeout);
            let tasks = [
                driver.spawn_abortable(probing),
                driver.spawn_abortable(renewals.clone().run(renewal_config)),
                driver.spawn_abortable(queue.clone().expire()),
                driver.spawn_abortable(lingers),
            ];
            Self {
                name: OnceCell::new(),
                capabilities,
                queue,
                renewals,
                tracker,
                outgoing: Batcher::default(),
                round_trip: RoundTrip::default(),
                store_status,
                undo: UndoQueue::default(),
                grace_end: watch::Sender::default(),
                metrics,
                policies: PolicyCache::new(config.defaults),
                queue_full: Throttle::default(),
                failed_releases: Throttle::default(),
                releases_given_up: Throttle::default(),
                admission: capabilities
                    .paced
                    .then(|| Admission::new(clock, request_timeout, capabilities.least_in_flight)),
                tasks,
                config,
            }
        })
    }

    /// Whether the pool belongs to a process that this one was forked from.
    pub(crate) fn is_inherited(&self) -> bool {
        self.tracker.is_inherited()
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        static UNNAMED: Lazy<Arc<str>> = Lazy::new(|| Arc::from("unnamed"));
        self.name.get().unwrap_or(&UNNAMED)
    }

    /// The name under which the pool is installed, if it is.
    pub(crate) fn given_name(&self) -> Option<&Arc<str>> {
        self.name.get()
    }

    /// Names the pool, unless it has a name.
    pub(crate) fn set_name(&self, name: &str) {
        let name = self.name.get_or_init(|| Arc::from(name));
        self.store_status.set_pool(name);
        self.metrics.set_pool(name);
    }

    /// The metrics of the store exist from now on. It runs code of the recorder, so no lock is held meanwhile.
    pub(crate) fn announce_store(&self) {
        #[cfg(feature = "metrics")]
        if !self.capabilities.local {
            self.metrics.announce_store();
        }
    }

    pub(crate) fn backend(&self) -> &dyn DynBackend {
        &*self.config.backend
    }

    pub(crate) fn clock(&self) -> Clock {
        self.config.clock
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.config.driver
    }

    /// The call and this pool, for events.
    pub(crate) fn origin<'a>(&'a self, spec: &'a LockSpec) -> Origin<'a> {
        let LockSpec { label, span, metrics, .. } = spec;
        Origin { label, pool: self.name(), span, metrics }
    }

    /// How long one acquire request may take now.
    pub(crate) fn time_limits(&self) -> TimeLimits {
        const LEAST: Duration = Duration::from_millis(250);
        let timeout = self.config.request_timeout;
        let least = self.round_trip.limit().unwrap_or(timeout).max(LEAST).min(timeout);
        TimeLimits { longest: self.store_call_timeout(), least }
    }

    /// How long an acquire or a release may take at the store. A paced store gives up silent parts on its own, and is not
    /// cut off while it receives answers.
    pub(crate) fn store_call_timeout(&self) -> Duration {
        let times = if self.admission.is_some() { 4 } else { 1 };
        self.config.request_timeout.saturating_mul(times)
    }

    /// Reads from the store whether `lease` still belongs to its owner. The text of an error names neither the lock nor the
    /// pool.
    pub(crate) async fn is_held(self: &Arc<Self>, lease: LeaseRef) -> Result<bool, LockError> {
        let core = self.clone();
        let reading = async move { core.backend().is_held(&lease).await };
        let status = self.ask(self.config.request_timeout, reading).await?;
        Ok(status == LeaseStatus::Held)
    }

    /// The answer to `request`, which runs on the driver, within `limit`.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<T, BackendError>> + Send + 'static,
    ) -> Result<T, LockError> {
        if self.is_inherited() {
            return Err(LockError::inherited());
        }
        // The timer is one of the driver.
        let answering = async move { timeout(limit, request).await };
        let answer = self.driver().run(answering).await?;
        answer.unwrap_or_else(|_| Err(BackendError::unanswered())).map_err(LockError::backend)
    }

    /// Waits until the store has room for `requests` more. A store that is not paced always has. Cancel safe.
    pub(crate) async fn admit(&self, requests: usize) -> AdmissionSlot {
        match &self.admission {
            Some(admission) => admission.admit(requests).await,
            None => AdmissionSlot::default(),
        }
    }

    /// Sends `requests` at `sent` in the room of `slot`, and measures how long the store takes. Empty if it does not answer
    /// within `time_limit`.
    pub(crate) async fn acquire(
        &self,
        mut slot: AdmissionSlot,
        requests: &[AcquireRequest],
        sent: Instant,
        time_limit: Duration,
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        slot.sent(sent);
        match timeout(time_limit, self.backend().acquire(requests)).await {
            Ok(answers) => {
                slot.answered();
                if answers.iter().any(Result::is_ok) {
                    self.round_trip.answered(self.clock().now().since(sent));
                }
                self.store_status.report(sent, BackendError::of_all(&answers));
                answers
            }
            Err(_) => {
                self.round_trip.silent(time_limit);
                let text = format!("no answer within {:?}", rounded(time_limit));
                let silence = BackendError::new(FailureKind::MaybeApplied, text);
                self.store_status.report(sent, Err(&silence));
                Vec::new()
            }
        }
    }

    /// Runs `work` to its end, even if the caller is dropped. It runs on the driver, or with a local store on this thread
    /// as far as it gets.
    pub(crate) fn run(&self, work: impl Future<Output = ()> + Send + 'static) {
        if self.capabilities.local {
            poll_then_spawn(self.driver().runtime(), None, work);
        } else {
            self.driver().spawn(work);
        }
    }
}

impl Drop for PoolCore {
    fn drop(&mut self) {
        if self.is_inherited() {
            // Its connections, and the tasks that a drop would wake, belong to the parent process.
            let kept = (self.config.backend.clone(), self.driver().clone(), self.tracker.clone());
            Box::leak(Box::new((kept, self.queue.clone(), self.renewals.clone())));
            return;
        }
        for task in &self.tasks {
            task.abort();
        }
        self.store_status.close();
    }
}

impl fmt::Debug for PoolCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockPool")
            .field("name", self.name())
            .field("key_prefix", &self.config.key_prefix)
            .field("defaults", &self.config.defaults)
            .finish_non_exhaustive()
    }
}
