//! Work that begins on the thread of its caller.
//!
//! A request is sent from the thread of its caller, which does not wait until the driver wakes up. The work continues
//! where its answer is read, by [`Woken::run`], or on the driver. The I/O of a Redis connection (`io_task.rs`) reads answers
//! within [`woken_by`]; the first poll finds by [`caller`] which connection it may use (`connection.rs`).
//!
//! `Polling` → `Parked` (it waits) → `Ready` (woken within `woken_by`) → `Polling` → `Gone` (ended, or moved to the driver,
//! which also polls work that is woken anywhere else).

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tokio::runtime::{self, Handle};
use tokio::task::unconstrained;

use crate::base::sync::{self, Mutex, spawn_on};
use crate::exec::driver::{Driver, Work};

thread_local! {
    /// The runtime of the caller, while its thread polls work of [`poll_then_spawn`] for the first time.
    static CALLER: Cell<Option<runtime::Id>> = const { Cell::new(None) };
    /// The work that was woken by the current call of [`woken_by`].
    static WOKEN: RefCell<Option<Vec<Arc<InlineTask>>>> = const { RefCell::new(None) };
}

/// Runs `future` to its end: on this thread until it first waits. Later polls are on the thread of a [`Woken::run`], or
/// on `runtime`. A panic ends it, and nothing else.
///
/// [`caller`] returns `caller` during the first poll.
pub(crate) fn poll_then_spawn(
    runtime: &Handle,
    caller: Option<runtime::Id>,
    future: impl Future<Output = ()> + Send + 'static,
) {
    // At the end of a thread its runtime context cannot be entered any more.
    if caller.is_none()
        && Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed())
    {
        spawn_on(runtime, future);
        return;
    }
    let work: Work = Box::pin(future);
    let stage = Mutex::new(Stage::Polling { woken: false });
    let task = Arc::new(InlineTask { runtime: runtime.clone(), stage });
    struct RestoreOnDrop(Option<runtime::Id>);
    impl Drop for RestoreOnDrop {
        fn drop(&mut self) {
            CALLER.set(self.0);
        }
    }
    let _outer = RestoreOnDrop(CALLER.replace(caller));
    task.poll(work);
}

/// The runtime of the caller, while this thread polls work of [`poll_then_spawn`] for the first time.
pub(crate) fn caller() -> Option<runtime::Id> {
    CALLER.get()
}

/// Runs `poll`, and returns the work that it has woken.
pub(crate) fn woken_by<T>(poll: impl FnOnce() -> T) -> (T, Woken) {
    /// Restores the list of an outer call, even after a panic.
    struct Collecting(Option<Vec<Arc<InlineTask>>>);
    impl Collecting {
        fn end(&mut self) -> Woken {
            let woken = WOKEN.try_with(|woken| woken.replace(self.0.take()));
            Woken(woken.ok().flatten().unwrap_or_default())
        }
    }
    impl Drop for Collecting {
        fn drop(&mut self) {
            if std::thread::panicking() {
                drop(self.end());
            }
        }
    }
    let Ok(outer) = WOKEN.try_with(|woken| woken.replace(Some(Vec::new()))) else {
        // At the end of a thread, woken work goes to the driver.
        return (poll(), Woken::default());
    };
    let mut collecting = Collecting(outer);
    let polled = poll();
    (polled, collecting.end())
}

/// Work that can go on. Dropping it moves the work to the driver.
#[derive(Default)]
pub(crate) struct Woken(Vec<Arc<InlineTask>>);

impl Woken {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn append(&mut self, mut others: Self) {
        self.0.append(&mut others.0);
    }

    /// Continues the work on this thread, until it waits again.
    pub(crate) fn run(mut self) {
        for task in mem::take(&mut self.0) {
            if let Some(work) = task.resume() {
                task.poll(work);
            }
        }
    }
}

