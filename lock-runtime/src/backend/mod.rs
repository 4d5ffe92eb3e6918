//! The interface between a pool and a lock store.
//!
//! A program brings a store of its own with [`Backend`] and [`LockPool::with_backend`](crate::LockPool::with_backend);
//! [Testing](crate::guide::testing) says how, and how to test it. A store of this crate is a file or folder here, with its
//! URL scheme in `connect.rs`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

pub use crate::base::backend_error::{BackendError, FailureKind, Warning};
use crate::base::fence::Fence;
pub use crate::base::finding::{Finding, Verdict};
pub use crate::base::inspection::{Inspection, LockHolder, WaitingOwner};
use crate::base::key::Key;
pub use crate::base::key_pattern::{KeyList, KeyPattern};
use crate::base::lock_spec::LockSpec;
pub use crate::base::owner::Owner;
pub use crate::base::owner_info::OwnerInfo;
use crate::base::owner_info::OwnerLabel;
pub use crate::base::owner_tag::OwnerTag;
use crate::exec::foreground::ForegroundPlace;

#[cfg(feature = "_remote")]
mod address_race;
#[cfg(feature = "_remote")]
mod backoff;
#[cfg(any(feature = "redis", feature = "_sql"))]
mod clock_distance;
mod connect;
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod coordination;
pub(crate) mod credentials;
mod dyn_backend;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "_remote")]
mod first_ended;
#[cfg(feature = "metrics")]
pub(crate) mod measured;
pub(crate) mod memory;
#[cfg(feature = "mysql")]
mod mysql;
pub(crate) mod notifier;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "_remote")]
mod queue_events;
#[cfg(feature = "_remote")]
mod race;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "_sql")]
mod sql;
#[cfg(feature = "_tls")]
mod tls;
#[cfg(feature = "_remote")]
mod tls_files;
#[cfg(feature = "_remote")]
mod unclaimed_grants;
#[cfg(feature = "zookeeper")]
mod zookeeper;

#[cfg(feature = "_remote")]
pub(crate) use connect::Limits;
pub(crate) use connect::{BackendConfig, connect};
pub(crate) use dyn_backend::DynBackend;
#[cfg(feature = "testing")]
pub(crate) use dyn_backend::Opened;
pub use notifier::Notifier;

/// The maximum time that a store needs for each request of a large batch.
pub(crate) const TIME_PER_REQUEST: Duration = Duration::from_micros(50);

/// Fencing tokens for the later holders of a lock that lingers.
const LINGER_FENCES: u32 = 127;

/// A request to acquire a set of keys, all or none.
///
/// All attempts of an owner have the same keys, or one of them, see [`Capabilities::wait_queue`]. [`ttl`](Self::ttl),
/// [`min_hold`](Self::min_hold), [`fencing`](Self::fencing) and [`enqueue`](Self::enqueue) may differ: another waiter of the
/// process may continue. [`attempt`](Self::attempt) counts up, and [`extra_fences`](Self::extra_fences) may differ, too.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// The keys, sorted and without duplicates. Usually one.
    pub keys: Arc<[Key]>,
    /// The owner token. A request by the current owner succeeds again: the reply to an earlier attempt was lost.
    pub owner: Owner,
    /// The store forgets the grant after this time, unless it is renewed or kept for a `min_hold`. A repeated request by
    /// the current owner never shortens the grant: a late request may carry a shorter ttl.
    pub ttl: Duration,
    /// The minimum time that the keys stay locked, counted from the grant, even if the process ends. Only a release
    /// ends it earlier. Zero by default.
    pub min_hold: Duration,
    /// Whether the grant must come with a fencing token. `false` by default.
    pub fencing: bool,
    /// How many more fencing tokens to reserve, if the store can, for later holders in the same process. Zero by default.
    pub extra_fences: u32,
    /// The number of this attempt, starting at 0.
    pub attempt: u32,
    /// Whether the store may put the owner into its wait queue if the lock is held. An owner in the queue is
    /// released like a holder, even if it was never granted the lock. `false` by default.
    pub enqueue: bool,
    /// What the request says about its owner.
    pub(crate) label: OwnerLabel,
}

impl AcquireRequest {
    /// A first attempt without a fencing token, a `min_hold` or a place in the wait queue.
    #[must_use]
    pub fn new(keys: impl Into<Arc<[Key]>>, owner: Owner, ttl: Duration) -> Self {
        Self {
            keys: keys.into(),
            owner,
            ttl,
            min_hold: Duration::ZERO,
            fencing: false,
            extra_fences: 0,
            attempt: 0,
            enqueue: false,
            label: OwnerLabel::default(),
        }
    }

