//! A response body of the `http` crate that keeps a lock until it has ended.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::web::body_lock::{BodyLock, DropOfBody};

pin_project! {
    /// The body of a response from a [`LockService`](super::LockService). With
    /// [`until_body_end`](super::LockLayer::until_body_end) it holds the lock until the inner body has ended, or until it is
    /// dropped. It ends itself when the release is answered, or after two request timeouts. If the lock is lost before that,
    /// the body ends with the [`LockError`](crate::LockError).
    pub struct LockedBody<B: Body> {
        dropping: DropOfBody,
        // `None` for the response to an error, and after the end.
        #[pin]
        inner: Option<B>,
        // The frame that ends the body. It waits for the release.
        last: Option<Result<Frame<B::Data>, BoxError>>,
        // Of a body that is not sent.
        unsent: Option<SizeHint>,
        lock: BodyLock,
    }
}

type BoxError = Box<dyn Error + Send + Sync>;

impl<B: Body> LockedBody<B> {
    pub(super) fn new(inner: B, lock: BodyLock) -> Self {
        Self { dropping: lock.drop_of_body(), inner: Some(inner), last: None, unsent: None, lock }
    }

    /// The body of an error.
    pub(super) fn problem(text: B::Data) -> Self {
        let last = Some(Ok(Frame::data(text)));
        Self { last, ..Self::empty() }
    }

    /// In place of a body of which no frame is sent.
    pub(super) fn unsent(size: SizeHint) -> Self {
        Self { unsent: Some(size), ..Self::empty() }
    }

    fn empty() -> Self {
        let lock = BodyLock::Unlocked;
        Self { dropping: lock.drop_of_body(), inner: None, last: None, unsent: None, lock }
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
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.project();
        // No server polls a body again after its trailers.
        let is_last = |inner: &B, frame: &Frame<_>| frame.is_trailers() || inner.is_end_stream();
        let poll =
            |inner: Pin<&mut B>, cx: &mut Context<'_>| inner.poll_frame(cx).map_err(Into::into);
        this.lock.poll_part(this.inner, this.last, cx, poll, is_last)
    }

    fn is_end_stream(&self) -> bool {
        match (&self.inner, &self.unsent) {
            (Some(inner), _) => self.lock.is_over() && inner.is_end_stream(),
            (None, Some(size)) => size.exact() == Some(0),
            (None, None) => self.lock.is_over() && self.last.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.inner, &self.unsent, &self.last) {
            (Some(inner), ..) => inner.size_hint(),
            (None, Some(size), _) => Clone::clone(size),
            (None, None, Some(Ok(frame))) => {
                SizeHint::with_exact(frame.data_ref().map_or(0, |data| data.remaining() as u64))
            }
            (None, None, _) => SizeHint::with_exact(0),
        }
    }
}
