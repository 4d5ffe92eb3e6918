//! The lock of a response until its body has ended.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::api::entered::Entered;
use crate::api::guard::{LockGuard, Lost};
use crate::api::reentrancy;
use crate::base::error::LockError;
use crate::lease::held_lease::Releasing;
use crate::lease::lease::{Lease, RunningBody};

/// The lock under which a response body is polled.
pub(super) enum BodyLock {
    /// The body needs none, or has ended.
    Unlocked,
    Held {
        lost: Lost,
        /// Released in the background when it is dropped.
        guard: LockGuard,
    },
    /// The body has ended. The release goes on if this is dropped.
    Releasing { releasing: Releasing, guard: LockGuard },
}

/// The first field of a struct with a body, or declared after it, and so dropped before it: a shutdown keeps the lock while the
/// body is dropped.
pub(super) struct DropOfBody(Option<Arc<Lease>>);

impl DropOfBody {
    fn under(guard: &LockGuard) -> Self {
        Self(Some(guard.lease().clone()))
    }

    /// The body is dropped already.
    fn is_over(&mut self) {
        self.0 = None;
    }
}

impl Drop for DropOfBody {
    fn drop(&mut self) {
        if let Some(lease) = &self.0 {
            lease.enter_body().keep();
        }
    }
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
        let mut response = pin!(Some(response));
        let mut lost = guard.lost();
        let mut dropping = DropOfBody::under(&guard);
        let response = poll_fn(|cx| {
            let running = guard.enter_body();
            if let Poll::Ready(error) = Pin::new(&mut lost).poll(cx) {
                return Poll::Ready(Err(error));
            }
            let Some(polled) = response.as_mut().as_pin_mut() else { return Poll::Pending };
            let output = ready!(reentrancy::enter(&guard, &running, || polled.poll(cx)));
            response.set(None);
            Poll::Ready(Ok(output))
        });
        let response = response.await?;
        dropping.is_over();
        Ok((response, Self::Held { lost, guard }))
    }

    /// Drops `body`, which is not polled any more, under the lock.
    pub(super) fn drop_body<B>(&self, body: B) {
        let _running = match self {
            Self::Held { guard, .. } => guard.enter_body(),
            Self::Unlocked | Self::Releasing { .. } => RunningBody::nested(),
        };
        drop(body);
    }

    /// For a struct with a body under this lock.
    pub(super) fn drop_of_body(&self) -> DropOfBody {
        match self {
            Self::Held { guard, .. } => DropOfBody::under(guard),
            Self::Unlocked | Self::Releasing { .. } => DropOfBody(None),
        }
    }

    /// Polls `body` for its next part. At its end it is dropped, then the lock is released, and only after that the end is
    /// passed on: in `last`, if `is_last` tells that a part is followed by none. When the lock is lost, the body is dropped,
    /// and ends with the error.
    pub(super) fn poll_part<B, T, E: From<LockError>>(
        &mut self,
        mut body: Pin<&mut Option<B>>,
        last: &mut Option<Result<T, E>>,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut B>, &mut Context<'_>) -> Poll<Option<Result<T, E>>>,
        is_last: impl FnOnce(&B, &T) -> bool,
    ) -> Poll<Option<Result<T, E>>> {
        if let Some(polled) = body.as_mut().as_pin_mut() {
            let Self::Held { lost, guard } = self else { return poll(polled, cx) };
            let running = guard.enter_body();
            if let Poll::Ready(error) = Pin::new(lost).poll(cx) {
                body.set(None);
                drop(running);
                *self = Self::Unlocked;
                return Poll::Ready(Some(Err(error.into())));
            }
            // A stream may call for the lock that it has.
            let part = ready!(reentrancy::enter(guard, &running, || poll(polled, cx)));
            let ends = match (&part, body.as_ref().get_ref()) {
                (Some(Ok(part)), Some(body)) => is_last(body, part),
                _ => true,
            };
            if !ends {
                return Poll::Ready(part);
            }
            *last = part;
            body.set(None);
            drop(running);
            self.end();
        }
        ready!(self.poll_end(cx));
        Poll::Ready(last.take())
    }

    /// Releases the lock of a body that is dropped already, and waits for the answer. Cancel safe: the release goes on.
    pub(super) async fn release(mut self) {
        self.end();
        poll_fn(|cx| self.poll_end(cx)).await;
    }

    fn end(&mut self) {
        let Self::Held { lost, mut guard } = std::mem::replace(self, Self::Unlocked) else {
            return;
        };
        // Otherwise the release would wake this very task.
        drop(lost);
        if let Some(releasing) = guard.end_body() {
            *self = Self::Releasing { releasing, guard };
        }
    }

    /// Ready when no release is awaited. It takes at most two request timeouts, and then goes on in the background.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Self::Releasing { releasing, guard } = self {
            // An event reports a failed release. The body stands.
            guard.on_body_released(&ready!(Pin::new(releasing).poll(cx)));
            *self = Self::Unlocked;
        }
        Poll::Ready(())
    }

    pub(super) const fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// Whether nothing is left to release.
    pub(super) const fn is_over(&self) -> bool {
        matches!(self, Self::Unlocked)
    }
}
