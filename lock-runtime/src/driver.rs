//! The background thread that owns connections, timers and everything that must outlive a caller.

use std::future::Future;
use std::thread;

use once_cell::sync::OnceCell;
use tokio::runtime::{Builder, Handle};
use tokio::task::AbortHandle;

use crate::error::{ErrorKind, LockError};

/// Runs a pool's futures: by default on one thread of its own, which the whole process shares. So a
/// lease is renewed while every thread of the caller's runtime is blocked, a release is sent although
/// that runtime is gone, and a pool serves callers of any executor.
#[derive(Clone, Debug)]
pub(crate) struct Driver(Handle);

impl Driver {
    /// The process's driver thread, started when first asked for. It ends with the process.
    pub(crate) fn background() -> Result<Self, LockError> {
        static DRIVER: OnceCell<Driver> = OnceCell::new();
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
        let handle = runtime.handle().clone();
        thread::Builder::new()
            .name("lock-driver".to_owned())
            .spawn(move || runtime.block_on(std::future::pending::<()>()))
            .map_err(failed)?;
        Ok(Self(handle))
    }

    /// The tokio runtime of the caller, for deterministic tests under paused time.
    pub(crate) fn current() -> Result<Self, LockError> {
        Handle::try_current().map(Self).map_err(|_| {
            LockError::new(
                ErrorKind::Config,
                "`on_current_runtime` was used outside of a tokio runtime",
            )
            .remedy("call it from `#[tokio::test]`, or leave it out to use the driver thread")
        })
    }

    pub(crate) fn enter(&self) -> tokio::runtime::EnterGuard<'_> {
        self.0.enter()
    }

    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.0.spawn(future).abort_handle()
    }

    /// Runs `future` to its end on the driver, also if the caller stops waiting for it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, LockError> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        self.spawn(async move {
            let _ = reply.send(future.await);
        });
        answer.await.map_err(|_| Self::gone())
    }

    /// The error for an answer that will never come: the driver's runtime has ended.
    #[cold]
    pub(crate) fn gone() -> LockError {
        LockError::new(ErrorKind::Shutdown, "the runtime that drives the pool has ended")
            .remedy("a pool built with `on_current_runtime` must not outlive that runtime")
    }
}