    /// The first attempt of `owner` for all keys of `spec`.
    pub(crate) fn for_owner(spec: &LockSpec, owner: Owner) -> Self {
        let policy = &spec.policy;
        Self {
            keys: spec.store_keys.clone(),
            owner,
            ttl: policy.ttl.stored(),
            min_hold: policy.min_hold,
            fencing: policy.fencing,
            extra_fences: if policy.fencing && !policy.linger.is_zero() {
                LINGER_FENCES
            } else {
                0
            },
            attempt: 0,
            enqueue: spec.single_key().is_some() && policy.waits(),
            label: spec.owner_label(),
        }
    }

    /// The process and the call of the owner, for [`LockHolder::info`]. `None` if the pool does not share them. A store may keep
    /// them with the grant; no request compares them.
    #[must_use]
    pub fn owner_info(&self) -> Option<OwnerInfo> {
        self.label.info()
    }

    /// How long the store keeps the grant without any further request: the longer of [`ttl`](Self::ttl) and
    /// [`min_hold`](Self::min_hold).
    #[must_use]
    pub fn kept_for(&self) -> Duration {
        self.ttl.max(self.min_hold)
    }

    /// The lease that a grant of this request creates.
    #[must_use]
    pub fn lease(&self) -> LeaseRef {
        LeaseRef {
            min_hold: self.min_hold,
            ..LeaseRef::new(self.keys.clone(), self.owner, self.ttl)
        }
    }
}

/// A grant, as the store knows it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeaseRef {
    /// The keys of the request.
    pub keys: Arc<[Key]>,
    /// The owner of the request.
    pub owner: Owner,
    /// The duration that a renewal extends the lease to.
    pub ttl: Duration,
    /// What is left of the request's `min_hold`. A renewal keeps the keys locked for at least this time.
    pub min_hold: Duration,
}

impl LeaseRef {
    /// A lease without a `min_hold`.
    #[must_use]
    pub fn new(keys: impl Into<Arc<[Key]>>, owner: Owner, ttl: Duration) -> Self {
        Self { keys: keys.into(), owner, ttl, min_hold: Duration::ZERO }
    }

    /// How long a release reserves a key for the head of its wait queue. This is the longest time for which a process that is
    /// frozen at that moment delays the other waiters.
    #[cfg(any(feature = "redis", feature = "_sql"))]
    pub(crate) fn reservation_time(&self) -> Duration {
        (self.ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(1)).min(self.ttl)
    }

    /// How long the store keeps a renewed lease without any further request: the longer of [`ttl`](Self::ttl) and
    /// [`min_hold`](Self::min_hold).
    #[must_use]
    pub fn kept_for(&self) -> Duration {
        self.ttl.max(self.min_hold)
    }
}

/// The end of a grant, or of a place in the store's wait queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// The lease that ends.
    pub lease: LeaseRef,
    /// Keep the keys locked for this much longer. Zero frees them immediately. A lease that has expired is not extended.
    pub free_after: Duration,
    /// The next owner in the same process. A store with a wait queue appends that owner in the same step.
    pub successor: Option<Successor>,
    /// How long the keys stay free before the head of the wait queue is notified, for clients outside the queue.
    /// Zero notifies immediately. Not combined with `free_after` or a successor.
    pub barging_window: Duration,
    /// For a release by force: the holder as returned by [`Backend::inspect`]. That holder does not know of the release. Its
    /// next renewal has to find that the lease is not held. `None` by default.
    pub forced: Option<Box<LockHolder>>,
}

impl ReleaseRequest {
    /// Frees `lease` immediately, for the next owner in the store's wait queue.
    #[must_use]
    pub fn new(lease: LeaseRef) -> Self {
        Self {
            lease,
            free_after: Duration::ZERO,
            successor: None,
            barging_window: Duration::ZERO,
            forced: None,
        }
    }

    /// Takes `key` from `holder`, as returned by [`Backend::inspect`]. `None` if its owner token is not known.
    pub(crate) fn by_force(key: Key, holder: LockHolder) -> Option<Self> {
        /// The ttl of the grant is unknown. A store uses the ttl for times that depend on how long an owner blocks others.
        const USUAL_TTL: Duration = Duration::from_secs(10);
        let ttl = holder.expires_in.unwrap_or(USUAL_TTL).max(USUAL_TTL);
        let lease = LeaseRef::new([key], holder.token()?, ttl);
        Some(Self { forced: Some(Box::new(holder)), ..Self::new(lease) })
    }
}

