//! The programmatic API: builds a request for a lock, then sends it.

use std::future::{Future, IntoFuture};
use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::api::call_keys::CallKeys;
use crate::api::enter::{Entering, LockCall, enter};
use crate::api::guard::LockGuard;
use crate::api::locked_future::Fuse;
use crate::base::call_site::{CallOptions, LockLabel};
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::options::{LockOptions, OnLost, ReleaseMode, Renew, Wait};
use crate::lock::core::PoolCore;

/// A request for one or several locks, from [`LockPool::lock`](crate::LockPool::lock). Nothing is sent
/// before [`acquire`](Self::acquire) or `.await`, which is the same, [`try_acquire`](Self::try_acquire) or [`run`](Self::run).
///
/// ```
/// # use std::time::Duration;
/// # use lock_runtime::LockPool;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lock_runtime::LockError> {
/// let pool = LockPool::connect("memory://").await?;
/// let guard = pool.lock("order:42").ttl(Duration::from_secs(5)).acquire().await?;
/// assert!(guard.is_held());
/// assert!(pool.lock("order:42").try_acquire().await?.is_none());
/// guard.release().await?;
///
/// let guard = pool.lock("order:43").await?;
/// assert!(guard.is_held());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing is sent before `acquire` or `.await`, `try_acquire` or `run`"]
pub struct LockRequest {
    call: LockCall,
    options: LockOptions,
}

impl LockRequest {
    /// A request for `keys`, with a fence.
    #[track_caller]
    pub(crate) fn new(core: Arc<PoolCore>, keys: CallKeys) -> Self {
        let first = keys.first().cloned().unwrap_or(Key::from_static(""));
        let label = LockLabel::Key(first, Location::caller());
        let call = LockCall { core, label, keys: keys.checked(), shows_guard: true };
        Self { call, options: LockOptions::new().fencing(true) }
    }

    fn with(mut self, set: impl FnOnce(LockOptions) -> LockOptions) -> Self {
        self.options = set(self.options);
        self
    }

    /// The name of the lock in events, spans, metrics and errors. The attribute takes it from its `key`. It is the same for
    /// all keys of a kind, such as `order:<id>`. Without a template, errors have the key, and events, spans and metrics
    /// have `unnamed`.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let (pool, id) = (LockPool::connect("memory://").await?, 42);
    /// let guard = pool.lock(format!("order:{id}")).template("order:<id>").acquire().await?;
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn template(mut self, template: &'static str) -> Self {
        self.call.label = LockLabel::Template(template, Location::caller());
        self
    }