impl Drop for Woken {
    fn drop(&mut self) {
        for task in self.0.drain(..) {
            if let Some(work) = task.resume() {
                task.move_to_driver(work);
            }
        }
    }
}

/// Work on the thread of its caller, or of a [`Woken::run`].
struct InlineTask {
    runtime: Handle,
    stage: Mutex<Stage>,
}

enum Stage {
    /// `woken`: it can already make progress again.
    Polling { woken: bool },
    /// It waits to be woken.
    Parked(ParkedTask),
    /// It is in the list of a [`Woken`].
    Ready(ParkedTask),
    /// It has ended, or runs on the driver.
    Gone,
}

impl InlineTask {
    fn poll(self: &Arc<Self>, mut work: Work) {
        let waker = Waker::from(self.clone());
        let polled = catch_unwind(AssertUnwindSafe(|| {
            // Timers belong to the driver, on every thread.
            let _context = sync::enter(&self.runtime);
            // With an exhausted budget the future would be woken when the caller yields its thread, or never.
            Pin::new(&mut unconstrained(work.as_mut())).poll(&mut Context::from_waker(&waker))
        }));
        if let Ok(Poll::Pending) = polled {
            self.rest(work);
        } else {
            *self.stage.lock() = Stage::Gone;
        }
    }

    /// Keeps `work` until it is woken.
    fn rest(&self, work: Work) {
        let mut stage = self.stage.lock();
        if let Stage::Polling { woken: false } = *stage {
            *stage = Stage::Parked(ParkedTask(Some(work)));
        } else {
            drop(stage);
            self.move_to_driver(work);
        }
    }

    /// Takes the work, to poll it.
    fn resume(&self) -> Option<Work> {
        let mut stage = self.stage.lock();
        match mem::replace(&mut *stage, Stage::Polling { woken: false }) {
            Stage::Ready(mut parked) => parked.0.take(),
            other => {
                *stage = other;
                None
            }
        }
    }

    fn move_to_driver(&self, work: Work) {
        *self.stage.lock() = Stage::Gone;
        spawn_on(&self.runtime, ParkedTask(Some(work)).go_on());
    }
}

impl Wake for InlineTask {
    fn wake(self: Arc<Self>) {
        let mut stage = self.stage.lock();
        match mem::replace(&mut *stage, Stage::Gone) {
            Stage::Polling { .. } => *stage = Stage::Polling { woken: true },
            Stage::Parked(parked) => {
                *stage = Stage::Ready(parked);
                drop(stage);
                let is_collected = WOKEN.try_with(|woken| {
                    let mut woken = woken.borrow_mut();
                    woken.as_mut().map(|woken| woken.push(self.clone())).is_some()
                });
                // Otherwise to the driver.
                if !is_collected.unwrap_or(false) {
                    drop(Woken(vec![self]));
                }
            }
            Stage::Ready(parked) => {
                *stage = Stage::Ready(parked);
                drop(stage);
                // A timer of the driver does not wait for a thread that has the work in its list.
                let is_collecting = WOKEN.try_with(|woken| woken.borrow().is_some());
                if !is_collecting.unwrap_or(false) {
                    drop(Woken(vec![self]));
                }
            }
            Stage::Gone => {}
        }
    }
}

/// Work that waits to be woken. The waker may hold any lock, so a drop after the end of the runtime moves the work to the
/// driver.
struct ParkedTask(Option<Work>);

impl ParkedTask {
    async fn go_on(mut self) {
        if let Some(work) = self.0.take() {
            work.await;
        }
    }
}