/// The next owner in the same process.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Successor {
    /// Its owner token.
    pub owner: Owner,
    /// The ttl of its request.
    pub ttl: Duration,
    /// What its request says about it.
    pub(crate) label: OwnerLabel,
}

impl Successor {
    /// An owner that requests the lock for `ttl`.
    #[must_use]
    pub const fn new(owner: Owner, ttl: Duration) -> Self {
        Self { owner, ttl, label: OwnerLabel::EMPTY }
    }

    /// `owner`, which requests the lock of `spec`.
    pub(crate) fn for_owner(spec: &LockSpec, owner: Owner) -> Self {
        Self { owner, ttl: spec.policy.ttl.stored(), label: spec.owner_label() }
    }

    /// The process and the call of the owner, as in [`AcquireRequest::owner_info`].
    #[must_use]
    pub fn owner_info(&self) -> Option<OwnerInfo> {
        self.label.info()
    }
}

/// The answer to an [`AcquireRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireOutcome {
    /// The owner holds all keys for the whole ttl and `min_hold`, counted from a moment before the request, or later by
    /// `prepared_in`.
    #[non_exhaustive]
    Acquired {
        /// Greater than every fencing token issued earlier for any of the keys. `None` if none was requested.
        fence: Option<Fence>,
        /// How many of the numbers that follow `fence` are reserved for this process.
        reserved_fences: u32,
        /// Whether other owners wait for the keys, if the store can tell. A store that answers `false` calls
        /// [`Notifier::contended`] when that changes.
        contended: Option<bool>,
        /// The time that the store spent before it sent what the grant rests on, such as the time to open a session. The ttl
        /// counts from then on. Zero at most stores.
        prepared_in: Duration,
    },
    /// Another owner holds at least one key, and nothing was taken.
    #[non_exhaustive]
    Contended {
        /// The time until the current grant expires unless it is renewed. `None` if the store cannot tell.
        expires_in: Option<Duration>,
        /// How the owner learns that another request may succeed.
        wait_mode: WaitMode,
    },
}

impl AcquireOutcome {
    /// A grant by a store that does not know whether other owners wait.
    #[must_use]
    pub const fn acquired(fence: Option<Fence>) -> Self {
        let prepared_in = Duration::ZERO;
        Self::Acquired { fence, reserved_fences: 0, contended: None, prepared_in }
    }

    /// This grant, with the `count` numbers after its fence reserved. A refusal stays unchanged.
    #[must_use]
    pub const fn with_reserved_fences(mut self, count: u32) -> Self {
        if let Self::Acquired { reserved_fences, .. } = &mut self {
            *reserved_fences = count;
        }
        self
    }

    /// This grant, by a store that knows whether other owners wait. A refusal stays unchanged.
    #[must_use]
    pub const fn with_contended(mut self, waits: bool) -> Self {
        if let Self::Acquired { contended, .. } = &mut self {
            *contended = Some(waits);
        }
        self
    }

    /// This grant, which rests on a message that was sent at least `time` after the request reached the store's code. A refusal
    /// stays unchanged.
    #[must_use]
    pub const fn with_prepared_in(mut self, time: Duration) -> Self {
        if let Self::Acquired { prepared_in, .. } = &mut self {
            *prepared_in = time;
        }
        self
    }

    /// A refusal by a store that sends no notifications.
    #[must_use]
    pub const fn contended(expires_in: Option<Duration>) -> Self {
        Self::Contended { expires_in, wait_mode: WaitMode::Poll }
    }

    /// A refusal, and how the owner learns of a change.
    #[must_use]
    pub const fn contended_until(expires_in: Option<Duration>, wait_mode: WaitMode) -> Self {
        Self::Contended { expires_in, wait_mode }
    }
}

/// How the owner of a refused request learns that another request may succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitMode {
    /// Not at all: the pool repeats the request after a pause.
    Poll,
    /// By [`Notifier::key_changed`].
    Watch {
        /// The time within which to repeat the request. The pool waits no longer, and does not look at `expires_in`: a store
        /// that does not notify the end of a ttl answers with no more than what is left of it. Zero if the answer was
        /// incomplete: an immediate repetition gets the complete answer.
        retry_after: Duration,
    },
    /// By [`Notifier::head_of_queue`]: the owner is in the store's wait queue until it is released.
    Queued {
        /// The time within which to repeat the request, to keep the position.
        retry_after: Duration,
    },
}

/// Whether the store has a lease for its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseStatus {
    /// It has the lease, and has done what was requested.
    Held,
    /// It does not have the lease, which was taken or deleted, or has expired. Leases of other owners are unchanged.
    NotHeld,
}

