//! The I/O of one connection: a task on the connection's runtime, which a requesting thread may run instead.
//!
//! A request from another thread is written by that thread and does not wait until the task wakes up. The task reads the
//! answers, and continues the work that waits for them.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, ThreadId};

use tokio::task::JoinHandle;

use crate::base::process::Process;
use crate::base::sync::Mutex;
use crate::exec::inline_task::{Woken, woken_by};

/// Owns the I/O task of a connection. When the task ends or this is dropped, the connection ends: every request fails
/// immediately.
pub(crate) struct IoTask {
    task: JoinHandle<()>,
    io: Arc<SharedIo>,
}

impl IoTask {
    /// Spawns a task for `io`, the I/O future of a connection, on the current runtime.
    pub(crate) fn spawn(io: impl Future<Output = ()> + Send + 'static) -> Self {
        let io = SharedIo::new(io);
        Self { task: tokio::spawn(io.clone().run()), io }
    }

    pub(crate) fn io(&self) -> Arc<SharedIo> {
        self.io.clone()
    }

    /// Returns when the connection has ended.
    pub(crate) async fn ended(&mut self) {
        let _ = (&mut self.task).await;
    }
}

impl Drop for IoTask {
    fn drop(&mut self) {
        self.io.stop();
    }
}

/// The I/O future of a connection. At most one thread polls it at a time.
///
/// In a process that was forked from its own it does nothing: the parent uses the socket, and perhaps holds the mutex.
pub(crate) struct SharedIo {
    slot: Mutex<IoSlot>,
    process: Process,
}

struct IoSlot {
    state: IoState,
    /// Wakes the task.
    task: Option<Waker>,
    /// The thread on which the task last ran.
    task_thread: Option<ThreadId>,
    /// Work that other threads have woken, for the task.
    woken: Woken,
}

type IoFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

enum IoState {
    Idle(IoFuture),
    /// An [`IoGuard`] has the future. `woken`: it has to be polled once more.
    Polled {
        woken: bool,
    },
    Ended,
}

impl SharedIo {
    fn new(io: impl Future<Output = ()> + Send + 'static) -> Arc<Self> {
        let state = IoState::Idle(Box::pin(io));
        let woken = Woken::default();
        let slot = Mutex::new(IoSlot { state, task: None, task_thread: None, woken });
        Arc::new(Self { slot, process: Process::current() })
    }

