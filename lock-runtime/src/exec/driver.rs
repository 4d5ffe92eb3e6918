//! The background thread that owns connections, timers and all work that outlives its caller.

use std::future::Future;
use std::pin::Pin;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::base::error::{ErrorKind, LockError};
use crate::base::process::OfProcess;
use crate::base::sync::{self, spawn, spawn_on};
use crate::exec::panic_boundary;

/// Runs a pool's futures, by default on one thread that all pools of the process share. So a lease is renewed while
/// every thread of the caller's runtime is blocked, and a release is sent after that runtime has ended. A pool serves
/// callers of any executor.
#[derive(Clone, Debug)]
pub(crate) struct Driver {
    runtime: Handle,
    /// Work from other threads. Work that arrives while the driver is busy is started together: one wake-up, and one write
    /// to the store.
    intake: UnboundedSender<Work>,
}

/// A future that the driver runs to its end.
pub(super) type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How much work is started before the started work is polled.
const BATCH: usize = 256;

impl Driver {
    /// The process's driver thread, started when first requested. It ends with the process.
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
        // Built by its own thread: a runtime that is dropped in a task of another one panics.
        let (reply, built) = std::sync::mpsc::channel();
        let run = move || match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                let _ = reply.send(Ok(runtime.handle().clone()));
                runtime.block_on(std::future::pending::<()>());
            }
            Err(error) => drop(reply.send(Err(error))),
        };
        thread::Builder::new().name("lock-driver".to_owned()).spawn(run).map_err(failed)?;
        let runtime = built.recv().unwrap_or_else(|_| Err(std::io::Error::other("it has ended")));
        Ok(Self::on(runtime.map_err(failed)?))
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

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn enter(&self) -> sync::Context<'_> {
        sync::enter(&self.runtime)
    }

    /// Runs `future` to its end.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        // Fails only after the runtime has ended, when nothing runs any more.
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

    /// Runs `future` to its end on the driver, even if the caller is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        let (reply, answer) = oneshot::channel();
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

async fn take_in(mut work: UnboundedReceiver<Work>) {
    let mut batch = Vec::with_capacity(BATCH);
    while work.recv_many(&mut batch, BATCH).await > 0 {
        for future in batch.drain(..) {
            spawn(future);
        }
    }
}
