//! What the store last said about a lock, and the error for a wait that ends.

use std::time::Duration;

use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::error::{ErrorKind, LockError};
use crate::base::options::Wait;

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

impl LastAnswer {
    /// The error for a waiter whose wait ends at `now`. `last_failure` is the last failure of any key.
    #[cold]
    pub(crate) fn wait_error(
        &self,
        wait: Wait,
        now: Instant,
        last_failure: Option<&BackendError>,
    ) -> LockError {
        /// An answer that takes less time is not a failure.
        const USUAL: Duration = Duration::from_millis(250);
        match self {
            Self::Pending(since) if now.since(*since) >= USUAL => {
                let message = format!("the store has not answered for {:?}", now.since(*since));
                LockError::backend(
                    BackendError::new(FailureKind::MaybeApplied, message)
                        .remedy("check that the store is up and reachable"),
                )
            }
            Self::None | Self::Pending(_) => match last_failure {
                Some(last_failure) => LockError::backend(last_failure.clone()),
                None => conflict(wait, None),
            },
            Self::Held { expires_in } => conflict(wait, *expires_in),
            Self::Failed(error) => LockError::backend(error.clone()),
        }
    }
}

#[cold]
fn conflict(wait: Wait, expires_in: Option<Duration>) -> LockError {
    let waited = match wait {
        Wait::For(Duration::ZERO) | Wait::Forever => "the lock is held by another owner".to_owned(),
        Wait::For(wait) => {
            format!("the lock is held by another owner; not acquired within {wait:?}")
        }
    };
    let cause = match expires_in {
        Some(expires_in) => format!("{waited}; unless renewed it expires in {expires_in:?}"),
        None => waited,
    };
    LockError::new(ErrorKind::Conflict, cause)
        .remedy("try again later, raise `wait`, or answer the request with a conflict")
}
