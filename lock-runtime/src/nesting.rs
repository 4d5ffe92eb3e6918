//! Which locks the running task holds, so that a call for one of them is an error instead of a wait for
//! oneself.

use std::cell::RefCell;
use std::sync::Arc;

use crate::engine::Engine;
use crate::guard::LockGuard;
use crate::key::Key;

thread_local! {
    /// The locks around the code that runs on this thread right now, innermost last. Filled for the
    /// length of one poll, so that it follows a task across threads and is not seen by other tasks.
    static AROUND: RefCell<Vec<LockGuard>> = const { RefCell::new(Vec::new()) };
}

/// Runs `poll` as code that holds `guard`'s lock.
pub(crate) fn within<R>(guard: &LockGuard, poll: impl FnOnce() -> R) -> R {
    /// Leaves also when `poll` panics.
    struct Leave;

    impl Drop for Leave {
        fn drop(&mut self) {
            let left = AROUND.with_borrow_mut(Vec::pop);
            drop(left);
        }
    }

    AROUND.with_borrow_mut(|around| around.push(guard.view()));
    let _leave = Leave;
    poll()
}

/// The innermost lock around the running code that has one of `keys` of this pool.
pub(crate) fn holder(engine: &Arc<Engine>, keys: &[Key]) -> Option<LockGuard> {
    let holds = |guard: &&LockGuard| {
        Arc::ptr_eq(guard.engine(), engine) && guard.keys().iter().any(|key| keys.contains(key))
    };
    AROUND.with_borrow(|around| around.iter().rev().find(holds).map(LockGuard::view))
}
