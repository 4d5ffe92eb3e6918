//! The future of a task in a wait queue.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::base::error::LockError;
use crate::base::key::Key;
use crate::exec::driver_answer::DriverAnswer;
use crate::queue::key_queue::Waiter;
use crate::queue::wait_queue::WaitQueues;

/// A wait in a queue, or for the answer to a first request. Dropping it leaves the queue. A result that arrives in the
/// same instant is dropped with it: a lease is released, a permit passes to the next waiter.
#[derive(Debug)]
pub(crate) struct Waiting<W: Waiter, T> {
    queues: Arc<WaitQueues<W>>,
    key: Key,
    id: u64,
    answer: DriverAnswer<T>,
}

impl<W: Waiter, T> Waiting<W, T> {
    pub(crate) fn new(
        queues: Arc<WaitQueues<W>>,
        key: Key,
        id: u64,
        answer: DriverAnswer<T>,
    ) -> Self {
        Self { queues, key, id, answer }
    }
}

impl<W: Waiter, T> Future for Waiting<W, T> {
    type Output = Result<T, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer).poll(cx)
    }
}

impl<W: Waiter, T> Drop for Waiting<W, T> {
    fn drop(&mut self) {
        // Closed first: `insert_at_rank` then either sees that the waiter is cancelled, or has inserted it.
        if self.answer.close() {
            self.queues.cancel(&self.key, self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Waker;

    use tokio::sync::oneshot;

    use super::*;
    use crate::base::error::ErrorKind;
    use crate::queue::wait_queue::tests::{KEY, TestWaiter, enqueued, forever, with_permit_out};

    type Queues = Arc<WaitQueues<TestWaiter>>;
    type Reply = oneshot::Sender<Result<u32, LockError>>;

    fn waiter() -> TestWaiter {
        TestWaiter::new("k", false)
    }

    /// The wait of the only waiter that the queue takes, and where its answer goes.
    fn waiting() -> (Queues, Waiting<TestWaiter, u32>, Reply) {
        let queues = Arc::new(with_permit_out(1));
        let id = enqueued(&queues, &waiter());
        let (reply, answer) = oneshot::channel();
        let answer = DriverAnswer::new(answer, &queues.process);
        (queues.clone(), Waiting::new(queues, KEY, id, answer), reply)
    }

    fn poll<T>(wait: Pin<&mut Waiting<TestWaiter, T>>) -> Poll<Result<T, ErrorKind>> {
        let polled = wait.poll(&mut Context::from_waker(Waker::noop()));
        polled.map_err(|error| error.kind())
    }

    #[test]
    fn a_wait_ends_with_its_answer() {
        let (_queues, wait, reply) = waiting();
        let mut wait = pin!(wait);
        assert_eq!(poll(wait.as_mut()), Poll::Pending);
        reply.send(Ok(5)).unwrap();
        assert_eq!(poll(wait.as_mut()), Poll::Ready(Ok(5)));
        assert_eq!(poll(wait), Poll::Pending, "it has been received");
    }

    #[test]
    fn a_wait_without_an_answer_ends_with_its_error() {
        let (_queues, wait, reply) = waiting();
        drop(reply);
        assert_eq!(poll(pin!(wait)), Poll::Ready(Err(ErrorKind::PoolClosed)));
    }

    #[test]
    fn a_wait_that_is_dropped_leaves_the_queue() {
        let (queues, wait, reply) = waiting();
        let refused = queues.enqueue(&KEY, &forever(), waiter()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::QueueFull);
        drop(wait);
        assert!(reply.is_closed());
        enqueued(&queues, &waiter());
    }
}
