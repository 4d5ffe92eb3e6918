//! Failures of requests to a store, and warnings about one.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// How certain the effect of a failed request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureKind {
    /// Not sent, or refused for a reason that passes on its own (loading, failing over). Nothing was applied.
    NotApplied,
    /// Sent, and no answer came: it may have been applied, or may be applied later.
    MaybeApplied,
    /// Refused for a reason that an operator has to remove (permissions, memory, a key of another type).
    Rejected,
}

/// A store refused a request, or did not answer it.
#[derive(Clone)]
pub struct BackendError(Arc<BackendErrorDetails>);

/// Behind a pointer: most results have none.
#[derive(Clone)]
struct BackendErrorDetails {
    kind: FailureKind,
    message: String,
    remedy: &'static str,
    source: Option<Arc<dyn Error + Send + Sync>>,
    /// Whether the store works, and a competitor is what prevents a grant.
    is_contended: bool,
}

impl BackendError {
    /// The outcome of several requests that were sent together, as far as it tells about the store. It is a success if there is
    /// one, or an acquire that a competitor prevents; else a rejection, which is an answer; else the last failure.
    pub(crate) fn of_all<T>(outcomes: &[Result<T, Self>]) -> Result<(), &Self> {
        let mut of_all: Result<(), &Self> = Ok(());
        for outcome in outcomes {
            match (outcome, of_all) {
                (Ok(_), _) => return Ok(()),
                (Err(error), _) if error.is_contended() => return Ok(()),
                (Err(_), Err(former)) if former.kind() == FailureKind::Rejected => {}
                (Err(error), _) => of_all = Err(error),
            }
        }
        of_all
    }

    /// An error with a text that must not show secrets.
    #[must_use]
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        let message = message.into();
        let (remedy, source, is_contended) = ("", None, false);
        Self(Arc::new(BackendErrorDetails { kind, message, remedy, source, is_contended }))
    }

    /// The error of a request that was not answered within its limit.
    #[cold]
    pub(crate) fn unanswered() -> Self {
        Self::new(FailureKind::MaybeApplied, "the store did not answer in time")
    }

    /// Adds the advice that error texts end with.
    #[must_use]
    pub fn remedy(self, remedy: &'static str) -> Self {
        self.with(|details| details.remedy = remedy)
    }

    /// Adds the client library's error.
    #[must_use]
    pub fn because(self, source: impl Error + Send + Sync + 'static) -> Self {
        self.with(|details| details.source = Some(Arc::new(source)))
    }

    /// The same error, for a request that had sent nothing that could have been applied.
    #[cfg(feature = "_remote")]
    pub(crate) fn before_sending(self) -> Self {
        if self.0.kind != FailureKind::MaybeApplied {
            return self;
        }
        self.with(|details| details.kind = FailureKind::NotApplied)
    }

    /// The cause, if it is an `E`.
    #[cfg(any(feature = "redis", feature = "_sql", feature = "etcd"))]
    pub(crate) fn cause<E: Error + 'static>(&self) -> Option<&E> {
        self.0.source.as_deref()?.downcast_ref()
    }

    /// The same error, for a request of which a part had been applied by then.
    #[cfg(feature = "_remote")]
    pub(crate) fn after_a_part(self) -> Self {
        self.with(|details| details.kind = FailureKind::MaybeApplied)
    }

    /// The same error, for an acquire that a competitor prevents, and of which a part may be applied later.
    #[cfg(any(test, feature = "redis"))]
    pub(crate) fn contended(self) -> Self {
        self.with(|details| details.is_contended = true)
    }

    pub(crate) fn is_contended(&self) -> bool {
        self.0.is_contended
    }

    /// How certain the effect of the request is.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        self.0.kind
    }

    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }

    pub(crate) fn remedy_text(&self) -> &'static str {
        self.0.remedy
    }

    fn with(mut self, change: impl FnOnce(&mut BackendErrorDetails)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackendError({:?}: {})", self.0.kind, self.0.message)
    }
}

impl Error for BackendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_deref().map(|error| error as _)
    }
}

/// A property of a store in service that can make it lose locks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    text: String,
    remedy: &'static str,
}

impl Warning {
    /// What is wrong, and what to do about it.
    #[must_use]
    pub fn new(text: impl Into<String>, remedy: &'static str) -> Self {
        Self { text: text.into(), remedy }
    }

    /// What is wrong.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What to do about it.
    #[must_use]
    pub const fn remedy(&self) -> &'static str {
        self.remedy
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.text, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contended_acquire_is_no_failure_of_the_store() {
        let failed = |kind| Err(BackendError::new(kind, "planned"));
        let contended = || failed(FailureKind::MaybeApplied).map_err(BackendError::contended);
        let of_all = |outcomes: &[Result<(), BackendError>]| {
            BackendError::of_all(outcomes).map_err(BackendError::kind)
        };
        assert_eq!(of_all(&[failed(FailureKind::NotApplied), contended()]), Ok(()));
        assert_eq!(of_all(&[contended(), failed(FailureKind::NotApplied)]), Ok(()));
        let failures = [FailureKind::NotApplied, FailureKind::Rejected, FailureKind::NotApplied];
        assert_eq!(of_all(&failures.map(failed)), Err(FailureKind::Rejected));
    }
}
