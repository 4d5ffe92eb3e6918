//! Pools: one store, its connections, and the locks of this process in it.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::api::call_keys::CallKeys;
use crate::api::request::LockRequest;
use crate::backend::credentials::{Credentials, Provider};
use crate::backend::{self, Backend, BackendConfig, DynBackend, LeaseRef, Warning};
use crate::base::clock::{Clock, TwoClocks};
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::key_rules::check_prefix;
use crate::base::lock_order::LockOrder;
use crate::base::options::{Defaults, LockOptions, OnOutage, TIMER, Wait};
use crate::base::policy::{Policy, SHORTEST_INTERVAL};
use crate::base::problem::{Problem, ProblemMap};
use crate::base::sequencer::Sequencer;
use crate::exec::driver::Driver;
use crate::lock::core::{BargingWindow, PoolConfig, PoolCore};
use crate::lock::shutdown::{ShutdownReport, shut_down};

/// A pool of locks in one store. Cheap to clone; all clones are the same pool.
///
/// A pool works from any task, thread and executor: its connections and timers live on a driver thread. They do not survive
/// a fork. In the child process an inherited pool returns [`ErrorKind::Config`], and an inherited guard is not held and
/// releases nothing. Connect a new pool there.
#[derive(Clone, Debug)]
pub struct LockPool(Arc<PoolCore>);

impl LockPool {
    /// Connects to the store at `url` with the default settings.
    ///
    /// | URL | store |
    /// |---|---|
    /// | `memory://`, `memory://name` | this process; all pools with the same name share a store |
    /// | `redis://host:6379/0` | one Redis or Valkey server, 6.2 or newer |
    /// | `redis+unix:///path` | the same over a Unix socket |
    /// | `redis+sentinel://host1,host2/service` | the master that Sentinel watches under that name |
    /// | `redis+cluster://host1,host2` | a Redis Cluster; some of its servers are enough |
    /// | `redlock://host1,host2,host3` | a majority of independent servers (Redlock), or of full URLs |
    /// | `mysql://host/database` | rows of a table of MySQL or MariaDB, with the feature `mysql` |
    /// | `postgres://host/database` | rows of a table, with the feature `postgres` |
    /// | `etcd://host1,host2,host3/path` | keys with a lease, with the feature `etcd` |
    /// | `zookeeper://host1,host2,host3/path` | ephemeral nodes, with the feature `zookeeper` |
    ///
    /// All Redis URLs take `user:password@` in front of the hosts, `rediss` for TLS, and `valkey` in place of `redis`.
    /// Parameters follow a `?`: `db`, `ca`, `cert` and `key`, `insecure`, `sentinel_user` and `sentinel_password`,
    /// `replicas`, `connect_timeout`, `scripts`. The guide explains each: `docs/redis.md`. Passwords and tokens that change
    /// come from [`PoolBuilder::credentials`].
    ///
    /// Scripts keep the locks in Redis. Where a server or proxy refuses scripts, plain commands keep them, without fences;
    /// [`health`](Self::health) warns of it. `?scripts=off` uses plain commands from the start, `?scripts=on` makes a
    /// refusal an error.
    ///
    /// Cancel safe. If the future is dropped, there is no pool, and connections that were begun are closed.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the URL is invalid, [`ErrorKind::Backend`] if the store is unreachable or refuses.
    pub async fn connect(url: &str) -> Result<Self, LockError> {
        Self::builder(url).connect().await
    }

    /// Settings for a pool on the store at `url`.
    pub fn builder(url: impl Into<String>) -> PoolBuilder {
        PoolBuilder {
            origin: StoreSource::Url(url.into()),
            key_prefix: String::new(),
            defaults: Defaults::default(),
            request_timeout: Duration::from_secs(1),
            connect_timeout: None,
            node_timeout: None,
            credentials: None,
            sentinel_credentials: None,
            max_waiters: 10_000,
            local_handoff_limit: Duration::from_millis(5),
            barging_window: None,
            on_outage: OnOutage::Wait,
            lock_order: None,
            problem: ProblemMap::default(),
            // tokio panics where a runtime has no I/O driver, and this would end the process.
            connection_per_runtime: cfg!(panic = "unwind"),
            drive: Drive::Background,
        }
    }

