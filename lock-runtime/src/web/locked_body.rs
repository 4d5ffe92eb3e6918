//! A response body that keeps a lock until it has been sent.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::api::guard::{LockGuard, Lost};

pin_project! {
    /// The body of a response from a [`LockService`](super::LockService). With
    /// [`until_body_end`](super::LockLayer::until_body_end) it holds the lock until its last frame, or until it is dropped.
    /// When the lock is lost before, it ends with the [`LockError`](crate::LockError).
    pub struct LockedBody<B> {
        #[pin]
        inner: B,
        held: Option<Held>,
    }
}

struct Held {
    lost: Lost,
    /// Dropped last: released in the background.
    _guard: LockGuard,
}

impl<B> LockedBody<B> {
    pub(super) fn unlocked(inner: B) -> Self {
        Self { inner, held: None }
    }

    pub(super) fn held(inner: B, guard: LockGuard) -> Self {
        Self { inner, held: Some(Held { lost: guard.lost(), _guard: guard }) }
    }
}

/// For the body of an error.
impl<B: From<String>> From<String> for LockedBody<B> {
    fn from(text: String) -> Self {
        Self::unlocked(text.into())
    }
}

impl<B> fmt::Debug for LockedBody<B> {
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
        if let Some(held) = this.held
            && let Poll::Ready(error) = Pin::new(&mut held.lost).poll(cx)
        {
            *this.held = None;
            return Poll::Ready(Some(Err(error.into())));
        }
        let frame = this.inner.poll_frame(cx);
        if let Poll::Ready(None | Some(Err(_))) = frame {
            *this.held = None;
        }
        frame.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
