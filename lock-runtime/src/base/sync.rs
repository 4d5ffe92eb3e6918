//! Mutexes and tasks of std and tokio. In model tests those of shuttle, which explores schedules.

#[cfg(not(test))]
mod real {
    use std::future::Future;
    use tokio::runtime::{EnterGuard, Handle};
    use tokio::task::AbortHandle;

    pub(crate) use crate::base::mutex::{Mutex, MutexGuard};

    pub(crate) type Context<'a> = EnterGuard<'a>;

    /// Runs `future` to completion on the runtime of the caller, the driver.
    pub(crate) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
        tokio::spawn(future);
    }

    /// Runs `future` on `runtime` until it is aborted.
    pub(crate) fn spawn_on(
        runtime: &Handle,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        runtime.spawn(future).abort_handle()
    }

    pub(crate) fn enter(runtime: &Handle) -> Context<'_> {
        runtime.enter()
    }
}

#[cfg(not(test))]
pub(crate) use real::*;

#[cfg(test)]
pub(crate) mod scheduler;
#[cfg(test)]
pub(crate) use self::scheduler::*;