    /// Settings for a pool on a custom store.
    pub fn with_backend(backend: impl Backend) -> PoolBuilder {
        PoolBuilder { origin: StoreSource::Given(Arc::new(backend)), ..Self::builder("") }
    }

    /// A request for the lock of `key`.
    #[track_caller]
    pub fn lock(&self, key: impl Into<Key>) -> LockRequest {
        LockRequest::new(self.0.clone(), CallKeys::One(key.into()))
    }

    /// A request for the locks of all `keys`, all or nothing. The keys are sorted and de-duplicated, so two callers
    /// cannot wait for each other. A waiting request may block other waiters of some of the keys for 50 ms to 1.6 s. More
    /// than 128 keys are an [`ErrorKind::Config`](crate::ErrorKind::Config).
    #[track_caller]
    pub fn lock_all<I>(&self, keys: I) -> LockRequest
    where
        I: IntoIterator,
        I::Item: Into<Key>,
    {
        let keys = keys.into_iter().map(Into::into).collect();
        LockRequest::new(self.0.clone(), keys)
    }

    /// Asks the store whether the grant of `sequencer` still stands: no other owner has been granted any of its keys
    /// (Chubby's CheckSequencer). The receiver of a request calls it, with a pool on the same store and with the same prefix
    /// as the holder's.
    ///
    /// The answer holds at one instant; data that must not be written late also needs a comparison of
    /// [fences](Sequencer::fence) where it is written. A lock with a `min_hold`, and a lost one with a `lock_delay`, stands
    /// until the store frees its keys.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the grant is over, [`ErrorKind::Backend`] if the store does not answer,
    /// [`ErrorKind::InvalidKey`] if a key of the sequencer does not belong to this pool.
    pub async fn check(&self, sequencer: &Sequencer) -> Result<(), LockError> {
        let core = &self.0;
        if core.is_inherited() {
            return Err(LockError::inherited().in_pool(core.name()));
        }
        let located =
            |error: LockError| error.of_keys(sequencer.shared_keys()).in_pool(core.name());
        let prefix = &*core.config.key_prefix;
        for key in sequencer.keys() {
            key.check_reserved_text(prefix).map_err(located)?;
        }
        let keys: Vec<_> = sequencer.keys().iter().map(|key| key.prefixed(prefix)).collect();
        // A read takes no time of the lease.
        let lease = LeaseRef::new(keys, sequencer.owner(), Duration::ZERO);
        if core.is_held(lease).await.map_err(located)? {
            return Ok(());
        }
        let cause = "the lock of the request is no longer held by the sender of its sequencer";
        Err(located(LockError::new(ErrorKind::Lost, cause).remedy(
            "refuse the request; its sender has lost or released the lock, or uses another store or prefix",
        )))
    }

    /// Checks whether the store can serve, and reads its warnings. Cancel safe: nothing is changed.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if it does not answer, or cannot serve.
    pub async fn health(&self) -> Result<Health, LockError> {
        let (core, limit) = (self.0.clone(), self.0.config.request_timeout);
        let reading = async move {
            let began = core.clock().now();
            let warnings = core.backend().health().await?;
            Ok(Health { round_trip: core.clock().now().since(began), warnings })
        };
        self.core().ask(limit, reading).await.map_err(|error| error.in_pool(self.0.name()))
    }

