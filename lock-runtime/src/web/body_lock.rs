//! The lock of a response until its body has been sent.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use crate::api::entered::Entered;
use crate::api::guard::{LockGuard, Lost};
use crate::api::reentrancy;
use crate::base::error::LockError;

/// The lock under which a response body is polled.
pub(super) enum BodyLock {
    /// The body needs none, or has ended.
    Unlocked,
    Held {
        lost: Lost,
        /// Released in the background when it is dropped.
        guard: LockGuard,
    },
    /// The error of the loss has been returned: the body ends with it.
    Lost,
}

impl BodyLock {
    /// Runs `response` while the lock is held, and keeps the lock. Cancel safe: the lock is then released.
    pub(super) async fn run<F: Future>(
        entered: Entered,
        response: F,
    ) -> Result<(F::Output, Self), LockError> {
        let Some(guard) = entered.into_guard() else {
            return Ok((response.await, Self::Unlocked));
        };
        let mut response = pin!(response);
        let response = poll_fn(|cx| reentrancy::enter(&guard, || response.as_mut().poll(cx)));
        let response = tokio::select! {
            biased;
            error = guard.lost() => return Err(error),
            response = response => response,
        };
        Ok((response, Self::Held { lost: guard.lost(), guard }))
    }

    /// Polls the body for its next part. Releases the lock when the body ends; when the lock is lost, the body ends with
    /// the error.
    pub(super) fn poll_part<T, E: From<LockError>>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<Option<Result<T, E>>>,
    ) -> Poll<Option<Result<T, E>>> {
        let (lost, guard) = match self {
            Self::Unlocked => return poll(cx),
            Self::Lost => return Poll::Ready(None),
            Self::Held { lost, guard } => (lost, guard),
        };
        if let Poll::Ready(error) = Pin::new(lost).poll(cx) {
            *self = Self::Lost;
            return Poll::Ready(Some(Err(error.into())));
        }
        // A stream may call for the lock that it has.
        let part = reentrancy::enter(guard, || poll(cx));
        if let Poll::Ready(None | Some(Err(_))) = part {
            *self = Self::Unlocked;
        }
        part
    }

    pub(super) const fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }
}
