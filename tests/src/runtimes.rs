//! Runtimes that a test may end.

use tokio::runtime::{Builder, Runtime};

/// One on the thread that blocks on it.
pub fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime can be started")
}

/// One with two threads of its own.
pub fn multi_thread() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime can be started")
}
