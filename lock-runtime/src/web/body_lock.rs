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

    /// Polls `body` for its next part. When it ends, it is dropped, and then the lock is released. When the lock is lost, the body
    /// is dropped, and ends with the error.
    pub(super) fn poll_part<B, T, E: From<LockError>>(
        &mut self,
        mut body: Pin<&mut Option<B>>,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut B>, &mut Context<'_>) -> Poll<Option<Result<T, E>>>,
    ) -> Poll<Option<Result<T, E>>> {
        let Some(polled) = body.as_mut().as_pin_mut() else { return Poll::Ready(None) };
        let (lost, guard) = match self {
            Self::Unlocked => return poll(polled, cx),
            Self::Held { lost, guard } => (lost, guard),
        };
        let part = match Pin::new(lost).poll(cx) {
            Poll::Ready(error) => Poll::Ready(Some(Err(error.into()))),
            // A stream may call for the lock that it has.
            Poll::Pending => reentrancy::enter(guard, || poll(polled, cx)),
        };
        if let Poll::Ready(None | Some(Err(_))) = part {
            body.set(None);
            *self = Self::Unlocked;
        }
        part
    }

    pub(super) const fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }
}
