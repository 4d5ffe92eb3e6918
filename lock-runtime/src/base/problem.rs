//! The HTTP answer to an error.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use crate::base::error::{ErrorKind, LockError, Progress};

/// What an HTTP client learns about a [`LockError`]: a status and a problem document (RFC 9457). It names no key, no
/// address and no setting; [`LockError`]'s text is for the log.
///
/// | kind | status | `Retry-After` |
/// |---|---|---|
/// | [`Conflict`](ErrorKind::Conflict) | 409 | 1 s |
/// | [`QueueFull`](ErrorKind::QueueFull) | 429 | 1 s |
/// | [`Backend`](ErrorKind::Backend) and [`PoolClosed`](ErrorKind::PoolClosed), if nothing ran | 503 | 1 s |
/// | [`InvalidKey`](ErrorKind::InvalidKey) | 400 | |
/// | all others, and all kinds once the body has begun | 500 | |
///
/// [`PoolBuilder::problem`](crate::PoolBuilder::problem) changes it for a pool.
///
/// ```
/// use lock_runtime::{LockPool, Problem};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lock_runtime::LockError> {
/// let pool = LockPool::connect("memory://").await?;
/// let _held = pool.lock("order:42").acquire().await?;
/// let error = pool.lock("order:42").wait(std::time::Duration::ZERO).acquire().await.unwrap_err();
/// let problem = Problem::of(&error);
/// assert_eq!((problem.status, problem.retry_after), (409, error.retry_after()));
/// assert!(!problem.to_json().contains("order"));
/// # Ok(())
/// # }
/// ```
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The status of the response, and the member `status`. One below 200 or above 999, from
    /// [`PoolBuilder::problem`](crate::PoolBuilder::problem), counts as 500.
    pub status: u16,
    /// The member `title`.
    pub title: Cow<'static, str>,
    /// The member `detail`.
    pub detail: Cow<'static, str>,
    /// The header `Retry-After`, rounded up to a second.
    pub retry_after: Option<Duration>,
}

impl Problem {
    /// The media type of [`to_json`](Self::to_json).
    pub const MEDIA_TYPE: &'static str = "application/problem+json";

    /// The problem for `error`, without the changes of a pool.
    #[must_use]
    pub fn of(error: &LockError) -> Self {
        const INTERNAL: (u16, &str, &str) =
            (500, "Internal Server Error", "The request could not be completed.");
        // Another process may serve the client.
        let is_closed = error.kind() == ErrorKind::PoolClosed && !error.body_started();
        let elsewhere = is_closed.then_some(Duration::from_secs(1));
        let (status, title, detail) = match (error.kind(), error.progress()) {
            (_, Progress::Unfinished | Progress::Finished) => INTERNAL,
            (ErrorKind::Conflict, _) => {
                (409, "Conflict", "Another request for the same resource is in progress.")
            }
            (ErrorKind::QueueFull, _) => {
                (429, "Too Many Requests", "Too many requests wait for the same resource.")
            }
            (ErrorKind::Backend | ErrorKind::PoolClosed, _) => {
                (503, "Service Unavailable", "The service cannot process the request now.")
            }
            (ErrorKind::InvalidKey, _) => {
                (400, "Bad Request", "The request does not identify the resource.")
            }
            _ => INTERNAL,
        };
        Self {
            status,
            title: title.into(),
            detail: detail.into(),
            retry_after: error.retry_after().or(elsewhere),
        }
    }

    /// The value of the header `Retry-After`, in seconds.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        let after = self.retry_after?;
        Some(after.as_secs().saturating_add(u64::from(after.subsec_nanos() > 0)))
    }

    /// The problem document.
    #[must_use]
    pub fn to_json(&self) -> String {
        let Self { status, title, detail, .. } = self;
        let (title, detail) = (escaped(title), escaped(detail));
        format!(
            r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":"{detail}"}}"#
        )
    }
}

