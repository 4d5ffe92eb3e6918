//! The background thread that owns connections, timers and all work that outlives its caller.

use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, PoisonError};
use std::task::{self, Poll, Wake, Waker};
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::{AbortHandle, unconstrained};

use crate::base::error::{ErrorKind, LockError};
use crate::base::process::OfProcess;
use crate::base::sync::{self, Mutex, spawn, spawn_on};
use crate::exec::panic_boundary;

/// Runs a pool's futures, by default on one thread that all pools of the process share. So a lease is renewed while every
/// thread of the caller's runtime is blocked, a release is sent after that runtime has ended, and a pool serves callers of
/// any executor.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    runtime: Handle,
    /// Work from other threads. Work that arrives while the driver is busy is started together: one wake-up, and one write
    /// to the store.
    intake: UnboundedSender<Work>,
}

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How much work is started before the started work is polled.
const BATCH: usize = 256;

impl Driver {
    /// The process's driver thread, started when first asked for. It ends with the process.
    pub(crate) fn background() -> Result<Self, LockError> {
        static DRIVER: OfProcess<Driver> = OfProcess::new();
        DRIVER.get_or_try_init(Self::start).cloned()
    }

    fn start() -> Result<Self, LockError> {
        let failed = |error: std::io::Error| {
            LockError::new(
                ErrorKind::Config,
                format!("the lock-driver thread cannot be started: {error}"),
            )
            .remedy("raise the process's limits on threads and file descriptors")
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let driver = Self::on(runtime.handle().clone());
        thread::Builder::new()
            .name("lock-driver".to_owned())
            .spawn(move || runtime.block_on(std::future::pending::<()>()))
            .map_err(failed)?;
        Ok(driver)
    }

    /// The tokio runtime of the caller, for deterministic tests under paused time.
    pub(crate) fn current() -> Result<Self, LockError> {
        Handle::try_current().map(Self::on).map_err(|_| {
            LockError::new(
                ErrorKind::Config,
                "`on_current_runtime` was used outside of a tokio runtime",
            )
            .remedy("call it from `#[tokio::test]`, or leave it out to use the driver thread")
        })
    }

    fn on(runtime: Handle) -> Self {
        let (intake, work) = mpsc::unbounded_channel();
        spawn_on(&runtime, take_in(work));
        Self { runtime, intake }
    }

    /// Runs `future` to its end: on this thread until it first waits, then on the driver.
    pub(crate) fn poll_then_spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        poll_then_spawn(&self.runtime, future);
    }

    pub(crate) fn enter(&self) -> sync::Context<'_> {
        sync::enter(&self.runtime)
    }

    /// Runs `future` to its end.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        // Fails only after the runtime has ended, and then nothing runs any more.
        let _ = self.intake.send(Box::pin(future));
    }

    /// Whether the runtime has ended, and nothing runs any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.intake.is_closed()
    }

    /// Runs `future` until it is aborted.
    pub(crate) fn spawn_abortable(
        &self,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        spawn_on(&self.runtime, future)
    }

    /// Runs `future` to its end on the driver, also if the caller is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.spawn(async move {
            panic_boundary::answer(reply, future.await);
        });
        answer.await.map_err(|_| Self::stopped_error())
    }

    /// The error for an answer that never arrives, because the driver's runtime has ended.
    #[cold]
    pub(crate) fn stopped_error() -> LockError {
        LockError::new(ErrorKind::PoolClosed, "the runtime that drives the pool has ended")
            .remedy("a pool built with `on_current_runtime` must not outlive that runtime")
    }
}

/// Runs `future` to its end: on this thread until it first waits, then on `runtime` once it is woken. A panic ends it, and
/// nothing else.
pub(crate) fn poll_then_spawn(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
    let mut work: Work = Box::pin(future);
    // At the end of a thread its runtime context cannot be entered any more.
    if Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed()) {
        spawn_on(runtime, work);
        return;
    }
    let task = Arc::new(InlineTask { runtime: runtime.clone(), stage: Mutex::new(Stage::Running) });
    let waker = Waker::from(task.clone());
    // With an exhausted budget the future would be woken when the caller yields its thread, or never.
    let mut first_steps = pin!(unconstrained(work.as_mut()));
    let first_poll = catch_unwind(AssertUnwindSafe(|| {
        // Timers belong to the driver, on every thread.
        let _context = sync::enter(runtime);
        first_steps.as_mut().poll(&mut task::Context::from_waker(&waker))
    }));
    if let Ok(Poll::Pending) = first_poll {
        task.rest(work);
    }
}

/// Work that was first polled on the thread of its caller.
struct InlineTask {
    runtime: Handle,
    stage: Mutex<Stage>,
}

enum Stage {
    /// In its first poll.
    Running,
    /// In its first poll, and woken meanwhile.
    Woken,
    Resting(ParkedTask),
    /// Spawned on the runtime.
    Moved,
}

impl InlineTask {
    /// Keeps `work` until it is woken.
    fn rest(&self, work: Work) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Running = *stage {
            *stage = Stage::Resting(ParkedTask(Some(work)));
        } else {
            *stage = Stage::Moved;
            drop(stage);
            spawn_on(&self.runtime, work);
        }
    }
}

impl Wake for InlineTask {
    fn wake(self: Arc<Self>) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        match mem::replace(&mut *stage, Stage::Moved) {
            Stage::Running | Stage::Woken => *stage = Stage::Woken,
            Stage::Resting(rest) => {
                drop(stage);
                spawn_on(&self.runtime, rest.go_on());
            }
            Stage::Moved => {}
        }
    }
}

/// Work that waits for its first wake-up. The waker may hold any lock, so a drop after the end of the runtime moves the work
/// to the driver.
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

async fn take_in(mut work: UnboundedReceiver<Work>) {
    let mut batch = Vec::with_capacity(BATCH);
    while work.recv_many(&mut batch, BATCH).await > 0 {
        for future in batch.drain(..) {
            spawn(future);
        }
    }
}
