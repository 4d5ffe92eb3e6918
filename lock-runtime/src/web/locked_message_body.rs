//! A response body of actix-web that keeps a lock until it has ended.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, MessageBody};
use actix_web::web::Bytes;
use pin_project_lite::pin_project;

use crate::web::body_lock::{BodyLock, DropOfBody};

pin_project! {
    /// The body of a response from a [`LockedService`](super::LockedService). With
    /// [`until_body_end`](super::LockMiddleware::until_body_end) it holds the lock until the inner body has ended, or until it
    /// is dropped. It ends itself when the release is answered, or after two request timeouts. If the lock is lost before
    /// that, the body ends with the [`LockError`](crate::LockError).
    pub struct LockedMessageBody<B> {
        dropping: DropOfBody,
        // `None` after the end, and for a body that is not sent.
        #[pin]
        inner: Option<B>,
        // The chunk that ends the body. It waits for the release.
        last: Option<Result<Bytes, Box<dyn Error>>>,
        // The bytes that are still to come, if the body tells their number.
        missing: Option<u64>,
        // After the inner body is dropped.
        size: BodySize,
        lock: BodyLock,
    }
}

impl<B> LockedMessageBody<B> {
    pub(super) fn new(inner: B, size: BodySize, lock: BodyLock) -> Self {
        let missing = match size {
            BodySize::Sized(bytes) => Some(bytes),
            BodySize::None | BodySize::Stream => None,
        };
        let dropping = lock.drop_of_body();
        Self { dropping, inner: Some(inner), last: None, missing, size: BodySize::None, lock }
    }

    /// In place of a body of which no chunk is sent. It ends immediately: over HTTP/1 actix-web polls the body of a response to
    /// `HEAD` to its end, even if the client is gone.
    pub(super) fn unsent(size: BodySize) -> Self {
        let lock = BodyLock::Unlocked;
        Self { dropping: lock.drop_of_body(), inner: None, last: None, missing: None, size, lock }
    }
}

impl<B> fmt::Debug for LockedMessageBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedMessageBody")
            .field("is_locked", &self.lock.is_held())
            .finish_non_exhaustive()
    }
}

impl<B: MessageBody> MessageBody for LockedMessageBody<B> {
    type Error = Box<dyn Error>;

    fn size(&self) -> BodySize {
        self.inner.as_ref().map_or(self.size, MessageBody::size)
    }

    fn poll_next(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = self.project();
        let missing = this.missing;
        let is_last = |_: &B, chunk: &Bytes| {
            *missing = missing.map(|missing| missing.saturating_sub(chunk.len() as u64));
            *missing == Some(0)
        };
        let poll =
            |inner: Pin<&mut B>, cx: &mut Context<'_>| inner.poll_next(cx).map_err(Into::into);
        this.lock.poll_part(this.inner, this.last, cx, poll, is_last)
    }

    // A body that is taken as bytes is not polled any more, and its lock has to last until its end.
    fn try_into_bytes(self) -> Result<Bytes, Self> {
        match self {
            Self { dropping, inner: Some(inner), last, missing, size, lock } if lock.is_over() => {
                let inner = inner.try_into_bytes();
                inner.map_err(|inner| Self {
                    dropping,
                    inner: Some(inner),
                    last,
                    missing,
                    size,
                    lock,
                })
            }
            other => Err(other),
        }
    }
}
