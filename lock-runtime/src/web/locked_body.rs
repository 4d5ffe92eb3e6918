//! A response body that keeps a lock until it has been sent.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::api::guard::{LockGuard, Lost};
use crate::api::reentrancy;

pin_project! {
    /// The body of a response from a [`LockService`](super::LockService). With
    /// [`until_body_end`](super::LockLayer::until_body_end) it holds the lock until its last frame, or until it is dropped.
    /// When the lock is lost before, it ends with the [`LockError`](crate::LockError).
    pub struct LockedBody<B: Body> {
        // `None` for the response to an error.
        #[pin]
        inner: Option<B>,
        problem: Option<B::Data>,
        held: Option<Held>,
    }
}

struct Held {
    lost: Lost,
    /// Dropped last: released in the background.
    guard: LockGuard,
}

impl<B: Body> LockedBody<B> {
    pub(super) fn unlocked(inner: B) -> Self {
        Self { inner: Some(inner), problem: None, held: None }
    }

    pub(super) fn held(inner: B, guard: LockGuard) -> Self {
        let held = Held { lost: guard.lost(), guard };
        Self { inner: Some(inner), problem: None, held: Some(held) }
    }

    /// The body of an error.
    pub(super) fn problem(text: B::Data) -> Self {
        Self { inner: None, problem: Some(text), held: None }
    }
}

impl<B: Body> fmt::Debug for LockedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedBody")
            .field("is_locked", &self.held.is_some())
            .finish_non_exhaustive()
    }
}

impl<B> Body for LockedBody<B>
where
    B: Body,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Data = B::Data;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        let Some(inner) = this.inner.as_pin_mut() else {
            return Poll::Ready(this.problem.take().map(|text| Ok(Frame::data(text))));
        };
        let Some(held) = this.held else {
            return inner.poll_frame(cx).map_err(Into::into);
        };
        if let Poll::Ready(error) = Pin::new(&mut held.lost).poll(cx) {
            *this.held = None;
            return Poll::Ready(Some(Err(error.into())));
        }
        // A stream may call for the lock that it has.
        let frame = reentrancy::enter(&held.guard, || inner.poll_frame(cx));
        if let Poll::Ready(None | Some(Err(_))) = frame {
            *this.held = None;
        }
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Some(inner) => inner.is_end_stream(),
            None => self.problem.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.inner, &self.problem) {
            (Some(inner), _) => inner.size_hint(),
            (None, Some(text)) => SizeHint::with_exact(text.remaining() as u64),
            (None, None) => SizeHint::with_exact(0),
        }
    }
}
