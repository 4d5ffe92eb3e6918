//! What both databases answer to an owner in the queue, and the successor that a release names.

use std::time::Duration;

use crate::backend::{AcquireOutcome, ReleaseRequest, Successor, WaitMode};
use crate::base::jitter;

/// The server rounds times to microseconds, and a timer rounds them to milliseconds.
const ROUNDING: Duration = Duration::from_millis(1);

/// The longest time between two requests of an owner at the head of the queue for a key that a transaction has pinned.
const PINNED_RECHECK: Duration = Duration::from_millis(25);

/// The outcome for an owner of this rank, which requests the key again after `recheck` if it is not notified.
pub(crate) fn queued(expires_in: Option<Duration>, rank: i64, recheck: Duration) -> AcquireOutcome {
    let recheck = jitter::below(recheck);
    let retry_after = match expires_in {
        Some(expires_in) if rank == 0 => recheck.min(expires_in + ROUNDING),
        // No owner holds the key: a transaction of a former owner may have pinned it.
        None if rank == 0 => jitter::below(PINNED_RECHECK),
        _ => recheck,
    };
    AcquireOutcome::contended_until(expires_in, WaitMode::Queued { retry_after })
}

/// The next owner of the process. `None` for several keys, and after a barging window.
pub(crate) fn successor(request: &ReleaseRequest) -> Option<&Successor> {
    let is_single = request.lease.keys.len() == 1 && request.barging_window.is_zero();
    request.successor.as_ref().filter(|_| is_single)
}
