//! What a store has to do to keep locks: one trait, one file or folder per store.
//!
//! A new store is one type that implements [`Backend`], its URL scheme in `connect`, and
//! one run of the conformance suite in `testing`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

pub use crate::backend::notifier::Bell;
use crate::base::fence::Fence;
use crate::base::key::Key;
pub use crate::base::owner::Owner;
use crate::exec::panic_boundary;

mod connect;
pub(crate) mod credentials;
pub(crate) mod memory;
pub(crate) mod notifier;
#[cfg(feature = "redis")]
pub(crate) mod redis;

#[cfg(feature = "redis")]
pub(crate) use connect::Limits;
pub(crate) use connect::{Setting, connect};

/// What one acquire asks for. The same for all of its attempts, but for `attempt`; who wants several keys may
/// ask for each of them alone before, see [`Backend::has_lines`].
#[derive(Clone, Debug)]
pub struct Claim {
    /// The keys, sorted and without duplicates; all of them or none. Usually one.
    pub keys: Arc<[Key]>,
    /// Who asks. An attempt by the present owner succeeds again: it is a retry whose reply got lost.
    pub owner: Owner,
    /// The store forgets the grant after this time, unless renewed or kept for a `min_hold`. Asked for again by the present owner it is
    /// never made shorter: a late request may be one for less time.
    pub ttl: Duration,
    /// How long the keys stay taken at least, counted from the grant, also if nothing comes of it any more: the
    /// process may end. Only a release ends that earlier. Zero where the caller asked for no `min_hold`.
    pub min_hold: Duration,
    /// Whether a fence must be minted with the grant.
    pub fencing: bool,
    /// How many fences more to set aside, if the store can, for those whom the process hands the lease
    /// on to.
    pub spare_fences: u32,
    /// Counts the attempts of this claim, from 0.
    pub attempt: u32,
    /// Whether the store may put the owner into its own line if the lock is busy. Who stands there is
    /// released like a holder, also if it never got the lock.
    pub in_line: bool,
}

impl Claim {
    /// How long the store keeps the grant if nothing else is said: the longer of [`ttl`](Self::ttl) and
    /// [`min_hold`](Self::min_hold).
    #[must_use]
    pub fn kept_for(&self) -> Duration {
        self.ttl.max(self.min_hold)
    }
}

/// A grant, as far as the store is concerned.
#[derive(Clone, Debug)]
pub struct LeaseRef {
    /// The keys of the claim.
    pub keys: Arc<[Key]>,
    /// The owner of the claim.
    pub owner: Owner,
    /// The length to renew to.
    pub ttl: Duration,
    /// What is left of the claim's `min_hold`: a renewal keeps the keys for as long at least.
    pub min_hold: Duration,
}

impl LeaseRef {
    /// How long the store keeps a renewed lease if nothing else is said: the longer of [`ttl`](Self::ttl) and
    /// [`min_hold`](Self::min_hold).
    #[must_use]
    pub fn kept_for(&self) -> Duration {
        self.ttl.max(self.min_hold)
    }
}

/// The end of a grant, or of a place in the store's line.
#[derive(Clone, Debug)]
pub struct Release {
    /// What is let go.
    pub lease: LeaseRef,
    /// Keep the keys taken for this long still. Zero frees them at once.
    pub keep_for: Duration,
    /// Who of the same process wants the key next. A store with a line puts it at the end, in the same step.
    pub successor: Option<Successor>,
    /// Leave the keys free for this long, for those who stand in no line, before somebody in line is called.
    /// Zero calls at once. Not together with `keep_for` or a successor.
    pub leave_open: Duration,
}

/// The next owner of the same process.
#[derive(Clone, Copy, Debug)]
pub struct Successor {
    /// Who asks.
    pub owner: Owner,
    /// For how long.
    pub ttl: Duration,
}

/// The answer to one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// All keys are the owner's now, for the whole ttl and `min_hold` counted from before the request.
    Granted {
        /// Greater than every fence given out for any of the keys before. `None` if none was asked for.
        fence: Option<Fence>,
        /// How many of the numbers that follow `fence` are set aside for this process too.
        spare_fences: u32,
        /// Whether others wait for the keys, if the store can tell. A store that says `false` rings
        /// [`Bell::wanted`] when that changes.
        wanted: Option<bool>,
    },
    /// At least one key is somebody else's, and nothing was taken.
    Busy {
        /// When the store will forget the present grant, if it is not renewed and the store can tell.
        free_in: Option<Duration>,
        /// How the owner learns that it is worth asking again.
        standing: Standing,
    },
}

impl Attempt {
    /// A grant by a store that knows nothing about others.
    #[must_use]
    pub const fn granted(fence: Option<Fence>) -> Self {
        Self::Granted { fence, spare_fences: 0, wanted: None }
    }

    /// A refusal by a store that tells nobody when it changes.
    #[must_use]
    pub const fn busy(free_in: Option<Duration>) -> Self {
        Self::Busy { free_in, standing: Standing::Outside }
    }
}