impl Drop for ParkedTask {
    fn drop(&mut self) {
        if let Some(work) = self.0.take()
            && let Ok(driver) = Driver::background()
        {
            driver.spawn(async move { drop(work) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicBool, Ordering};

    use shuttle::future::block_on;
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::thread;
    use tokio::runtime::Builder;
    use tokio::sync::oneshot;

    use super::*;
    use crate::base::sync::scheduler;
    use crate::model_tests::in_order_of;

    /// A future that fails if it is polled on two threads at once.
    fn alone<T>(future: impl Future<Output = T> + Send) -> impl Future<Output = T> + Send {
        let mut future = Box::pin(future);
        let is_polled = AtomicBool::new(false);
        poll_fn(move |cx| {
            assert!(!is_polled.swap(true, Ordering::SeqCst));
            thread::yield_now();
            let poll = future.as_mut().poll(cx);
            is_polled.store(false, Ordering::SeqCst);
            poll
        })
    }

    /// The work waits for two signals. The model has no other wake-ups, so a lost wake-up blocks forever.
    #[test]
    fn work_goes_on_wherever_it_is_woken() {
        const SCHEDULES: usize = 5_000;
        let scenario = || {
            let (one, first) = oneshot::channel();
            let (other, second) = oneshot::channel();
            let (done, ended) = oneshot::channel();
            let work = alone(async move {
                let (first, second): (Result<(), _>, Result<(), _>) = tokio::join!(first, second);
                done.send(first.is_ok() && second.is_ok()).unwrap();
            });
            let runtime = Handle::current();
            let starts = thread::spawn(move || poll_then_spawn(&runtime, None, work));
            let collects = thread::spawn(move || woken_by(|| one.send(())).1.run());
            let wakes = thread::spawn(move || other.send(()));
            assert!(block_on(ended).unwrap());
            starts.join().unwrap();
            collects.join().unwrap();
            wakes.join().unwrap().unwrap();
        };
        scheduler::set(|| {
            in_order_of(RandomScheduler::new_from_seed(1, SCHEDULES), scenario);
            in_order_of(PctScheduler::new_from_seed(2, 3, SCHEDULES), scenario);
        });
    }

    fn runtime() -> runtime::Runtime {
        Builder::new_current_thread().build().unwrap()
    }

    #[test]
    fn the_caller_is_known_during_the_first_poll_alone() {
        let (driver, other) = (runtime(), runtime());
        let id = other.handle().id();
        let (signal, signalled) = oneshot::channel();
        let (report, reported) = oneshot::channel();
        poll_then_spawn(driver.handle(), Some(id), async move {
            let at_first = caller();
            signalled.await.unwrap();
            report.send((at_first, caller())).unwrap();
        });
        assert_eq!(caller(), None);
        let (sent, woken) = woken_by(|| signal.send(()));
        sent.unwrap();
        assert!(!woken.is_empty());
        woken.run();
        assert_eq!(driver.block_on(reported).unwrap(), (Some(id), None));
    }

    #[test]
    fn woken_work_that_is_not_run_goes_on_on_the_driver() {
        let driver = runtime();
        let (signal, signalled) = oneshot::channel();
        let (report, reported) = oneshot::channel();
        poll_then_spawn(driver.handle(), None, async move {
            signalled.await.unwrap();
            report.send(Handle::current().id()).unwrap();
        });
        let (sent, woken) = woken_by(|| signal.send(()));
        sent.unwrap();
        drop(woken);
        assert_eq!(driver.block_on(reported).unwrap(), driver.handle().id());
    }

    #[test]
    fn a_panic_while_work_is_collected_loses_none() {
        let driver = runtime();
        let (signal, signalled) = oneshot::channel();
        let (report, reported) = oneshot::channel();
        poll_then_spawn(driver.handle(), None, async move {
            signalled.await.unwrap();
            report.send(()).unwrap();
        });
        let panics = AssertUnwindSafe(|| {
            woken_by(|| {
                signal.send(()).unwrap();
                panic!("in the client library");
            })
        });
        assert!(catch_unwind(panics).is_err());
        driver.block_on(reported).unwrap();
        // The list of the panic is gone: other work goes to the driver.
        assert!(WOKEN.with_borrow(Option::is_none));
    }
}