impl LeaseStatus {
    pub(crate) const fn of(is_held: bool) -> Self {
        if is_held { Self::Held } else { Self::NotHeld }
    }
}

/// The answer to a [`ReleaseRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// The keys belonged to the owner. They are free, or granted to the head of the store's wait queue. A named
    /// successor has to send its own request.
    Freed,
    /// As [`Freed`](Self::Freed), and the successor is in the store's wait queue.
    #[non_exhaustive]
    SuccessorQueued {
        /// The time within which the successor has to send a request, to keep its position.
        retry_after: Duration,
    },
    /// The keys belonged to the owner, and no owner was waiting. They are granted to the successor, which
    /// immediately confirms with its own request.
    SuccessorGranted,
    /// At least one key did not belong to the owner. The keys that did are free. Leases of other owners are unchanged.
    NotHeld,
}

impl ReleaseOutcome {
    /// [`SuccessorQueued`](Self::SuccessorQueued), with the time for the successor's request.
    #[must_use]
    pub const fn successor_queued(retry_after: Duration) -> Self {
        Self::SuccessorQueued { retry_after }
    }
}

/// What a store can do beyond leases, and what it needs from the pool.
///
/// ```
/// use lock_runtime::backend::Capabilities;
///
/// let mut capabilities = Capabilities::default();
/// assert!(capabilities.fencing);
/// capabilities.local = true;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Calls complete on their first poll, without I/O. The pool then makes them on the caller's thread.
    /// `false` by default.
    pub local: bool,
    /// Grants come with fencing tokens if the request asks for one. `true` by default.
    pub fencing: bool,
    /// A request with [`enqueue`](AcquireRequest::enqueue) for one held key puts its owner into a wait queue of the store.
    /// `false` by default.
    ///
    /// An acquire of several keys then takes them one by one, under one owner and through the queue of each key.
    /// After that it requests all of them. A release of all of them has to free each key that belongs to the owner.
    /// Whatever its answer, it has to remove the owner from the queue of each key.
    pub wait_queue: bool,
    /// Whether the pool may pass a lease on within the process, or let it linger, without a request. A store that has to know of
    /// every holder answers `false`. `true` by default.
    pub local_handoff: bool,
    /// A late answer is of no use, so the pool limits the acquires in flight to as many as are answered promptly.
    /// Further acquires wait in the process, in FIFO order. `false` by default.
    pub paced: bool,
    /// How many acquires may be in flight in any case, at a store that is `paced`. One that sends and answers them in batches needs
    /// twice as many as fit into a batch: the next batch fills while one is answered. 128 by default, which is the least.
    pub least_in_flight: usize,
    /// How many leases one call of [`renew`](Backend::renew) has at most. A call is answered as a whole. So a store that needs
    /// several round trips for more leases confirms the first ones earlier in calls of their own. Unlimited by default.
    pub most_renewals: usize,
    /// A renewal restores a lock that the store has lost. So it may restore a lock that was released before the renewal
    /// arrives. The pool then repeats the release of a lease with an unanswered renewal. `false` by default.
    pub renewal_restores: bool,
    /// Each server of the store may apply its part of an unanswered acquire at another time. So a release that ends a grant
    /// does not tell that no other part follows. The pool then repeats the release until the ttl is over.
    /// `false` by default.
    pub applied_in_parts: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            local: false,
            fencing: true,
            wait_queue: false,
            local_handoff: true,
            paced: false,
            least_in_flight: 128,
            most_renewals: usize::MAX,
            renewal_restores: false,
            applied_in_parts: false,
        }
    }
}

