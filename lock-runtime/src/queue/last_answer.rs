//! What is known about a lock that is waited for, and what to tell those who wait in vain.

use std::time::Duration;

use crate::backend::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::error::{ErrorKind, LockError};
use crate::base::options::Wait;

/// What a line has last heard from the store. Those in it must not be told that somebody holds the lock
/// when nobody could be asked.
#[derive(Clone, Debug, Default)]
pub(crate) enum Word {
    #[default]
    NothingAsked,
    /// Nothing yet to what was asked then.
    Asked(Instant),
    /// Somebody holds it.
    Taken {
        expires_in: Option<Duration>,
    },
    Failed(BackendError),
}

impl Word {
    /// What to tell somebody whose wait ends now. `trouble` is the last failure of any key.
    #[cold]
    pub(crate) fn verdict(
        &self,
        wait: Wait,
        now: Instant,
        trouble: Option<&BackendError>,
    ) -> LockError {
        /// An answer may take as long as this without a doubt.
        const USUAL: Duration = Duration::from_millis(250);
        match self {
            Self::Asked(since) if now.since(*since) >= USUAL => {
                let message = format!("the store has not answered for {:?}", now.since(*since));
                LockError::backend(
                    BackendError::new(FailureKind::MaybeApplied, message)
                        .remedy("check that the store is up and reachable"),
                )
            }
            Self::NothingAsked | Self::Asked(_) => match trouble {
                Some(trouble) => LockError::backend(trouble.clone()),
                None => conflict(wait, None),
            },
            Self::Taken { expires_in } => conflict(wait, *expires_in),
            Self::Failed(error) => LockError::backend(error.clone()),
        }
    }
}

#[cold]
fn conflict(wait: Wait, expires_in: Option<Duration>) -> LockError {
    let waited = match wait {
        Wait::For(Duration::ZERO) => "somebody else holds the lock".to_owned(),
        Wait::For(wait) => {
            format!("somebody else holds the lock and did not let go within {wait:?}")
        }
        Wait::Forever => "somebody else holds the lock".to_owned(),
    };
    let cause = match expires_in {
        Some(expires_in) => format!("{waited}; unless renewed it is free in {expires_in:?}"),
        None => waited,
    };
    LockError::new(ErrorKind::Conflict, cause)
        .remedy("try again later, raise `wait`, or answer the request with a conflict")
}
