//! What a pool is made of, for everything that works on its behalf.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::{Lazy, OnceCell};
use tokio::task::AbortHandle;

use crate::backend::DynBackend;

use crate::base::clock::Clock;
use crate::base::options::Defaults;
use crate::exec::driver::Driver;
use crate::exec::round_trip::RoundTrip;
use crate::lease::renewal::{Tools, Watchdog};
use crate::lease::tracker::Registry;
use crate::lock::acquire::first_request::Outbox;
use crate::lock::admission::{Admission, Permit};
use crate::lock::undo::Undo;
use crate::lock::wakeups;
use crate::queue::wait_queue::Queue;

pub(crate) struct Engine {
    /// Given when the pool is installed.
    name: OnceCell<Arc<str>>,
    pub(crate) key_prefix: Box<str>,
    pub(crate) defaults: Defaults,
    /// How long one request to the store may take.
    pub(crate) request_timeout: Duration,
    pub(crate) store: Arc<dyn DynBackend>,
    pub(crate) clock: Clock,
    pub(crate) driver: Driver,
    pub(crate) queue: Arc<Queue>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) outbox: Outbox,
    /// What one claim takes at the store.
    pub(crate) round_trip: RoundTrip,
    pub(crate) undo: Undo,
    /// For claims to a store that is paced.
    admission: Option<Arc<Admission>>,
    /// How long the process keeps a lock among its own tasks while others may want it.
    pub(crate) local_handoff_limit: Duration,
    pub(crate) barging_window: Option<BargingWindow>,
    tasks: [AbortHandle; 2],
}

/// When a lock that is handed on all the time is left free for a moment, for those who stand in no line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BargingWindow {
    pub(crate) every: Duration,
    pub(crate) length: Duration,
}

/// What differs between pools.
pub(crate) struct Plan {
    pub(crate) key_prefix: Box<str>,
    pub(crate) defaults: Defaults,
    pub(crate) request_timeout: Duration,
    pub(crate) max_waiters: usize,
    pub(crate) local_handoff_limit: Duration,
    pub(crate) barging_window: Option<BargingWindow>,
    pub(crate) store: Arc<dyn DynBackend>,
    pub(crate) clock: Clock,
    pub(crate) driver: Driver,
}

impl Engine {
    pub(crate) fn start(plan: Plan) -> Arc<Self> {
        let Plan {
            key_prefix,
            defaults,
            request_timeout,
            max_waiters,
            local_handoff_limit,
            barging_window,
            store,
            clock,
            driver,
        } = plan;
        let queue = Arc::new(Queue::new(max_waiters, clock));
        let watchdog = Arc::<Watchdog>::default();
        store.subscribe(wakeups::notifier(&queue, &watchdog, clock));
        let tools = Tools { store: store.clone(), clock, driver: driver.clone(), request_timeout };
        let tasks =
            [driver.keep(watchdog.clone().run(tools)), driver.keep(queue.clone().expire(clock))];
        let registry = Arc::new(Registry::new());
        let admission = store.capabilities().paced.then(|| Admission::new(clock, request_timeout));
        Arc::new(Self {
            name: OnceCell::new(),
            key_prefix,
            defaults,
            request_timeout,
            store,
            clock,
            driver,
            queue,
            watchdog,
            registry,
            outbox: Outbox::default(),
            round_trip: RoundTrip::default(),
            undo: Undo::default(),
            admission,
            local_handoff_limit,
            barging_window,
            tasks,
        })
    }

    /// Whether the pool belongs to a process that this one was forked from.
    pub(crate) fn is_inherited(&self) -> bool {
        self.registry.is_inherited()
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        static UNNAMED: Lazy<Arc<str>> = Lazy::new(|| Arc::from("unnamed"));
        self.name.get().unwrap_or(&UNNAMED)
    }

    /// The first name stays.
    pub(crate) fn christen(&self, name: &str) {
        let _ = self.name.set(Arc::from(name));
    }

    /// The least time that one claim is given, however short the caller's wait is: what one takes by experience, and
    /// all the request_timeout that there is while there is none.
    pub(crate) fn least(&self) -> Duration {
        const LEAST: Duration = Duration::from_millis(250);
        let limit = self.round_trip.limit().unwrap_or(self.request_timeout);
        limit.max(LEAST).min(self.request_timeout)
    }

    /// How long a claim or a release may take at the store. A paced store gives up by itself what is silent, and is not cut off
    /// while it gets answers.
    pub(crate) fn request_patience(&self) -> Duration {
        let times = if self.admission.is_some() { 4 } else { 1 };
        self.request_timeout.saturating_mul(times)
    }

    /// Waits until the store has time for so many claims more; `None` at once for a store that has always.
    /// Dropped meanwhile it gives up its place.
    pub(crate) async fn admit(&self, claims: usize) -> Option<Permit> {
        match &self.admission {
            Some(admission) => admission.admit(claims).await,
            None => None,
        }
    }

    /// Runs `work` to its end, whatever becomes of the caller: on the driver, or, where the store
    /// answers at once, as far as it gets on this thread.
    pub(crate) fn run(&self, work: impl Future<Output = ()> + Send + 'static) {
        if self.store.capabilities().local {
            self.driver.begin(work);
        } else {
            self.driver.spawn(work);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.is_inherited() {
            // Its connections, and the tasks that this would wake, are the parent's.
            let kept = (self.store.clone(), self.driver.clone(), self.registry.clone());
            Box::leak(Box::new((kept, self.queue.clone(), self.watchdog.clone())));
            return;
        }
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockPool")
            .field("name", self.name())
            .field("key_prefix", &self.key_prefix)
            .field("defaults", &self.defaults)
            .finish_non_exhaustive()
    }
}
