//! What the store last said about a lock, and the error for a wait that ends.

use std::time::Duration;

use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::error::{ErrorKind, LockError};
use crate::base::options::Wait;
use crate::base::policy::Policy;

/// The last answer of the store for a key. A waiter that times out gets `Conflict` if the store reported a holder. It also
/// gets `Conflict` if a task of this process holds or requests the lock and nothing has failed. Otherwise it gets
/// `Backend`.
#[derive(Clone, Debug, Default)]
pub(crate) enum LastAnswer {
    #[default]
    None,
    /// A request was sent at this moment, and no answer has arrived.
    Pending(Instant),
    /// Another owner holds the lock.
    Held {
        expires_in: Option<Duration>,
    },
    Failed(BackendError),
}

/// What has ended a wait without a lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitEnd {
    /// Its time is over, or the store has failed.
    Wait(Wait),
    /// `retry_count` allows no further attempt than these.
    Attempts(u32),
}

impl WaitEnd {
    /// The end of a wait with `policy` after `attempts`.
    pub(crate) fn of(policy: &Policy, attempts: u32) -> Self {
        if policy.wait != Wait::For(Duration::ZERO) && policy.is_out_of_attempts(attempts) {
            Self::Attempts(attempts)
        } else {
            Self::Wait(policy.wait)
        }
    }

    /// The end of a wait with `policy` at its deadline.
    pub(crate) fn at_deadline(policy: &Policy) -> Self {
        if policy.waits() { Self::Wait(policy.wait) } else { Self::of(policy, 1) }
    }
}

impl LastAnswer {
    /// The error for a waiter whose wait ends at `now`. `last_failure` is the last failure of any key.
    #[cold]
    pub(crate) fn wait_error(
        &self,
        end: WaitEnd,
        now: Instant,
        last_failure: Option<&BackendError>,
    ) -> LockError {
        /// An answer that takes less time is not a failure.
        const USUAL: Duration = Duration::from_millis(250);
        match self {
            Self::Pending(since) if now.since(*since) >= USUAL => unanswered(now.since(*since)),
            Self::None | Self::Pending(_) => match last_failure {
                Some(last_failure) => LockError::backend(last_failure.clone()),
                None => conflict(ANOTHER, end, None),
            },
            Self::Held { expires_in } => conflict(ANOTHER, end, *expires_in),
            Self::Failed(error) => LockError::backend(error.clone()),
        }
    }
}

const ANOTHER: &str = "the lock is held by another owner";

/// The error for a wait that ends while a lease of this process holds the lock.
#[cold]
pub(super) fn held_in_process(end: WaitEnd) -> LockError {
    let error = conflict("the lock is held by another call or guard of this process", end, None);
    let remedy = format!(
        "{}; a guard that the caller itself holds counts: release it first",
        remedy_of(end)
    );
    error.remedy(remedy)
}

/// The error for a wait that ends while this process requests the lock, without any answer of the store.
#[cold]
pub(super) fn requested_in_process(end: WaitEnd) -> LockError {
    conflict("this process is still requesting the lock", end, None)
}

/// The error for a wait that ends while this process releases the lock.
#[cold]
pub(super) fn still_releasing(end: WaitEnd) -> LockError {
    conflict("this process is still releasing the lock", end, None)
}

#[cold]
fn unanswered(silent_for: Duration) -> LockError {
    let message = format!("the store has not answered a request that was sent {silent_for:?} ago");
    let remedy = "check that the store is up and reachable";
    LockError::backend(BackendError::new(FailureKind::MaybeApplied, message).remedy(remedy))
}

#[cold]
fn conflict(holder: &str, end: WaitEnd, expires_in: Option<Duration>) -> LockError {
    let mut cause = holder.to_owned();
    match end {
        WaitEnd::Wait(Wait::For(wait)) if !wait.is_zero() => {
            cause += &format!("; not acquired within {wait:?}");
        }
        WaitEnd::Wait(_) => {}
        WaitEnd::Attempts(count) => {
            let s = if count == 1 { "" } else { "s" };
            cause += &format!("; not acquired in {count} attempt{s}");
        }
    }
    if let Some(expires_in) = expires_in {
        cause += &format!("; unless renewed it expires in {expires_in:?}");
    }
    LockError::new(ErrorKind::Conflict, cause).remedy(remedy_of(end))
}

fn remedy_of(end: WaitEnd) -> &'static str {
    match end {
        WaitEnd::Wait(_) => "try again later, raise `wait`, or answer the request with a conflict",
        WaitEnd::Attempts(_) => {
            "try again later, raise `retry_count` or `retry_delay`, or answer the request with a conflict"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::options::{Defaults, LockOptions};

    #[test]
    fn a_conflict_names_what_ended_the_wait() {
        let text = |options, attempts| {
            let policy = Policy::new(&options, &Defaults::default()).unwrap();
            let held = LastAnswer::Held { expires_in: None };
            held.wait_error(WaitEnd::of(&policy, attempts), Instant::ORIGIN, None).to_string()
        };
        let of = |wait| LockOptions::new().wait(Wait::For(wait));
        let (none, long) = (Duration::ZERO, Duration::from_secs(2));
        for (options, attempts, ended) in [
            (of(none), 1, "another owner; try again later, raise `wait`"),
            (of(long), 1, "another owner; not acquired within 2s; "),
            (of(none).retry_count(0), 1, "another owner; try again later, raise `wait`"),
            (of(long).retry_count(0), 1, "another owner; not acquired in 1 attempt; "),
            (of(long).retry_count(2), 2, "another owner; not acquired within 2s; "),
            (of(long).retry_count(2), 3, "another owner; not acquired in 3 attempts; "),
        ] {
            let text = text(options, attempts);
            assert!(text.contains(ended), "{text}");
        }
    }
}