    /// How long the grant lasts without a renewal. Defaults to the pool's.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|options| options.ttl(ttl))
    }

    /// How long to wait, as a [`Duration`] or [`Wait::Forever`]; zero is one try. Defaults to the pool's.
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        self.with(|options| options.wait(wait.into()))
    }

    /// Whether the lease is renewed, or how often: from every 2 ms to every half of the ttl. Defaults to `true`, every
    /// third of the ttl.
    pub fn renew(self, renew: impl Into<Renew>) -> Self {
        self.with(|options| options.renew(renew.into()))
    }

    /// Ends the hold after this time, even if the lease could be renewed. At least 10 ms; with `renew(false)` at most the
    /// ttl. Defaults to no limit.
    pub fn max_hold(self, max_hold: Duration) -> Self {
        self.with(|options| options.max_hold(max_hold))
    }

    /// Keeps the lock for at least this long after the acquire. It stays even if it is released earlier, if the release is
    /// not confirmed, or if the process ends. At most 7 days, and no longer than [`max_hold`](Self::max_hold). Defaults to
    /// zero.
    pub fn min_hold(self, min_hold: Duration) -> Self {
        self.with(|options| options.min_hold(min_hold))
    }

    /// Keeps the keys locked for this long after the ttl of a lease that was lost (Chubby's lock-delay). Late writes of its
    /// holder come to an end before the next grant. A release frees the keys immediately, whatever the delay. At most a
    /// minute. Defaults to zero.
    ///
    /// A holder that is stopped for longer than ttl and delay can still write late: a [fence](crate::Fence) refuses that.
    pub fn lock_delay(self, lock_delay: Duration) -> Self {
        self.with(|options| options.lock_delay(lock_delay))
    }

    /// Keeps the lock for this long after the hold, for the next call of this process. That call takes the lock without a
    /// request to the store, with its own fence. The lock is released at the end of that time. It is released immediately
    /// when another process waits for it. The same applies when a call of this process cannot take it over (another ttl or
    /// renewal interval). For one key only, at most a minute. Not together with [`max_hold`](Self::max_hold),
    /// [`min_hold`](Self::min_hold) and `renew(false)`. Defaults to the pool's, zero.
    ///
    /// It is for calls that reach the same process again and again: handlers that are routed by key, consumers with
    /// partitions. Clients that do not queue (one attempt, other libraries, all on a store without a wait queue) find the lock
    /// held until the linger ends. A store without a wait queue, such as `redlock://`, cannot tell whether others wait. There
    /// the lock lingers only after holds that begin within the linger after the grant, or within `local_handoff_limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let pool = lock_runtime::LockPool::connect("memory://").await?;
    /// for _ in 0..3 {
    ///     // One grant of the store for all three.
    ///     pool.lock("partition:7").linger(Duration::from_millis(50)).run(async {}).await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn linger(self, linger: Duration) -> Self {
        self.with(|options| options.linger(linger))
    }

    /// Whether the grant comes with a fencing token. Defaults to `true`.
    pub fn fencing(self, fencing: bool) -> Self {
        self.with(|options| options.fencing(fencing))
    }

    /// Whether the result of [`run`](Self::run) waits for the release. Defaults to
    /// [`ReleaseMode::Awaited`].
    pub fn release(self, release: ReleaseMode) -> Self {
        self.with(|options| options.release(release))
    }

    /// What [`run`](Self::run) does with its body when the lock is lost. Defaults to [`OnLost::Cancel`].
    pub fn on_lost(self, on_lost: OnLost) -> Self {
        self.with(|options| options.on_lost(on_lost))
    }

    /// Whether a call under a lock that its task holds passes through, instead of [`ErrorKind::WouldDeadlock`]. Annotated
    /// bodies and bodies of [`run`](Self::run) around this call in the same task count; guards do not. Defaults to `false`.
    ///
    /// A body that passes through runs on the lease of the outer lock. Every poll checks that the task is inside the body
    /// that holds the lock, and that the lock is held. Otherwise the call ends with [`ErrorKind::Lost`];
    /// [`on_lost`](Self::on_lost) applies only to a loss. A separate tokio task does not pass through, even in a
    /// `LocalSet`. Futures that the body polls itself, and those of other executors, count as the body.
    ///
    /// | option | of a call that passes through |
    /// |---|---|
    /// | [`ttl`](Self::ttl), `renew(true)` | those of the outer lock stay |
    /// | [`wait`](Self::wait), [`retry_delay`](Self::retry_delay), [`retry_count`](Self::retry_count), [`release`](Self::release) | unused: there is no wait |
    /// | [`on_lost`](Self::on_lost) | honoured |
    /// | [`max_hold`](Self::max_hold), [`min_hold`](Self::min_hold), [`lock_delay`](Self::lock_delay), other values of [`renew`](Self::renew) | [`ErrorKind::Config`] together with `reentrant(true)`, even without an outer lock |
    /// | [`fencing(true)`](Self::fencing) | the fence of the outer lock; [`ErrorKind::Config`] from [`acquire`](Self::acquire) if that has none |
    pub fn reentrant(self, reentrant: bool) -> Self {
        self.with(|options| options.reentrant(reentrant))
    }

    /// How long to pause between two requests where the store sends no notifications. Defaults to the pool's.
    pub fn retry_delay(self, delay: Duration) -> Self {
        self.with(|options| options.retry_delay(delay))
    }

    /// How many requests may follow the first one. With zero the call does not wait. A wait behind another task of this
    /// process takes no requests, so that only [`wait`](Self::wait) ends it. Defaults to the pool's.
    pub fn retry_count(self, count: u32) -> Self {
        self.with(|options| options.retry_count(count))
    }

    /// Acquires the lock, and waits for it if it is held.
    ///
    /// Cancel safe: a dropped acquire leaves nothing behind, not even what the store may have granted.
    ///
    /// Wait and grant go on while the future is not polled. A grant that it does not pick up is released at the end of
    /// `wait`, but not before one ttl is over. Polled later, the future returns [`ErrorKind::Conflict`].
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if another owner held the lock until the wait ended, [`ErrorKind::Backend`] if the store
    /// does not answer, and the kinds for invalid calls.
    pub async fn acquire(self) -> Result<LockGuard, LockError> {
        match enter(self.call, CallOptions::Given(&self.options)).await?.into_guard() {
            Some(guard) => Ok(guard),
            None => Err(LockError::new(ErrorKind::Config, "the call was made without a lock")),
        }
    }

    /// Tries once. `None` if another owner holds the lock.
    ///
    /// The lock lasts as long as the guard: write `if let Some(_guard) = ..`. With `.is_some()` it is released before the block
    /// runs.
    ///
    /// Cancel safe, like [`acquire`](Self::acquire).
    ///
    /// # Errors
    /// Same as [`acquire`](Self::acquire), without [`ErrorKind::Conflict`].
    pub async fn try_acquire(self) -> Result<Option<LockGuard>, LockError> {
        match self.wait(Duration::ZERO).acquire().await {
            Ok(guard) => Ok(Some(guard)),
            Err(error) if error.is_conflict() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires the lock, runs `body` while it is held, and releases it: the attribute as a function.
    /// The body is dropped when the lock is lost.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// let pool = LockPool::connect("memory://").await?;
    /// let sum = pool.lock("sum").run(async { 1 + 1 }).await?;
    /// assert_eq!(sum, 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Same as [`acquire`](Self::acquire), and [`ErrorKind::Lost`] or [`ErrorKind::PoolClosed`] if the body was cancelled;
    /// [`LockError::progress`] tells whether it had begun.
    pub fn run<F: Future>(
        self,
        body: F,
    ) -> impl Future<Output = Result<F::Output, LockError>> + use<F> {
        // Not an `async fn`: it would have a second copy of the body.
        let call = LockCall { shows_guard: false, ..self.call };
        // The outer one drops the body when it is cancelled, and the guard, as the result is ready.
        Fuse::new(Entering::lazy(call, self.options).run(Fuse::new(body)))
    }
}

/// `pool.lock("order:42").await` is [`acquire`](LockRequest::acquire).
impl IntoFuture for LockRequest {
    type Output = Result<LockGuard, LockError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.acquire())
    }
}