    /// Shuts the pool down: rejects waiters and new acquires, and lets holders finish until `grace` is over. Then it
    /// cancels their bodies, releases everything and closes the connections. A key with a `min_hold` stays locked for what
    /// is left of it. A key with a `lock_delay` stays locked for the delay and the ttl if its holder goes on. A holder does
    /// so with a guard that is not dropped, or with `on_lost = "notify"`. After the grace period, the shutdown takes some
    /// round trips. A guard that is not dropped adds up to 500 ms. A body that blocks its thread, or an acquire without an
    /// answer, adds two request timeouts. Where the store does not answer, it takes up to six request timeouts (nine on
    /// `redlock://`, and on the other servers than Redis).
    ///
    /// In a process that was forked from the pool's process, it does nothing.
    ///
    /// Cancel safe: once polled, it completes in the background. A second call waits for the first one and reports zeros;
    /// it ends the grace period of the first one if its own ends earlier.
    pub async fn shutdown(&self, grace: Duration) -> ShutdownReport {
        if self.0.is_inherited() {
            return ShutdownReport::default();
        }
        let report = self.0.driver().run(shut_down(self.0.clone(), grace)).await;
        // Without its driver a pool holds nothing that could be released.
        report.unwrap_or_default()
    }

    pub(crate) fn core(&self) -> &Arc<PoolCore> {
        &self.0
    }

    pub(crate) fn into_core(self) -> Arc<PoolCore> {
        self.0
    }
}

/// Settings of a pool.
#[derive(Debug)]
#[must_use = "call `connect` to get the pool"]
pub struct PoolBuilder {
    origin: StoreSource,
    key_prefix: String,
    defaults: Defaults,
    request_timeout: Duration,
    connect_timeout: Option<Duration>,
    node_timeout: Option<Duration>,
    credentials: Option<Provider>,
    sentinel_credentials: Option<Provider>,
    max_waiters: usize,
    local_handoff_limit: Duration,
    barging_window: Option<BargingWindow>,
    on_outage: OnOutage,
    /// `None` for the default of the process.
    lock_order: Option<LockOrder>,
    problem: ProblemMap,
    connection_per_runtime: bool,
    drive: Drive,
}

enum StoreSource {
    Url(String),
    Given(Arc<dyn DynBackend>),
}