/// How a pool changes its problems.
#[derive(Clone, Default)]
pub(crate) struct ProblemMap(Option<Arc<ProblemChange>>);

type ProblemChange = dyn Fn(&LockError, Problem) -> Problem + Send + Sync;

impl ProblemMap {
    pub(crate) fn new(
        change: impl Fn(&LockError, Problem) -> Problem + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(change)))
    }

    #[cfg(any(feature = "actix", feature = "tower"))]
    pub(crate) fn apply(&self, error: &LockError, problem: Problem) -> Problem {
        let Some(change) = &self.0 else { return problem };
        let mut problem = change(error, problem);
        // Of the response and of the document: no server sends another one as the status of a response.
        if !(200..1000).contains(&problem.status) {
            problem.status = 500;
        }
        problem
    }
}

impl fmt::Debug for ProblemMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Changed" } else { "Unchanged" })
    }
}

impl LockError {
    /// When another attempt in this process makes sense: 1 s if nothing ran and the reason passes with time. `None` for all
    /// others: after a shutdown, too, every attempt would fail.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let passes =
            matches!(self.kind(), ErrorKind::Conflict | ErrorKind::QueueFull | ErrorKind::Backend);
        (passes && !self.body_started()).then_some(Duration::from_secs(1))
    }
}

/// `text` inside a JSON string (RFC 8259).
fn escaped(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| !matches!(c, '"' | '\\') && !c.is_control();
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '"' | '\\' => escaped.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(escaped, "\\u{:04x}", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    escaped.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(kind: ErrorKind, progress: Progress) -> (u16, Option<u64>) {
        let problem = Problem::of(&LockError::new(kind, "").after(progress));
        (problem.status, problem.retry_after_seconds())
    }

    #[test]
    fn each_kind_has_its_status() {
        let not_started = |kind| status(kind, Progress::NotStarted);
        assert_eq!(not_started(ErrorKind::Conflict), (409, Some(1)));
        assert_eq!(not_started(ErrorKind::QueueFull), (429, Some(1)));
        assert_eq!(not_started(ErrorKind::Backend), (503, Some(1)));
        assert_eq!(not_started(ErrorKind::PoolClosed), (503, Some(1)));
        assert_eq!(LockError::pool_closed().retry_after(), None, "in this process");
        assert_eq!(not_started(ErrorKind::InvalidKey), (400, None));
        for kind in [ErrorKind::Config, ErrorKind::PoolNotFound, ErrorKind::WouldDeadlock] {
            assert_eq!(not_started(kind), (500, None), "{kind:?}");
        }
        for progress in [Progress::Unfinished, Progress::Finished] {
            for kind in [ErrorKind::Lost, ErrorKind::Backend, ErrorKind::PoolClosed] {
                assert_eq!(status(kind, progress), (500, None), "{kind:?}");
            }
        }
    }

    #[test]
    fn texts_of_a_pool_are_escaped() {
        let mut problem = Problem::of(&LockError::new(ErrorKind::Conflict, ""));
        problem.title = "a \"b\" \\ \n".into();
        problem.retry_after = Some(Duration::from_millis(1_001));
        assert!(problem.to_json().contains(r#""title":"a \"b\" \\ \u000a""#));
        assert_eq!(problem.retry_after_seconds(), Some(2));
        problem.retry_after = Some(Duration::MAX);
        assert_eq!(problem.retry_after_seconds(), Some(u64::MAX));
    }

    #[cfg(any(feature = "actix", feature = "tower"))]
    #[test]
    fn a_status_that_no_response_has_is_an_internal_error() {
        let error = LockError::new(ErrorKind::Conflict, "");
        for (status, answered) in [(0, 500), (99, 500), (101, 500), (423, 423), (1000, 500)] {
            let map = ProblemMap::new(move |_, mut problem| {
                problem.status = status;
                problem
            });
            assert_eq!(map.apply(&error, Problem::of(&error)).status, answered, "{status}");
        }
    }
}
