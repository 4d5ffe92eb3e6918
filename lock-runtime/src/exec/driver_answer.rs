//! The answer of the driver to a call.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;

use crate::base::error::LockError;
use crate::base::process::Process;
use crate::exec::driver::Driver;

/// The answer of a task of the driver. It never arrives if the driver's runtime has ended, or in a process that was forked from
/// the one of the pool; both are errors. Dropping it ends the wait. In a forked process, nothing is woken by that.
#[derive(Debug)]
pub(crate) struct DriverAnswer<T> {
    /// `None` once it has been received.
    receiver: Option<oneshot::Receiver<Result<T, LockError>>>,
    /// The process of the pool.
    process: Process,
}

impl<T> DriverAnswer<T> {
    pub(crate) fn new(
        receiver: oneshot::Receiver<Result<T, LockError>>,
        process: &Process,
    ) -> Self {
        Self { receiver: Some(receiver), process: process.clone() }
    }

    /// Ends the wait for the answer. Returns whether this process was waiting for it.
    pub(crate) fn close(&mut self) -> bool {
        let Some(receiver) = self.receiver.take() else { return false };
        let is_current = self.process.is_current();
        if !is_current {
            // The other end belongs to the parent process, and nothing must be woken here.
            Box::leak(Box::new(receiver));
        }
        is_current
    }
}

impl<T> Future for DriverAnswer<T> {
    type Output = Result<T, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.process.is_current() {
            return Poll::Ready(Err(LockError::inherited()));
        }
        let Some(receiver) = &mut self.receiver else { return Poll::Pending };
        let answer = ready!(Pin::new(receiver).poll(cx));
        self.receiver = None;
        Poll::Ready(answer.unwrap_or_else(|_| Err(Driver::stopped_error())))
    }
}

impl<T> Drop for DriverAnswer<T> {
    fn drop(&mut self) {
        self.close();
    }
}
