//! Runs code from outside the crate: stores, wakers, subscribers of events. A panic in it does not end the pool's own work.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::sync::oneshot;

use crate::base::backend_error::{BackendError, FailureKind};

/// The message of a panic.
#[derive(Debug)]
pub(crate) struct Panic(String);

impl Panic {
    fn new(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        Self(text.unwrap_or("no text").to_owned())
    }

    #[cfg(feature = "testing")]
    pub(crate) fn message(&self) -> &str {
        &self.0
    }

    /// The failure of a request to a store that panicked. The request may have been applied by then.
    #[cold]
    pub(crate) fn into_error(self) -> BackendError {
        BackendError::new(FailureKind::MaybeApplied, format!("the store panicked: {}", self.0))
            .remedy("it is a bug of the `Backend`: let it answer with a `BackendError` instead")
    }
}

/// Runs `code` until it returns or panics.
pub(crate) fn call<T>(code: impl FnOnce() -> T) -> Result<T, Panic> {
    catch_unwind(AssertUnwindSafe(code)).map_err(|payload| Panic::new(&*payload))
}

/// Wakes a task.
pub(crate) fn wake(waker: Waker) {
    // The panic hook has reported it. It is the task's executor that does not poll it again.
    let _ = call(|| waker.wake());
}

/// Sends `answer`, and wakes its receiver. Without a receiver the answer is dropped here.
pub(crate) fn answer<T>(reply: oneshot::Sender<T>, answer: T) {
    let _ = call(|| drop(reply.send(answer)));
}

/// Runs `future` until it completes or panics. The output is that of `on_panic` then.
pub(crate) fn run<F: Future>(
    future: F,
    on_panic: impl FnOnce(Panic) -> F::Output,
) -> impl Future<Output = F::Output> {
    Contained { future: Some(future), on_panic: Some(on_panic) }
}

pin_project_lite::pin_project! {
    /// A future and what replaces its output if it panics. It is dropped at its end, so that a panic in its drop counts too.
    struct Contained<F, P> {
        #[pin]
        future: Option<F>,
        on_panic: Option<P>,
    }
}

impl<F: Future, P: FnOnce(Panic) -> F::Output> Future for Contained<F, P> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let polled = call(|| match this.future.as_mut().as_pin_mut() {
            Some(future) => future.poll(cx),
            None => Poll::Pending,
        });
        let output = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(output)) => Ok(output),
            Err(panic) => Err(panic),
        };
        let dropped = call(|| this.future.set(None));
        match (output.and_then(|output| dropped.map(|()| output)), this.on_panic.take()) {
            (Ok(output), _) => Poll::Ready(output),
            (Err(panic), Some(on_panic)) => Poll::Ready(on_panic(panic)),
            // It has been polled after its end.
            (Err(_), None) => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        struct Drops;
        impl Drop for Drops {
            fn drop(&mut self) {
                panic!("in its drop");
            }
        }

        assert_eq!(run(async { 7 }, |panic| panic!("{panic:?}")).await, 7);
        let panics = run(async { panic!("at {}", 7) }, |panic| panic.into_error().to_string());
        assert!(panics.await.contains("at 7"));
        let ends = async {
            let _drops = Drops;
            tokio::task::yield_now().await;
            String::new()
        };
        assert_eq!(run(ends, |panic| panic.0).await, "in its drop");
    }
}