    /// The body of the task.
    async fn run(self: Arc<Self>) {
        struct StopOnDrop(Arc<SharedIo>);
        impl Drop for StopOnDrop {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        // Also ends the connection when the runtime shuts down.
        let _stop = StopOnDrop(self.clone());
        poll_fn(|cx| {
            if !self.process.is_current() {
                return Poll::Pending;
            }
            let woken = {
                let mut slot = self.slot.lock();
                slot.task.get_or_insert_with(|| cx.waker().clone()).clone_from(cx.waker());
                slot.task_thread = Some(thread::current().id());
                mem::take(&mut slot.woken)
            };
            woken.run();
            if let Some(guard) = self.take() {
                guard.poll().run();
            }
            if self.has_ended() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Awaits `request`, and runs the I/O on this thread after the request's first poll if the task runs on another
    /// thread. On the task's own thread the task writes many requests together.
    pub(crate) async fn run_inline<T>(self: &Arc<Self>, request: impl Future<Output = T>) -> T {
        if self.is_task_thread() { request.await } else { self.write_inline(request).await }
    }

    /// Awaits `request`, and runs the I/O on this thread after the request's first poll.
    pub(crate) async fn write_inline<T>(self: &Arc<Self>, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        let mut is_new = true;
        poll_fn(|cx| {
            if !mem::take(&mut is_new) {
                return request.as_mut().poll(cx);
            }
            // Taken before the request is queued, so that queueing it does not wake the task.
            let guard = self.take();
            let poll = request.as_mut().poll(cx);
            if let Some(guard) = guard {
                self.hand_over(guard.poll());
            }
            poll
        })
        .await
    }

    /// Leaves `woken` to the task.
    fn hand_over(&self, woken: Woken) {
        if woken.is_empty() {
            return;
        }
        let mut slot = self.slot.lock();
        if let IoState::Ended = slot.state {
            drop(slot);
            // To the driver.
            drop(woken);
            return;
        }
        slot.woken.append(woken);
        let task = slot.task.clone();
        drop(slot);
        if let Some(task) = task {
            task.wake();
        }
    }

    /// Ends the connection.
    pub(crate) fn stop(&self) {
        if !self.process.is_current() {
            return;
        }
        let mut slot = self.slot.lock();
        let state = mem::replace(&mut slot.state, IoState::Ended);
        let (task, woken) = (slot.task.take(), mem::take(&mut slot.woken));
        drop(slot);
        // Dropping the future fails the pending requests, whose wakers must not run under the lock.
        drop((state, woken));
        if let Some(task) = task {
            task.wake();
        }
    }

    fn is_task_thread(&self) -> bool {
        self.slot.lock().task_thread == Some(thread::current().id())
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.slot.lock().state, IoState::Ended)
    }

    fn take(self: &Arc<Self>) -> Option<IoGuard> {
        let mut slot = self.slot.lock();
        match mem::replace(&mut slot.state, IoState::Polled { woken: true }) {
            IoState::Idle(future) => Some(IoGuard { io: self.clone(), future: Some(future) }),
            IoState::Polled { .. } => None,
            IoState::Ended => {
                slot.state = IoState::Ended;
                None
            }
        }
    }
}

/// The future can make progress: the current guard polls it again, or the task does.
impl Wake for SharedIo {
    fn wake(self: Arc<Self>) {
        let mut slot = self.slot.lock();
        if let IoState::Polled { woken } = &mut slot.state {
            *woken = true;
            return;
        }
        let task = slot.task.clone();
        drop(slot);
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// The I/O future, taken by one thread. Dropping the guard before the future is put back ends the connection.
struct IoGuard {
    io: Arc<SharedIo>,
    future: Option<IoFuture>,
}

impl IoGuard {
    /// Polls the future once and puts it back. Returns the work that the answers have woken.
    fn poll(mut self) -> Woken {
        // This poll covers all wake-ups so far.
        if let IoState::Polled { woken } = &mut self.io.slot.lock().state {
            *woken = false;
        }
        let waker = Waker::from(self.io.clone());
        let Some(future) = &mut self.future else { return Woken::default() };
        let poll = || future.as_mut().poll(&mut Context::from_waker(&waker));
        let (poll, woken) = woken_by(poll);
        if poll.is_pending() {
            self.put_back();
        }
        woken
    }

    fn put_back(&mut self) {
        let mut slot = self.io.slot.lock();
        let IoState::Polled { woken } = slot.state else { return };
        if let Some(future) = self.future.take() {
            slot.state = IoState::Idle(future);
        }
        let task = if woken { slot.task.clone() } else { None };
        drop(slot);
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Drop for IoGuard {
    fn drop(&mut self) {
        if self.future.is_some() {
            self.io.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use shuttle::future::{block_on, spawn};
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::thread;
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::backend::redis::net::direct::{self, DirectConnection};
    use crate::base::sync::scheduler;
    use crate::model_tests::in_order_of;

    type Reply = oneshot::Sender<()>;
    type Connection<R> = (R, Arc<SharedIo>);

    /// A connection whose server answers every request.
    fn connection() -> Connection<mpsc::UnboundedSender<Reply>> {
        let (requests, mut sent) = mpsc::unbounded_channel::<Reply>();
        let io = SharedIo::new(async move {
            while let Some(request) = sent.recv().await {
                let _ = request.send(());
            }
        });
        (requests, io)
    }

    async fn send(requests: mpsc::UnboundedSender<Reply>) -> bool {
        let (request, answer) = oneshot::channel();
        requests.send(request).is_ok() && answer.await.is_ok()
    }

    /// The same without the client library. It ends when it is stopped.
    fn direct_connection() -> Connection<DirectConnection> {
        let (requests, io) = direct::connection(AnswersAll::default());
        (requests, SharedIo::new(io))
    }

    async fn send_direct(requests: DirectConnection) -> bool {
        requests.send(&redis::cmd("PING")).await.is_ok()
    }

    /// A server that answers each command immediately. It takes half of a command at a time, at every second attempt.
    #[derive(Default)]
    struct AnswersAll {
        is_writable: bool,
        received: usize,
        replies: usize,
        reader: Option<Waker>,
    }

    impl AsyncWrite for AnswersAll {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<std::io::Result<usize>> {
            self.is_writable = !self.is_writable;
            if self.is_writable {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let half = redis::cmd("PING").get_packed_command().len() / 2;
            let (count, before) = (bytes.len().min(half), self.received / (2 * half));
            self.received += count;
            self.replies += self.received / (2 * half) - before;
            if let Some(reader) = self.reader.take() {
                reader.wake();
            }
            Poll::Ready(Ok(count))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncRead for AnswersAll {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<std::io::Result<()>> {
            if self.replies == 0 {
                self.reader = Some(cx.waker().clone());
                return Poll::Pending;
            }
            self.replies -= 1;
            buffer.put_slice(b"+PONG\r\n");
            Poll::Ready(Ok(()))
        }
    }

    /// The model has no other wake-ups, so a request that no thread writes blocks forever.
    fn explore<R: Clone + Send + 'static, F: Future<Output = bool> + 'static>(
        is_stopped: bool,
        connect: fn() -> Connection<R>,
        send: fn(R) -> F,
        end: fn(&SharedIo),
    ) {
        const SCHEDULES: usize = 2_000;
        let scenario = move || {
            let (requests, io) = connect();
            let task = spawn(io.clone().run());
            let senders: Vec<_> = (0..3)
                .map(|n| {
                    let (requests, io) = (requests.clone(), io.clone());
                    let once = move || {
                        let request = send(requests.clone());
                        if n > 0 { block_on(io.write_inline(request)) } else { block_on(request) }
                    };
                    thread::spawn(move || (0..2).all(|_| once()) || is_stopped)
                })
                .collect();
            if is_stopped {
                io.stop();
            }
            for sender in senders {
                assert!(sender.join().unwrap(), "a request fails on a connection that is up");
            }
            drop(requests);
            end(&io);
            block_on(task).unwrap();
            assert!(io.has_ended());
        };
        scheduler::set(|| {
            in_order_of(RandomScheduler::new_from_seed(1, SCHEDULES), scenario);
            in_order_of(PctScheduler::new_from_seed(2, 3, SCHEDULES), scenario);
        });
    }

    #[test]
    fn every_request_is_written_whichever_thread_runs_the_io() {
        // The library's future ends when the last sender is dropped.
        explore(false, connection, send, |_| {});
        explore(false, direct_connection, send_direct, SharedIo::stop);
    }

    #[test]
    fn a_stopped_connection_fails_all_requests() {
        explore(true, connection, send, |_| {});
        explore(true, direct_connection, send_direct, |_| {});
    }
}