impl std::fmt::Debug for StoreSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may hold a password.
        f.write_str(match self {
            Self::Url(_) => "Url(..)",
            Self::Given(_) => "Given(..)",
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Drive {
    Background,
    CurrentRuntime,
}

impl PoolBuilder {
    /// Puts `key_prefix` in front of every key in the store. The default is no prefix. A prefix that contains
    /// `lock_runtime:`, or has more than 256 bytes, is [`ErrorKind::Config`]. Including the prefix, a key has at most 512
    /// bytes: the tail of a longer one is hashed.
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// How long a grant lasts without a renewal: the time that a crashed holder blocks other owners. Between 10 ms and
    /// 7 days. Defaults to 30 s.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.defaults.ttl = ttl;
        self
    }

    /// How long an acquire may wait, as a [`Duration`] or [`Wait::Forever`]. Defaults to 3 s.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.defaults.wait = wait.into();
        self
    }

    /// How many tasks of this process may wait for one key. A further one gets [`ErrorKind::QueueFull`]. Defaults to
    /// 10,000.
    pub fn max_waiters(mut self, max_waiters: usize) -> Self {
        self.max_waiters = max_waiters;
        self
    }

    /// How long this process hands a lock off among its own tasks while other processes wait for it. A hand-off sends no
    /// request to the store. Without waiters in other processes there is no limit. Zero sends a request every time. At most
    /// the pool's ttl. Defaults to 5 ms; about 25 round trips are a good value on a slow network.
    pub fn local_handoff_limit(mut self, limit: Duration) -> Self {
        self.local_handoff_limit = limit;
        self
    }

    /// Leaves a contended lock free for `length`, once per `interval`. Tasks and processes of this library queue for a
    /// contended lock, so it is never free for clients without a queue. Such clients are other libraries, users without
    /// channel permission, and requests for several keys with a `retry_count`. They are served in a window that is longer
    /// than their polling interval, at the cost of `length / interval` of the throughput. Off by default; 6 ms every 250 ms
    /// is a good start. The window is at least 1 ms long, and shorter than `interval`.
    pub fn barging_window(mut self, interval: Duration, length: Duration) -> Self {
        self.barging_window = Some(BargingWindow { interval, length });
        self
    }

    /// What an acquire does while the store is down. Defaults to [`OnOutage::Wait`].
    ///
    /// ```
    /// use lock_runtime::{LockPool, OnOutage};
    ///
    /// // A handler answers 503 in a millisecond instead of after its whole `wait`.
    /// let pool = LockPool::builder("redis://locks.example").on_outage(OnOutage::Fail);
    /// # drop(pool);
    /// ```
    pub fn on_outage(mut self, on_outage: OnOutage) -> Self {
        self.on_outage = on_outage;
        self
    }

    /// What the pool does about locks that are nested in opposite orders. Defaults to the environment variable `LOCK_ORDER`
    /// (`off`, `warn`, `panic`). Without it, the default is [`LockOrder::Warn`] in builds with debug assertions and
    /// [`LockOrder::Off`] in others. A lock of a pool with `Off` is never the requested lock of a nesting.
    ///
    /// ```
    /// use lock_runtime::{LockOrder, LockPool};
    ///
    /// let pool = LockPool::builder("memory://").lock_order(LockOrder::Panic);
    /// # drop(pool);
    /// ```
    pub fn lock_order(mut self, lock_order: LockOrder) -> Self {
        self.lock_order = Some(lock_order);
        self
    }

    /// Changes what HTTP clients learn about an error of this pool, if it is installed under a name. `change` receives the
    /// error and its usual [`Problem`].
    ///
    /// ```
    /// use lock_runtime::LockPool;
    ///
    /// let pool = LockPool::builder("memory://").problem(|error, mut problem| {
    ///     if error.is_conflict() {
    ///         problem.status = 423;
    ///         problem.title = "Locked".into();
    ///     }
    ///     problem
    /// });
    /// # drop(pool);
    /// ```
    pub fn problem(
        mut self,
        change: impl Fn(&LockError, Problem) -> Problem + Send + Sync + 'static,
    ) -> Self {
        self.problem = ProblemMap::new(change);
        self
    }

    /// The pause between two requests where the store sends no notifications: between a quarter and the whole of `delay`.
    /// Defaults to 20 ms, doubling up to 640 ms.
    pub fn retry_delay(mut self, delay: Duration) -> Self {
        self.defaults.retry_delay = Some(delay);
        self
    }

    /// How many requests may follow the first one. Defaults to as many as fit into the wait.
    pub fn retry_count(mut self, count: u32) -> Self {
        self.defaults.retry_count = Some(count);
        self
    }

    /// How long one request to the store may take before it counts as unanswered. Between 1 ms and 1 h. Defaults to 1 s.
    /// A renewal is then sent again, and a later answer still counts while the lease is valid.
    pub fn request_timeout(mut self, request_timeout: Duration) -> Self {
        self.request_timeout = request_timeout;
        self
    }

    /// When a lease is renewed for the first time, counted from its grant. Defaults to the interval between renewals, which
    /// is ttl/3 unless the lock says otherwise; a longer time counts as that interval.
    ///
    /// From the first renewal on, Redis immediately reports a key that is deleted or overwritten. This needs a connection
    /// with the right to client tracking. A deletion before that is found by the renewal. With 25 ms a holder learns of a
    /// `DEL` within 25 ms and a round trip. Locks that are held for less cost nothing. Longer holds cost one more request,
    /// which is shared with other renewals at that moment. On the other stores only the renewal itself finds a deletion,
    /// and locks without renewal have none.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use lock_runtime::{LockError, LockPool};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let url = "memory://";
    /// let pool = LockPool::builder(url).first_renewal(Duration::from_millis(25)).connect().await?;
    /// # drop(pool);
    /// # Ok(())
    /// # }
    /// ```
    pub fn first_renewal(mut self, after: Duration) -> Self {
        self.defaults.first_renewal = Some(after);
        self
    }

    /// How long a lock stays with this process after a hold, for its next call, like [`LockRequest::linger`]. It applies to
    /// locks of one key without `max_hold`, `min_hold` and `renew = false`; others are released immediately. At most a
    /// minute. Defaults to zero.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use lock_runtime::LockPool;
    /// let pool = LockPool::builder("memory://").linger(Duration::from_millis(50));
    /// # drop(pool);
    /// ```
    pub fn linger(mut self, linger: Duration) -> Self {
        self.defaults.linger = linger;
        self
    }

    /// The time limit for a new connection: name, socket, TLS, log-in and start-up checks, at most five round trips. It
    /// bounds [`connect`](Self::connect) and each reconnect. The first reconnect has four times the duration of the last
    /// connection, and at least the request timeout; later ones have more. `?connect_timeout=10s` in a URL takes precedence for
    /// that URL. Defaults to 5 s, or the [`request_timeout`](Self::request_timeout) if that is longer.
    ///
    /// With several servers of etcd or ZooKeeper it bounds the first connection as a whole. While one server does not
    /// answer, another is tried beside it. A server without a leader is tried again.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use lock_runtime::{LockError, LockPool};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// # let url = "memory://";
    /// let far_away = LockPool::builder(url).connect_timeout(Duration::from_secs(15));
    /// let pool = far_away.request_timeout(Duration::from_secs(4)).connect().await?;
    /// # drop(pool);
    /// # Ok(())
    /// # }
    /// ```
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = Some(limit);
        self
    }

    /// How long a node of a `redlock://` quorum may send no answer at all before it counts as silent. A vote that waits
    /// behind others at a node that answers is slow, not lost. A contended lock is decided without the silent nodes. If
    /// no vote went to another client, the missing votes are awaited up to the request timeout, unless this is set.
    /// Defaults to the usual time of the node, the retransmission timeout of RFC 6298 over its response times. It is at
    /// least a twentieth of the ttl, between 5 and 50 ms, and at most 1 s.
    pub fn node_timeout(mut self, limit: Duration) -> Self {
        self.node_timeout = Some(limit);
        self
    }

    /// Calls `provider` for user and password of each new connection to a server, including servers of a cluster or quorum,
    /// and masters behind Sentinel. It is for tokens that expire (IAM, Entra ID) and passwords that change at the server. A
    /// connection stays up until the server ends it.
    ///
    /// The provider runs on a thread of its own within the driver's tokio runtime, so it may block. Its time is part of the
    /// [`connect_timeout`](Self::connect_timeout). Connections at the same moment share one call. Its failure, and refused
    /// credentials, are [`ErrorKind::Backend`]; the next connection calls it again. A password in the URL as well is
    /// [`ErrorKind::Config`], and so is a store without a log-in.
    ///
    /// ```
    /// # async fn token_of_the_cloud() -> std::io::Result<String> { Ok(String::new()) }
    /// use lock_runtime::{Credentials, LockPool};
    ///
    /// let pool = LockPool::builder("rediss://locks.example:6380").credentials(|| async {
    ///     Ok::<_, std::io::Error>(Credentials::new("orders", token_of_the_cloud().await?))
    /// });
    /// assert!(format!("{pool:?}").contains("credentials"));
    /// ```
    pub fn credentials<F, A, E>(mut self, provider: F) -> Self
    where
        F: Fn() -> A + Send + Sync + 'static,
        A: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.credentials = Some(Provider::new(provider));
        self
    }

    /// Like [`credentials`](Self::credentials), for connections to sentinels, which have users of their own.
    pub fn sentinel_credentials<F, A, E>(mut self, provider: F) -> Self
    where
        F: Fn() -> A + Send + Sync + 'static,
        A: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.sentinel_credentials = Some(Provider::new(provider));
        self
    }

    /// The share of a ttl by which the clocks of this machine and of the store may differ over that time. The validity of a
    /// lease is shorter than the ttl by this share and 2 ms (Redlock's `CLOCK_DRIFT`). Between 0 and 0.25: a larger share
    /// leaves too little time to renew it. Defaults to 0.01.
    pub fn drift_factor(mut self, factor: f64) -> Self {
        self.defaults.drift_factor = factor;
        self
    }

    /// Whether a tokio runtime that uses the pool repeatedly gets a connection of its own. A lock that is the only one in
    /// progress then wakes no other thread. It costs the server a connection for each runtime. It applies to `redis://` and
    /// `redis+sentinel://`; other stores ignore it. A runtime without an I/O driver (`enable_all`) gets no connection:
    /// tokio prints the panic of the one attempt. Defaults to true, or to false in a program with `panic = "abort"`.
    pub fn connection_per_runtime(mut self, on: bool) -> Self {
        self.connection_per_runtime = on;
        self
    }

    /// Whether a grant identifies its process: by host name, process number, and file and line of the annotated function.
    /// [`LockPool::inspect`] shows this from any process ([`LockHolder::info`](crate::LockHolder::info)). With `false`,
    /// nothing about the host leaves the process. `LOCK_OWNER_INFO` sets it from the environment. Defaults to true.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// use lock_runtime::LockPool;
    ///
    /// let pool = LockPool::builder("memory://").owner_info(false).connect().await?;
    /// let guard = pool.lock("order:42").acquire().await?;
    /// assert_eq!(pool.inspect("order:42").await?.holder.unwrap().info, None);
    /// # guard.release().await
    /// # }
    /// ```
    pub fn owner_info(mut self, on: bool) -> Self {
        self.defaults.owner_info = on;
        self
    }

    /// Drives the pool from the tokio runtime that calls [`connect`](Self::connect), on that runtime's clock, instead of
    /// the driver thread. For deterministic tests under paused time. The pool must not outlive the runtime, and no lease is
    /// renewed while the runtime is blocked. Its clock does not count the time for which the machine is suspended.
    pub fn on_current_runtime(mut self) -> Self {
        self.drive = Drive::CurrentRuntime;
        self
    }

    /// Connects. As cancel safe as [`LockPool::connect`].
    ///
    /// # Errors
    /// Same as [`LockPool::connect`].
    pub async fn connect(self) -> Result<LockPool, LockError> {
        let (driver, clock) = match self.drive {
            Drive::Background if TwoClocks::is_paused() => return Err(on_paused_clock()),
            Drive::Background => (Driver::background()?, Clock::Boot),
            Drive::CurrentRuntime => (Driver::current()?, Clock::runtime()),
        };
        self.check()?;
        let lock_order = self.lock_order.map_or_else(LockOrder::of_process, Ok)?;
        let connect_timeout = self
            .connect_timeout
            .unwrap_or_else(|| self.request_timeout.max(Duration::from_secs(5)));
        let store = match self.origin {
            StoreSource::Url(url) => {
                let key_prefix = self.key_prefix.clone();
                let (request_timeout, node_timeout) = (self.request_timeout, self.node_timeout);
                let (credentials, of_sentinels) = (self.credentials, self.sentinel_credentials);
                let opened = async move {
                    let config = BackendConfig {
                        key_prefix: &key_prefix,
                        clock,
                        request_timeout,
                        connect_timeout,
                        node_timeout,
                        credentials: credentials.as_ref(),
                        sentinel_credentials: of_sentinels.as_ref(),
                    };
                    backend::connect(&url, config).await
                };
                driver.run(opened).await??
            }
            StoreSource::Given(_)
                if self.credentials.is_some() || self.sentinel_credentials.is_some() =>
            {
                return Err(LockError::new(
                    ErrorKind::Config,
                    "a custom store logs in on its own, without `.credentials(..)`",
                )
                .remedy("give the credentials to the store, and leave `.credentials(..)` out"));
            }
            StoreSource::Given(store) => store,
        };
        let config = PoolConfig {
            key_prefix: self.key_prefix.into(),
            defaults: self.defaults,
            request_timeout: self.request_timeout,
            max_waiters: self.max_waiters,
            local_handoff_limit: self.local_handoff_limit,
            barging_window: self.barging_window,
            on_outage: self.on_outage,
            lock_order,
            problem: self.problem,
            connection_per_runtime: self.connection_per_runtime,
            backend: store,
            clock,
            driver,
        };
        Ok(LockPool(PoolCore::start(config)))
    }
}

