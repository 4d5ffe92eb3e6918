//! The first connection of a pool to a cluster: to whichever server serves.

use std::time::Duration;

use tokio::time::sleep;

use crate::backend::backoff::Backoff;
use crate::backend::race::{Pace, race};
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::Clock;

/// Why an attempt to connect has failed.
pub(crate) struct OpenFailure {
    pub(crate) error: BackendError,
    /// The server is there and has not refused the pool. It does not serve until the cluster has a leader.
    pub(crate) may_serve_soon: bool,
}

impl From<BackendError> for OpenFailure {
    #[cold]
    fn from(error: BackendError) -> Self {
        Self { error, may_serve_soon: false }
    }
}

/// Connects to one of `count` servers, `first` before the others. While a server has no answer, the next one is tried beside it.
/// It is tried after a part of `limit` that leaves time for all, and after at most a second. A server that [may serve
/// soon](OpenFailure::may_serve_soon) is tried again, until `limit` has passed.
///
/// Also returns the server's position. `open` gets a position and the time that is left. Dropping the future ends all attempts.
///
/// # Errors
/// When no server is left to try: a refusal, if there was one, or the last error. A frozen server fails last.
pub(crate) async fn first_to_serve<T, F>(
    (first, count): (usize, usize),
    limit: Duration,
    clock: Clock,
    open: impl Fn(usize, Duration) -> F,
) -> Result<(usize, T), BackendError>
where
    F: Future<Output = Result<T, OpenFailure>>,
{
    const LONGEST_STAGGER: Duration = Duration::from_secs(1);
    let began = clock.now();
    let until_it_serves = async |server| {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        let mut earlier = None;
        loop {
            let left = limit.saturating_sub(clock.now().since(began));
            let failure = match open(server, left).await {
                Ok(opened) => return Ok((server, opened)),
                Err(failure) => failure,
            };
            let (pause, passed) = (backoff.next(), clock.now().since(began));
            if passed >= limit {
                // The last attempt was cut short, so its error is not the reason.
                return Err(earlier.unwrap_or(failure.error));
            }
            if !failure.may_serve_soon || passed + pause >= limit {
                return Err(failure.error);
            }
            earlier = Some(failure.error);
            sleep(pause).await;
        }
    };
    let order: Vec<_> = (first..first + count).map(|server| server % count).collect();
    let parts = u32::try_from(2 * count).unwrap_or(u32::MAX).max(8);
    let pace = Pace { next: LONGEST_STAGGER.min(limit / parts), again: None };
    race(&order, pace, until_it_serves).await.map_err(|mut errors| {
        let is_refusal = |error: &BackendError| error.kind() == FailureKind::Rejected;
        let refusal = errors.iter().rposition(is_refusal);
        let error = refusal.map(|at| errors.swap_remove(at)).or_else(|| errors.pop());
        error.unwrap_or_else(|| BackendError::new(FailureKind::NotApplied, "there is no server"))
    })
}
