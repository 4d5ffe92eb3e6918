//! A response body of actix-web that keeps a lock until it has been sent.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, MessageBody};
use actix_web::web::Bytes;
use pin_project_lite::pin_project;

use crate::web::body_lock::BodyLock;

pin_project! {
    /// The body of a response from a [`LockedService`](super::LockedService). With
    /// [`until_body_end`](super::LockMiddleware::until_body_end) it holds the lock until its last chunk, or until it is
    /// dropped. If the lock is lost before that, the body ends with the [`LockError`](crate::LockError).
    pub struct LockedMessageBody<B> {
        // `None` after the end.
        #[pin]
        pub(super) inner: Option<B>,
        pub(super) lock: BodyLock,
        // The body of a response to `HEAD` ends immediately. Over HTTP/1 actix-web sends nothing of it, and polls it to its
        // end, even if the client is gone.
        pub(super) is_skipped: bool,
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
        self.inner.as_ref().map_or(BodySize::None, MessageBody::size)
    }

    fn poll_next(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let mut this = self.project();
        if *this.is_skipped {
            this.inner.set(None);
            *this.lock = BodyLock::Unlocked;
            return Poll::Ready(None);
        }
        this.lock.poll_part(this.inner, cx, |inner, cx| inner.poll_next(cx).map_err(Into::into))
    }

    // A body that is taken as bytes is not polled any more, and its lock has to last until it has been sent.
    fn try_into_bytes(self) -> Result<Bytes, Self> {
        let Self { inner, lock, is_skipped } = self;
        let is_held = lock.is_held();
        let kept = |inner| Self { inner, lock, is_skipped };
        match inner {
            Some(inner) if !is_held => inner.try_into_bytes().map_err(|inner| kept(Some(inner))),
            inner => Err(kept(inner)),
        }
    }
}
