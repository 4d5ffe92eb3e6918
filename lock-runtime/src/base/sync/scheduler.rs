//! Mutexes and tasks for model tests: shuttle decides their order.

use std::cell::Cell;
use std::fmt;
use std::future::{Future, pending};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::task::AbortHandle;

use crate::base::mutex;

thread_local! {
    static IS_SET: Cell<bool> = const { Cell::new(false) };
}

/// Whether shuttle schedules this thread.
pub(crate) fn is_set() -> bool {
    IS_SET.get()
}

/// A random decision in place of one by a clock. Always false outside of model tests.
pub(crate) fn by_chance() -> bool {
    is_set() && shuttle::rand::Rng::gen_bool(&mut shuttle::rand::thread_rng(), 0.5)
}

/// Runs `run` on this thread with a clock that stands still.
///
/// No timer fires: a task that is not woken hangs forever, and shuttle reports that.
pub(crate) fn set(run: impl FnOnce()) {
    struct ResetOnDrop;
    impl Drop for ResetOnDrop {
        fn drop(&mut self) {
            IS_SET.set(false);
        }
    }
    // Never polled: it only provides the clock and accepts timers.
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    // Leaked after a panic: its timers contain wakers that must not be woken any more.
    let mut runtime = ManuallyDrop::new(Some(runtime));
    {
        let _context = runtime.as_ref().map(tokio::runtime::Runtime::enter);
        IS_SET.set(true);
        let _reset = ResetOnDrop;
        run();
    }
    drop(runtime.take());
}

pub(crate) enum Mutex<T> {
    Std(mutex::Mutex<T>),
    Shuttle(shuttle::sync::Mutex<T>),
}

pub(crate) enum MutexGuard<'a, T> {
    Std(mutex::MutexGuard<'a, T>),
    Shuttle(shuttle::sync::MutexGuard<'a, T>),
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        if is_set() {
            Self::Shuttle(shuttle::sync::Mutex::new(value))
        } else {
            Self::Std(mutex::Mutex::new(value))
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self {
            Self::Std(mutex) => MutexGuard::Std(mutex.lock()),
            Self::Shuttle(mutex) => {
                MutexGuard::Shuttle(mutex.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex").finish_non_exhaustive()
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Std(guard) => guard,
            Self::Shuttle(guard) => guard,
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Std(guard) => guard,
            Self::Shuttle(guard) => guard,
        }
    }
}

pub(crate) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    if is_set() {
        drop(shuttle::future::spawn(future));
    } else {
        tokio::spawn(future);
    }
}

pub(crate) fn spawn_on(
    runtime: &Handle,
    future: impl Future<Output = ()> + Send + 'static,
) -> AbortHandle {
    if !is_set() {
        return runtime.spawn(future).abort_handle();
    }
    spawn(future);
    runtime.spawn(pending::<()>()).abort_handle()
}

/// In a model test the context of the runtime is already entered.
pub(crate) type Context<'a> = Option<EnterGuard<'a>>;

pub(crate) fn enter(runtime: &Handle) -> Context<'_> {
    (!is_set()).then(|| runtime.enter())
}
