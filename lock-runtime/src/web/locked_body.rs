//! A response body of the `http` crate that keeps a lock until it has been sent.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::web::body_lock::BodyLock;

pin_project! {
    /// The body of a response from a [`LockService`](super::LockService). With
    /// [`until_body_end`](super::LockLayer::until_body_end) it holds the lock until its last frame, or until it is dropped.
    /// If the lock is lost before that, the body ends with the [`LockError`](crate::LockError).
    pub struct LockedBody<B: Body> {
        // `None` for the response to an error, and after the end.
        #[pin]
        inner: Option<B>,
        problem: Option<B::Data>,
        lock: BodyLock,
    }
}

impl<B: Body> LockedBody<B> {
    pub(super) fn new(inner: B, lock: BodyLock) -> Self {
        Self { inner: Some(inner), problem: None, lock }
    }

    /// The body of an error.
    pub(super) fn problem(text: B::Data) -> Self {
        Self { inner: None, problem: Some(text), lock: BodyLock::Unlocked }
    }
}

impl<B: Body> fmt::Debug for LockedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedBody")
            .field("is_locked", &self.lock.is_held())
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
        if let Some(text) = this.problem.take() {
            return Poll::Ready(Some(Ok(Frame::data(text))));
        }
        this.lock.poll_part(this.inner, cx, |inner, cx| inner.poll_frame(cx).map_err(Into::into))
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