/// Where a claim stands that found its lock busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The store tells nothing: the pool asks again after a while.
    Outside,
    /// The store rings [`Bell::changed`] when a key may be free.
    Watching {
        /// When to ask again at the latest. Zero if the answer was a short one: asking at once again
        /// gives the full one.
        ask_again: Duration,
    },
    /// The owner stands in the store's own line, which rings [`Bell::called`], until it is released.
    InLine {
        /// When to ask again at the latest, to keep the place.
        ask_again: Duration,
    },
}

/// Whether a lease is still in the store under its owner's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It was, and what was asked has been done.
    Yes,
    /// It was not: expired, deleted or taken. Nothing was changed that is somebody else's.
    No,
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// The keys were the owner's, and are free or the next one's in the store's line. A successor that
    /// was named has to ask for itself.
    Yes,
    /// As [`Yes`](Self::Yes), and the successor stands in the store's line.
    Behind {
        /// When the successor has to ask at the latest, to keep the place.
        ask_again: Duration,
    },
    /// The keys were the owner's, nobody waited, and now they are the successor's, who asks at once to
    /// have it confirmed.
    Kept,
    /// At least one key was not the owner's. Nothing was changed that is somebody else's.
    No,
}

/// Something about a store that serves, which can make it lose locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    text: String,
    remedy: &'static str,
}

impl Warning {
    /// What is the matter, and what to do about it.
    #[must_use]
    pub fn new(text: impl Into<String>, remedy: &'static str) -> Self {
        Self { text: text.into(), remedy }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.text, self.remedy)
    }
}

/// A store that keeps locks.
///
/// Implementations serve either family: leases by ttl (a key with an expiry) and leases by session (a
/// node that lives while a connection does, where renewing means asking whether the session lives).
///
/// Every future may be dropped at any await: the caller bounds each call in time and drops it. The
/// request may have been applied all the same; that is why attempts are idempotent per owner and
/// renewals and releases compare the owner. All futures run on the pool's driver, but for the first poll of an
/// acquire or a release, which may be on the thread of a caller, in the context of the driver's runtime.
///
/// A panic counts as a request without an answer ([`Failure::Unknown`]), and the request is repeated. A call that
/// blocks its thread keeps the pool's renewals waiting.
///
/// What reaches the driver together is given to the store together, so that it can leave in one write.
/// The entries of one call have nothing to do with each other: one outcome each, in order.
pub trait Backend: Send + Sync + 'static {
    /// Takes note of where to tell what happens to keys. Called once, before any other call. A store
    /// that cannot tell leaves it alone, and waiters have to poll.
    fn attach(&self, bell: Bell) {
        let _ = bell;
    }

    /// Tries once to take all keys of each of `claims`.
    fn acquire(
        &self,
        claims: &[Claim],
    ) -> impl Future<Output = Vec<Result<Attempt, BackendError>>> + Send;

    /// Extends each lease to its ttl from now, or to what is left of its `min_hold` if that is longer.
    fn renew(
        &self,
        leases: &[LeaseRef],
    ) -> impl Future<Output = Vec<Result<Held, BackendError>>> + Send;

    /// Frees each lease.
    fn release(
        &self,
        releases: &[Release],
    ) -> impl Future<Output = Vec<Result<Released, BackendError>>> + Send;

    /// Asks whether the lease is still its owner's, without changing anything.
    fn holds(&self, lease: &LeaseRef) -> impl Future<Output = Result<Held, BackendError>> + Send;

    /// Whether calls finish at once, without I/O; they are then made on the caller's own thread.
    fn in_place(&self) -> bool {
        false
    }

    /// Whether a claim of one key that is `in_line` comes to stand in a line of the store's own when the key is
    /// busy. Where it does, who waits for several keys takes them one after the other, under one owner and in the
    /// line of each, before it asks for all of them. A release of all of them then has to free each that is the
    /// owner's and to leave the line of each, whatever it answers. No by default.
    fn has_lines(&self) -> bool {
        false
    }

    /// Whether claims are kept back that the store has no time for. The pool then has as many at the store at once as
    /// are answered promptly, and the others wait in this process, first come, first served. For a store where an
    /// answer that is late is worth nothing. No by default.
    fn is_paced(&self) -> bool {
        false
    }

    /// Asks the store whether it is fit to serve, and for what could make it lose locks.
    fn health(&self) -> impl Future<Output = Result<Vec<Warning>, BackendError>> + Send;

    /// Lets go of connections. Calls that come later may fail.
    fn close(&self) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// How sure one can be about a request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Not sent, or refused for a reason that passes by itself (loading, failing over). Nothing was done.
    NotNow,
    /// Sent, and no answer came: it may have been done, or may yet be.
    Unknown,
    /// Refused for a reason that somebody has to remove (permissions, memory, a key of another type).
    Refused,
}

