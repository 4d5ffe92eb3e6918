//! What a call for a lock led to, in one word.

use crate::base::error::ErrorKind;

/// What a call for a lock led to: its wait in metrics, and all of it in spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Acquired,
    /// The task holds the lock already, and the call is `reentrant`.
    Passed,
    /// The lock was held, and released by its holder.
    Released,
    /// Like `Released`, but the store did not confirm it in time.
    Unconfirmed,
    /// The lock was granted, and the call did not take it in time.
    Unclaimed,
    /// The future was dropped.
    Cancelled,
    /// The body panicked, or the code that held a guard.
    Panicked,
    Failed(ErrorKind),
}

impl Outcome {
    /// The word in spans and metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::Passed => "passed",
            Self::Released => "released",
            Self::Unconfirmed => "unconfirmed",
            Self::Unclaimed => "unclaimed",
            Self::Cancelled => "cancelled",
            Self::Panicked => "panicked",
            Self::Failed(kind) => match kind {
                ErrorKind::Config => "config",
                ErrorKind::Conflict => "conflict",
                ErrorKind::Backend => "backend",
                ErrorKind::InvalidKey => "invalid_key",
                ErrorKind::Lost => "lost",
                ErrorKind::PoolNotFound => "pool_not_found",
                ErrorKind::QueueFull => "queue_full",
                ErrorKind::WouldDeadlock => "would_deadlock",
                ErrorKind::Released => "released",
                ErrorKind::PoolClosed => "pool_closed",
            },
        }
    }
}
