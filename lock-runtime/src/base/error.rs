//! Errors of lock operations.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::key::Key;
use crate::base::lock_name::LockName;

/// The category of an error, for decisions of the caller.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The configuration of the pool, the call or the URL is invalid.
    Config,
    /// Another owner holds the lock and did not release it in time. Nothing ran.
    Conflict,
    /// The store is unreachable or rejects the request. From an acquire: nothing ran.
    Backend,
    /// The key is empty or has reserved text, or a placeholder's value has no text. Nothing ran.
    InvalidKey,
    /// The lease ended before its holder released it: another holder may be active now. [`LockError::progress`] says
    /// whether the body had started.
    Lost,
    /// No pool is installed under this name. Nothing ran.
    PoolNotFound,
    /// The wait queue of the key in this process is full. Nothing ran.
    QueueFull,
    /// The call is made in a body that holds the key; waiting would be a deadlock. Locks of guards are not detected.
    /// Nothing ran.
    WouldDeadlock,
    /// The holder has released the lock. [`LockGuard::lost`](crate::LockGuard::lost) resolves to this if the lock was
    /// not lost before, and other methods of the guard return it.
    Released,
    /// The pool is shutting down. [`LockError::progress`] says whether the body had started.
    PoolClosed,
}

/// How far the work under a lock had come before the error: the answer to "did it run?", for every kind.
///
/// The work is the body of an annotated function, or of [`LockRequest::run`](crate::LockRequest::run). With a
/// [`LockGuard`](crate::LockGuard) it is the code between the acquire and the release.
///
/// ```
/// use lock_runtime::{LockError, Progress};
///
/// fn advice(error: &LockError) -> &'static str {
///     match error.progress() {
///         Progress::NotStarted => "try again",
///         Progress::Finished => "done; another holder may have been active too",
///         _ => "check how far it came",
///     }
/// }
/// ```
///
/// An error refers only to the lock that it names ([`template`](LockError::template)). A body that returns the error
/// of an inner call has run up to that call.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// The work did not start.
    NotStarted,
    /// The work started and was not finished. A body was dropped at one of its awaits. The code that holds a guard is
    /// still running and learns of the loss by this error.
    Unfinished,
    /// The work finished. The lock was lost before it was released, or its release is not confirmed.
    Finished,
}

/// An error of a lock operation. It is one pointer, cheap to clone.
///
/// For decisions use [`kind`](Self::kind) or one of the predicates. The text names the key's template, the pool,
/// the cause and a remedy; it never contains a password.
#[derive(Clone)]
pub struct LockError(Arc<LockErrorDetails>);

#[derive(Clone)]
struct LockErrorDetails {
    kind: ErrorKind,
    progress: Progress,
    cause: Cow<'static, str>,
    remedy: Cow<'static, str>,
    name: Option<LockName>,
    keys: Option<Arc<[Key]>>,
    pool: Option<Arc<str>>,
    source: Option<BackendError>,
}