/// What a store answered instead of doing what it was asked, or that it did not answer.
#[derive(Clone)]
pub struct BackendError {
    failure: Failure,
    message: String,
    remedy: &'static str,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl BackendError {
    /// An error with a text that must not show secrets.
    #[must_use]
    pub fn new(failure: Failure, message: impl Into<String>) -> Self {
        Self { failure, message: message.into(), remedy: "", source: None }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn remedy(mut self, remedy: &'static str) -> Self {
        self.remedy = remedy;
        self
    }

    /// Adds the client library's error.
    #[must_use]
    pub fn because(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Arc::new(source));
        self
    }

    /// The same error, where nothing had been sent yet that could have been applied.
    #[cfg(feature = "redis")]
    pub(crate) fn before_sending(mut self) -> Self {
        if self.failure == Failure::Unknown {
            self.failure = Failure::NotNow;
        }
        self
    }

    /// The client library's error, if it is a `E`.
    #[cfg(feature = "redis")]
    pub(crate) fn cause<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.source.as_deref()?.downcast_ref()
    }

    /// The same error, where a grant had been made by then.
    #[cfg(feature = "redis")]
    pub(crate) fn after_a_grant(mut self) -> Self {
        self.failure = Failure::Unknown;
        self
    }

    /// How sure one can be about the request.
    #[must_use]
    pub fn failure(&self) -> Failure {
        self.failure
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn remedy_text(&self) -> &'static str {
        self.remedy
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackendError({:?}: {})", self.failure, self.message)
    }
}

impl std::error::Error for BackendError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|error| error as _)
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// [`Backend`] behind a pointer, so that a pool has one type whatever its store. A panic of the store is the failure
/// of the request, like an answer that never came.
pub(crate) trait Store: Send + Sync {
    fn attach(&self, bell: Bell);
    fn acquire<'a>(&'a self, claims: &'a [Claim]) -> Boxed<'a, Vec<Result<Attempt, BackendError>>>;
    fn renew<'a>(&'a self, leases: &'a [LeaseRef]) -> Boxed<'a, Vec<Result<Held, BackendError>>>;
    fn release<'a>(
        &'a self,
        releases: &'a [Release],
    ) -> Boxed<'a, Vec<Result<Released, BackendError>>>;
    fn holds<'a>(&'a self, lease: &'a LeaseRef) -> Boxed<'a, Result<Held, BackendError>>;
    fn in_place(&self) -> bool;
    fn has_lines(&self) -> bool;
    fn is_paced(&self) -> bool;
    fn health(&self) -> Boxed<'_, Result<Vec<Warning>, BackendError>>;
    fn close(&self) -> Boxed<'_, ()>;
}

impl<B: Backend> Store for B {
    fn attach(&self, bell: Bell) {
        Backend::attach(self, bell);
    }

    fn acquire<'a>(&'a self, claims: &'a [Claim]) -> Boxed<'a, Vec<Result<Attempt, BackendError>>> {
        Box::pin(answered(async { Backend::acquire(self, claims).await }, claims.len()))
    }

    fn renew<'a>(&'a self, leases: &'a [LeaseRef]) -> Boxed<'a, Vec<Result<Held, BackendError>>> {
        Box::pin(answered(async { Backend::renew(self, leases).await }, leases.len()))
    }

    fn release<'a>(
        &'a self,
        releases: &'a [Release],
    ) -> Boxed<'a, Vec<Result<Released, BackendError>>> {
        Box::pin(answered(async { Backend::release(self, releases).await }, releases.len()))
    }

    fn holds<'a>(&'a self, lease: &'a LeaseRef) -> Boxed<'a, Result<Held, BackendError>> {
        let holds = panic_boundary::run(async { Backend::holds(self, lease).await });
        Box::pin(async { holds.await.unwrap_or_else(|panic| Err(panic.into_error())) })
    }

    fn in_place(&self) -> bool {
        panic_boundary::call(|| Backend::in_place(self)).unwrap_or(false)
    }

    fn has_lines(&self) -> bool {
        panic_boundary::call(|| Backend::has_lines(self)).unwrap_or(false)
    }

    fn is_paced(&self) -> bool {
        Backend::is_paced(self)
    }

    fn health(&self) -> Boxed<'_, Result<Vec<Warning>, BackendError>> {
        let health = panic_boundary::run(async { Backend::health(self).await });
        Box::pin(async { health.await.unwrap_or_else(|panic| Err(panic.into_error())) })
    }

    fn close(&self) -> Boxed<'_, ()> {
        let close = panic_boundary::run(async { Backend::close(self).await });
        Box::pin(async { drop(close.await) })
    }
}

/// The outcomes of a call; after a panic its error for each of its `count` entries.
async fn answered<T>(
    call: impl Future<Output = Vec<Result<T, BackendError>>>,
    count: usize,
) -> Vec<Result<T, BackendError>> {
    panic_boundary::run(call).await.unwrap_or_else(|panic| {
        let error = panic.into_error();
        (0..count).map(|_| Err(error.clone())).collect()
    })
}
