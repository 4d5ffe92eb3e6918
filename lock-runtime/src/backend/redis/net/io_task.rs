//! What moves the bytes of one connection: a task on the driver, and now and then the thread that asks. Who asks from
//! another thread writes by itself, and so does not wait until the driver wakes up. The answer comes by the driver.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, ThreadId};

use tokio::task::JoinHandle;

use crate::base::sync::{Mutex, MutexGuard};

/// The task. Its end, and this being dropped, is the end of the connection: every request fails at once.
pub(crate) struct Mover {
    task: JoinHandle<()>,
    bytes: Arc<Bytes>,
}

impl Mover {
    /// Moves by `moving`, which the client library has made for it, on the present runtime.
    pub(crate) fn start(moving: impl Future<Output = ()> + Send + 'static) -> Self {
        let bytes = Bytes::new(moving);
        Self { task: tokio::spawn(bytes.clone().run()), bytes }
    }

    pub(crate) fn bytes(&self) -> Arc<Bytes> {
        self.bytes.clone()
    }

    /// Returns when the connection is over.
    pub(crate) async fn ended(&mut self) {
        let _ = (&mut self.task).await;
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.bytes.stop();
    }
}

/// What is moved, by one thread at a time.
pub(crate) struct Bytes(Mutex<State>);

struct State {
    place: Place,
    /// Wakes the task.
    task: Option<Waker>,
    /// Where the task last ran.
    home: Option<ThreadId>,
}

type Moving = Pin<Box<dyn Future<Output = ()> + Send>>;

enum Place {
    Resting(Moving),
    /// Some thread has it in its hands; `again` if there was a reason meanwhile to look once more.
    InHand {
        again: bool,
    },
    Over,
}

impl Bytes {
    fn new(moving: impl Future<Output = ()> + Send + 'static) -> Arc<Self> {
        let place = Place::Resting(Box::pin(moving));
        Arc::new(Self(Mutex::new(State { place, task: None, home: None })))
    }

    /// The task.
    async fn run(self: Arc<Self>) {
        struct Stops(Arc<Bytes>);
        impl Drop for Stops {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        // Also if the runtime ends.
        let _stops = Stops(self.clone());
        poll_fn(|cx| {
            {
                let mut state = self.state();
                state.task.get_or_insert_with(|| cx.waker().clone()).clone_from(cx.waker());
                state.home = Some(thread::current().id());
            }
            if let Some(hand) = self.take() {
                hand.move_on();
            }
            if self.is_over() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Sends `request` and waits for its answer.
    pub(crate) async fn carry<T>(self: &Arc<Self>, request: impl Future<Output = T>) -> T {
        if self.is_home() { request.await } else { self.carry_from_here(request).await }
    }

    async fn carry_from_here<T>(self: &Arc<Self>, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        let mut is_new = true;
        poll_fn(|cx| {
            if !mem::take(&mut is_new) {
                return request.as_mut().poll(cx);
            }
            // In hand before there is something to move, so that the task need not be woken for it.
            let hand = self.take();
            let poll = request.as_mut().poll(cx);
            if let Some(hand) = hand {
                hand.move_on();
            }
            poll
        })
        .await
    }

    /// Ends the connection.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        let place = mem::replace(&mut state.place, Place::Over);
        let task = state.task.take();
        drop(state);
        // Those who wait for answers are told so.
        drop(place);
        if let Some(task) = task {
            task.wake();
        }
    }

    /// Whether this is the thread on which the task runs: there it is best to write once for many requests.
    fn is_home(&self) -> bool {
        self.state().home == Some(thread::current().id())
    }

    fn is_over(&self) -> bool {
        matches!(self.state().place, Place::Over)
    }

    fn take(self: &Arc<Self>) -> Option<Hand> {
        let mut state = self.state();
        match mem::replace(&mut state.place, Place::InHand { again: true }) {
            Place::Resting(moving) => Some(Hand { bytes: self.clone(), moving: Some(moving) }),
            Place::InHand { .. } => None,
            Place::Over => {
                state.place = Place::Over;
                None
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// There is something to move: for whoever has it in hand, or for the task.
impl Wake for Bytes {
    fn wake(self: Arc<Self>) {
        let mut state = self.state();
        if let Place::InHand { again } = &mut state.place {
            *again = true;
            return;
        }
        let task = state.task.clone();
        drop(state);
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// What is moved, in the hands of one thread. Dropped in them it is the end of the connection.
struct Hand {
    bytes: Arc<Bytes>,
    moving: Option<Moving>,
}

impl Hand {
    /// Moves what can be moved now.
    fn move_on(mut self) {
        // What has come so far is looked at now.
        if let Place::InHand { again } = &mut self.bytes.state().place {
            *again = false;
        }
        let waker = Waker::from(self.bytes.clone());
        let Some(moving) = &mut self.moving else { return };
        if moving.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.put_back();
        }
    }

    fn put_back(&mut self) {
        let mut state = self.bytes.state();
        let Place::InHand { again } = state.place else { return };
        if let Some(moving) = self.moving.take() {
            state.place = Place::Resting(moving);
        }
        let task = if again { state.task.clone() } else { None };
        drop(state);
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        if self.moving.is_some() {
            self.bytes.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use shuttle::future::{block_on, spawn};
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::thread;
    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::base::sync::scheduler;
    use crate::model_tests::in_order_of;

    type Request = oneshot::Sender<()>;

    /// A connection whose server answers what it is sent.
    fn connection() -> (mpsc::UnboundedSender<Request>, Arc<Bytes>) {
        let (requests, mut sent) = mpsc::unbounded_channel::<Request>();
        let bytes = Bytes::new(async move {
            while let Some(request) = sent.recv().await {
                let _ = request.send(());
            }
        });
        (requests, bytes)
    }

    /// Some ask from threads of their own and some from the task's. False if the connection is over.
    fn ask(requests: &mpsc::UnboundedSender<Request>, bytes: &Arc<Bytes>, from_here: bool) -> bool {
        let request = async {
            let (request, answer) = oneshot::channel();
            requests.send(request).is_ok() && answer.await.is_ok()
        };
        if from_here { block_on(bytes.carry_from_here(request)) } else { block_on(request) }
    }

    /// Nothing but what is written here wakes anybody, so a request that nobody moves is stuck for good.
    fn explore(is_stopped: bool) {
        const SCHEDULES: usize = 2_000;
        let play = move || {
            let (requests, bytes) = connection();
            let task = spawn(bytes.clone().run());
            let askers: Vec<_> = (0..3)
                .map(|n| {
                    let (requests, bytes) = (requests.clone(), bytes.clone());
                    thread::spawn(move || {
                        (0..2).all(|_| ask(&requests, &bytes, n > 0)) || is_stopped
                    })
                })
                .collect();
            if is_stopped {
                bytes.stop();
            }
            for asker in askers {
                assert!(asker.join().unwrap(), "a request was refused by a connection that is up");
            }
            // The library's future is over when nobody can ask any more.
            drop(requests);
            block_on(task).unwrap();
            assert!(bytes.is_over());
        };
        scheduler::set(|| {
            in_order_of(RandomScheduler::new_from_seed(1, SCHEDULES), play);
            in_order_of(PctScheduler::new_from_seed(2, 3, SCHEDULES), play);
        });
    }

    #[test]
    fn every_request_is_moved_whoever_has_the_connection_in_hand() {
        explore(false);
    }

    #[test]
    fn a_connection_that_is_stopped_leaves_nobody_waiting() {
        explore(true);
    }
}
