//! Why a lock was not had, or not kept.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::base::backend_error::{BackendError, FailureKind};

/// What went wrong, in the terms a caller decides by.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The pool, the call or the URL is set up in a way that cannot work.
    Config,
    /// Somebody else holds the lock and did not let go in time. Nothing ran.
    Conflict,
    /// The store is unreachable or refuses. From an acquire: nothing ran.
    Backend,
    /// The key is empty. Nothing ran.
    InvalidKey,
    /// The lease ended before its holder let go: another holder may be at work now. [`LockError::progress`] tells whether the
    /// body had begun.
    Lost,
    /// No pool is installed under this name. Nothing ran.
    PoolNotFound,
    /// Too many tasks of this process wait for the key already. Nothing ran.
    QueueFull,
    /// This very task holds the key; waiting would be a deadlock. Nothing ran.
    WouldDeadlock,
    /// The holder has let go: what [`LockGuard::lost`](crate::LockGuard::lost) resolves to if nothing is lost before.
    Released,
    /// The pool is shutting down. [`LockError::progress`] tells whether the body had begun.
    PoolClosed,
}

/// How far the work under a lock came before its error: the answer to "did it run?", whatever the kind.
///
/// The work is the body of an annotated function, or of [`LockRequest::run`](crate::LockRequest::run). With a
/// [`LockGuard`](crate::LockGuard) it is what the caller does between the acquire and the release.
///
/// ```
/// use lock_runtime::{LockError, Progress};
///
/// fn advice(error: &LockError) -> &'static str {
///     match error.progress() {
///         Progress::NotStarted => "try again",
///         Progress::Finished => "done; another holder may have been at work too",
///         _ => "find out how far it came",
///     }
/// }
/// ```
///
/// An error speaks for the one lock that it names ([`template`](LockError::template)). A body that passes on the error of a
/// call further in has run up to that call.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// The work did not begin.
    NotStarted,
    /// The work began and had not come to its end. A body was dropped at one of its awaits; the holder of a guard is
    /// still at work and told by this error.
    Unfinished,
    /// The work came to its end. The lock was lost before it was released, or its release is not confirmed.
    Finished,
}

/// An error of a lock operation: one pointer, cheap to clone.
///
/// LockSpec [`kind`](Self::kind), or one of the predicates. The text names the key's template, the pool,
/// the cause and what to do; it never shows a password.
#[derive(Clone)]
pub struct LockError(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    progress: Progress,
    cause: Cow<'static, str>,
    remedy: Cow<'static, str>,
    template: Option<Cow<'static, str>>,
    pool: Option<Arc<str>>,
    source: Option<Arc<BackendError>>,
}

impl LockError {
    #[cold]
    #[inline(never)]
    pub(crate) fn new(kind: ErrorKind, cause: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner {
            kind,
            progress: Progress::NotStarted,
            cause: cause.into(),
            remedy: Cow::Borrowed(""),
            template: None,
            pool: None,
            source: None,
        }))
    }

    #[cold]
    pub(crate) fn backend(error: BackendError) -> Self {
        Self::new(ErrorKind::Backend, error.message().to_owned())
            .remedy(error.remedy_text())
            .with(|inner| inner.source = Some(Arc::new(error)))
    }

    #[cold]
    pub(crate) fn pool_closed() -> Self {
        Self::new(ErrorKind::PoolClosed, "the pool is shutting down")
            .remedy("stop calling locked functions before `shutdown`, or treat this like a cancelled request")
    }

    /// For all that is asked of a pool in a process that was forked from its own.
    #[cold]
    pub(crate) fn inherited() -> Self {
        Self::new(ErrorKind::Config, "the pool belongs to the process that this one was forked from")
            .remedy("connect after the fork, with `lock_runtime::init` or `LockPool::connect`; threads and connections stay with the parent")
    }

    pub(crate) fn remedy(self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.with(|inner| inner.remedy = remedy.into())
    }

    /// Names the store's answer that has led to this.
    #[cold]
    pub(crate) fn because(self, error: BackendError) -> Self {
        self.with(|inner| {
            inner.cause = format!("{}: {}", inner.cause, error.message()).into();
            // What passes by itself is ridden out; the rest somebody has to see to.
            if error.kind() == FailureKind::Rejected {
                inner.remedy = error.remedy_text().into();
            }
            inner.source = Some(Arc::new(error));
        })
    }

    pub(crate) fn at(self, template: impl Into<Cow<'static, str>>) -> Self {
        self.with(|inner| inner.template = Some(template.into()))
    }

    pub(crate) fn in_pool(self, pool: &Arc<str>) -> Self {
        self.with(|inner| inner.pool = Some(pool.clone()))
    }

    /// Notes how far the work had come.
    pub(crate) fn after(self, progress: Progress) -> Self {
        self.with(|inner| inner.progress = progress)
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// How far the work under the lock came.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.0.progress
    }

    /// True if the work under the lock began: not for [`Progress::NotStarted`], where nothing ran and the call may be
    /// repeated.
    #[must_use]
    pub fn body_started(&self) -> bool {
        self.progress() != Progress::NotStarted
    }

    /// True if somebody else holds the lock.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.kind() == ErrorKind::Conflict
    }

    /// True if the lock was held and is not any more.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.kind() == ErrorKind::Lost
    }

    /// True if the store is unreachable or refuses.
    #[must_use]
    pub fn is_backend(&self) -> bool {
        self.kind() == ErrorKind::Backend
    }

    /// The key as it is written in the attribute (`order:<id>`), or the key given to
    /// [`LockPool::lock`](crate::LockPool::lock). `None` where no key was involved yet.
    #[must_use]
    pub fn template(&self) -> Option<&str> {
        self.0.template.as_deref()
    }

    /// The pool's name. `None` where no pool was involved yet.
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
        self.0.source.as_deref().map(|error| error as _)
    }
}