impl LockError {
    #[cold]
    #[inline(never)]
    pub(crate) fn new(kind: ErrorKind, cause: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(LockErrorDetails {
            kind,
            progress: Progress::NotStarted,
            cause: cause.into(),
            remedy: Cow::Borrowed(""),
            name: None,
            keys: None,
            pool: None,
            source: None,
        }))
    }

    #[cold]
    pub(crate) fn backend(error: BackendError) -> Self {
        Self::new(ErrorKind::Backend, error.message().to_owned())
            .remedy(error.remedy_text())
            .with(|inner| inner.source = Some(error))
    }

    #[cold]
    pub(crate) fn pool_closed() -> Self {
        Self::new(ErrorKind::PoolClosed, "the pool is shutting down")
            .remedy("stop calling locked functions before `shutdown`, or treat this like a cancelled request")
    }

    /// The store has answered a release with "not held".
    #[cold]
    pub(crate) fn lost_before_release() -> Self {
        Self::new(ErrorKind::Lost, "the lock was no longer held when it was released").remedy(
            "another holder may have run meanwhile: check the fence where you write, or choose a longer ttl",
        )
    }

    /// The error of every operation of a pool in a process that was forked from the pool's process.
    #[cold]
    pub(crate) fn inherited() -> Self {
        Self::new(ErrorKind::Config, "the pool belongs to the process that this one was forked from")
            .remedy("connect after the fork, with `lock_runtime::init` or `LockPool::connect`; threads and connections stay with the parent")
    }

    pub(crate) fn remedy(self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.with(|inner| inner.remedy = remedy.into())
    }

    /// What has happened, without the remedy.
    pub(crate) fn cause(&self) -> &str {
        &self.0.cause
    }

    /// Adds the error of the store that caused this one.
    #[cold]
    pub(crate) fn because(self, error: BackendError) -> Self {
        self.with(|inner| {
            inner.cause = format!("{}: {}", inner.cause, error.message()).into();
            // Only a rejected request needs its own remedy; other failures pass with time.
            if error.kind() == FailureKind::Rejected {
                inner.remedy = error.remedy_text().into();
            }
            inner.source = Some(error);
        })
    }

    pub(crate) fn at(self, name: LockName) -> Self {
        self.with(|inner| inner.name = Some(name))
    }

    /// The same error without a key, for events.
    pub(crate) fn without_key(&self) -> Self {
        self.clone().with(|inner| {
            inner.name = inner.name.take().map(|name| LockName::Template(name.public()));
        })
    }

    pub(crate) fn of_keys(self, keys: &Arc<[Key]>) -> Self {
        self.with(|inner| inner.keys = Some(keys.clone()))
    }

    pub(crate) fn in_pool(self, pool: &Arc<str>) -> Self {
        self.with(|inner| inner.pool = Some(pool.clone()))
    }

    /// Sets how far the work had come.
    pub(crate) fn after(self, progress: Progress) -> Self {
        self.with(|inner| inner.progress = progress)
    }

    fn with(mut self, change: impl FnOnce(&mut LockErrorDetails)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// The category of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// How far the work under the lock had come: the lock that the error names. The error of a locked call in a body is
    /// about that call, also where the body returns it.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.0.progress
    }

    /// True if the work under the lock started, as in [`progress`](Self::progress). False for [`Progress::NotStarted`]:
    /// nothing ran under this lock and the call may be repeated.
    #[must_use]
    pub fn body_started(&self) -> bool {
        self.progress() != Progress::NotStarted
    }

    /// True if another owner holds the lock.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.kind() == ErrorKind::Conflict
    }

    /// True if the lock was held and no longer is.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.kind() == ErrorKind::Lost
    }

    /// True if the store is unreachable or rejects the request.
    #[must_use]
    pub fn is_backend(&self) -> bool {
        self.kind() == ErrorKind::Backend
    }

    /// The key as written in the attribute (`order:<id>`), or the
    /// [`template`](crate::LockRequest::template) of a request. A request without one has its key here. `None` if the error
    /// occurred before a key was known.
    #[must_use]
    pub fn template(&self) -> Option<&str> {
        self.0.name.as_ref().map(LockName::as_str)
    }

    /// The first of [`keys`](Self::keys).
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.keys().first()
    }

    /// The keys of the call, whole, without the pool's prefix, sorted and distinct. Empty if the error occurred before they
    /// were known.
    ///
    /// A key may contain personal data, so a printed error shows no key. Events, spans, metrics and
    /// [`Problem`](crate::Problem) name only the template, and so do `Display` and `Debug`. A request without a
    /// [`template`](crate::LockRequest::template) has no name other than its key, and the text of its error shows it.
    ///
    /// ```
    /// # use lock_runtime::{LockError, distributed_lock};
    /// #[distributed_lock(key = "order:<id>", wait = "0s")]
    /// async fn settle(id: u64) -> Result<(), LockError> {
    ///     Ok(())
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), LockError> {
    /// let pool = lock_runtime::init("memory://").await?;
    /// let _held = pool.lock("order:42").acquire().await?;
    /// let error = settle(42).await.unwrap_err();
    /// assert_eq!(error.key().map(|key| key.as_str()), Some("order:42"));
    /// assert!(!error.to_string().contains("42") && !format!("{error:?}").contains("42"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        self.0.keys.as_deref().unwrap_or_default()
    }

    /// The pool's name. `None` if the error occurred before a pool was known.
    #[must_use]
    pub fn pool(&self) -> Option<&str> {
        self.0.pool.as_deref()
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.cause)?;
        match (self.template().filter(|template| !template.is_empty()), self.pool()) {
            (Some(template), Some(pool)) => write!(f, " (lock `{template}`, pool `{pool}`)")?,
            (Some(template), None) => write!(f, " (lock `{template}`)")?,
            (None, Some(pool)) => write!(f, " (pool `{pool}`)")?,
            (None, None) => {}
        }
        if !self.0.remedy.is_empty() {
            write!(f, "; {}", self.0.remedy)?;
        }
        Ok(())
    }
}

impl fmt::Debug for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockError")
            .field("kind", &self.kind())
            .field("progress", &self.progress())
            .field("message", &format_args!("{self}"))
            .finish()
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_ref().map(|error| error as _)
    }
}