#[cold]
fn on_paused_clock() -> LockError {
    let cause =
        "the clock of this tokio runtime is paused, and the pool would run on the real clock";
    LockError::new(ErrorKind::Config, cause).remedy(
        "build the pool with `LockPool::builder(url).on_current_runtime().connect()`, so that waits and ttls follow the clock of the test; with a server, leave `start_paused` out",
    )
}

impl PoolBuilder {
    /// Settings that cannot work are an error here, not at the first call.
    pub(crate) fn check(&self) -> Result<(), LockError> {
        const LONGEST_PATIENCE: Duration = Duration::from_secs(60 * 60);
        let refused =
            |cause: String, remedy| Err(LockError::new(ErrorKind::Config, cause).remedy(remedy));
        check_prefix(&self.key_prefix)?;
        Policy::new(&LockOptions::new(), &self.defaults)?;
        let request_timeout = self.request_timeout;
        if !(TIMER..=LONGEST_PATIENCE).contains(&request_timeout) {
            return refused(
                format!("a request_timeout of {request_timeout:?} is not between 1 ms and 1 h"),
                "it is how long one request may take; write for example `.request_timeout(Duration::from_secs(1))`",
            );
        }
        if let Some(of_node) = self.node_timeout
            && !(TIMER..=request_timeout).contains(&of_node)
        {
            return refused(
                format!(
                    "a node_timeout of {of_node:?} is not between 1 ms and the request_timeout of {request_timeout:?}"
                ),
                "the vote of a node is part of a request; raise `request_timeout` too, or write about three round trips to the node",
            );
        }
        if let Some(limit) = self.connect_timeout
            && !(TIMER..=LONGEST_PATIENCE).contains(&limit)
        {
            return refused(
                format!("a connect_timeout of {limit:?} is not between 1 ms and 1 h"),
                "write for example `.connect_timeout(Duration::from_secs(5))`",
            );
        }
        if let Some(after) = self.defaults.first_renewal
            && after < SHORTEST_INTERVAL
        {
            return refused(
                format!("a first_renewal after {after:?} is sooner than renewals can be"),
                "write at least 2 ms, for example `.first_renewal(Duration::from_millis(25))`",
            );
        }
        let (slice, ttl) = (self.local_handoff_limit, self.defaults.ttl);
        if slice > ttl {
            return refused(
                format!(
                    "a local_handoff_limit of {slice:?} blocks other processes for longer than a crashed holder does, for its ttl of {ttl:?}"
                ),
                "write for example `.local_handoff_limit(Duration::from_millis(5))`",
            );
        }
        if let Some(BargingWindow { interval, length }) = self.barging_window
            && (length < TIMER || length >= interval)
        {
            return refused(
                format!(
                    "a barging_window of {length:?} every {interval:?} never begins, or never ends"
                ),
                "the window is at least 1 ms long, and shorter than the interval; write for example `.barging_window(Duration::from_millis(250), Duration::from_millis(6))`, or leave it out",
            );
        }
        Ok(())
    }
}

/// What a healthy store answered.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Health {
    /// How long the check took, there and back.
    pub round_trip: Duration,
    /// What could make the store lose locks, if anything.
    pub warnings: Vec<Warning>,
}