/// A store that keeps leases.
///
/// There are two families of implementations. A lease by ttl is a key with an expiry. A lease by session is a node
/// that lives while a connection does; its renewal asks whether the session is alive.
///
/// Acquires, renewals and releases come in batches. Entries are independent, and outcomes are in input order. The entries
/// of one call reached the driver together, so they can be sent in one write.
///
/// A returned future may be dropped at any await, because the pool limits the time of each call. The request may still
/// have been applied. So `acquire` is idempotent per owner, and `renew` and `release` compare the owner. Futures run
/// within the runtime context of the pool's driver, and mostly on its thread. An acquire or a release may be polled on
/// another thread, first on that of its caller.
///
/// A panic counts as a request without an answer ([`FailureKind::MaybeApplied`]), and the request is repeated. A call
/// that blocks its thread delays all renewals of the pool.
pub trait Backend: Send + Sync + 'static {
    /// What the store can do. `wait_queue` is read when it is needed, and may depend on the connection. The others are read once,
    /// when the pool starts; `fencing` by the suite `testing::conformance`, and for the text of a rejection.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// A place on the connection of `caller`, the runtime of this thread, if requests of callers take one.
    #[doc(hidden)]
    fn foreground(&self, caller: &tokio::runtime::Handle) -> Option<ForegroundPlace> {
        let _ = caller;
        None
    }

    /// Receives the pool's notifier. Called once, before any other call except
    /// [`capabilities`](Self::capabilities). Waiters poll if a store does not use it. `tokio::spawn` starts a task on the driver
    /// here, which does not end with the runtime that connects.
    fn subscribe(&self, notifier: Notifier) {
        let _ = notifier;
    }

    /// Tries once to acquire all keys of each request.
    fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> impl Future<Output = Vec<Result<AcquireOutcome, BackendError>>> + Send;

    /// Extends each lease to its ttl from now, or to what is left of its `min_hold` if that is longer.
    fn renew(
        &self,
        leases: &[LeaseRef],
    ) -> impl Future<Output = Vec<Result<LeaseStatus, BackendError>>> + Send;

    /// Ends each lease.
    fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> impl Future<Output = Vec<Result<ReleaseOutcome, BackendError>>> + Send;

    /// Reads whether the lease belongs to its owner. Changes nothing.
    fn is_held(
        &self,
        lease: &LeaseRef,
    ) -> impl Future<Output = Result<LeaseStatus, BackendError>> + Send;

    /// The statement of [`LockGuard::pin_sql`](crate::LockGuard::pin_sql) for a grant of all `keys` with `fence`, if the store is
    /// a database that has one. `None` by default.
    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String> {
        let _ = (keys, fence);
        None
    }

    /// Reads the holder of `key` and its wait queue. Nothing is created, extended or notified. The key is as the store knows
    /// it, with the pool's prefix. `None`, the default, if the store cannot tell.
    ///
    /// A key that other owners cannot acquire is held, whatever has taken it.
    ///
    /// ```
    /// # use lock_runtime::backend::{Inspection, LockHolder, Owner};
    /// # use std::time::Duration;
    /// # let stored = b"0123456789abcdef0123456789abcdef";
    /// // `None` for the token of another client.
    /// let owner = Owner::from_bytes(stored);
    /// let holder = LockHolder::new(owner.map(|owner| owner.tag())).with_token(owner); // for releases by force
    /// let holder = holder.with_expiry(Some(Duration::from_secs(3)));
    /// let answer = Inspection::new(Some(holder)); // `Inspection::new(None)` for a free key
    /// # assert!(!answer.is_free());
    /// ```
    fn inspect(
        &self,
        key: &Key,
    ) -> impl Future<Output = Result<Option<Inspection>, BackendError>> + Send {
        let _ = key;
        async { Ok(None) }
    }

    /// Reads the keys of matching locks, at most `limit`. Changes nothing, and sends no request that blocks the store for long. A
    /// free key may be among them. `None`, the default, if the store cannot tell.
    fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> impl Future<Output = Result<Option<KeyList>, BackendError>> + Send {
        let _ = (pattern, limit);
        async { Ok(None) }
    }

    /// Calls `changed` when locks that match `pattern` may have changed. The first call comes when the watch has begun. Each
    /// later change leads to a call within milliseconds. A call without a change does no harm. Runs until it is dropped, and
    /// fails when the store ends the watch. The default returns `Ok` immediately: the store does not report changes.
    ///
    /// `changed` does not block.
    fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> impl Future<Output = Result<(), BackendError>> + Send {
        let _ = (pattern, changed);
        async { Ok(()) }
    }

    /// Reads whether the store can serve, and what could make it lose locks.
    fn health(&self) -> impl Future<Output = Result<Vec<Warning>, BackendError>> + Send;

    /// All checks of the store with their verdicts, including the good ones. Defaults to the warnings of
    /// [`health`](Self::health).
    fn diagnose(&self) -> impl Future<Output = Result<Vec<Finding>, BackendError>> + Send {
        async {
            let warnings = self.health().await?;
            if warnings.is_empty() {
                return Ok(vec![Finding::good("store", "nothing to warn about")]);
            }
            Ok(warnings.iter().map(|warning| Finding::warning("store", warning)).collect())
        }
    }

    /// Whether the store answers. Called repeatedly after a failure, until the store answers. Defaults to
    /// [`health`](Self::health), which usually costs more.
    fn probe(&self) -> impl Future<Output = Result<(), BackendError>> + Send {
        async { self.health().await.map(drop) }
    }

    /// Closes connections. Later calls may fail. Does nothing by default.
    fn close(&self) -> impl Future<Output = ()> + Send {
        async {}
    }
}
