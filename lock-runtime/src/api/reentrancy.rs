//! Which locks the running task holds, so that a call for one of them is an error instead of a wait for
//! oneself.

use std::cell::RefCell;
use std::sync::Arc;

use tokio::task;

use crate::api::guard::LockGuard;
use crate::base::key::Key;
use crate::lease::lease::Lease;
use crate::lock::core::Engine;

thread_local! {
    /// The locks around the code that runs on this thread right now, innermost last. Filled for the
    /// length of one poll, so that it follows a task across threads and is not seen by other tasks.
    static AROUND: RefCell<Vec<Hold>> = const { RefCell::new(Vec::new()) };
}

/// A lock around the running code.
struct Hold {
    guard: LockGuard,
    /// The tokio task whose body is polled under the lock. A `LocalSet` polls its tasks within the poll of another one.
    task: Option<task::Id>,
}

impl Hold {
    fn new(guard: &LockGuard) -> Self {
        Self { guard: guard.view(), task: task::try_id() }
    }

    fn is_of_this_task(&self) -> bool {
        self.task == task::try_id()
    }
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

    AROUND.with_borrow_mut(|around| around.push(Hold::new(guard)));
    let _leave = Leave;
    poll()
}

/// The innermost lock of this task around the running code that has one of `keys` of this pool.
pub(crate) fn holder(engine: &Arc<Engine>, keys: &[Key]) -> Option<LockGuard> {
    let holds = |hold: &&Hold| {
        let guard = &hold.guard;
        Arc::ptr_eq(guard.engine(), engine)
            && guard.keys().iter().any(|key| keys.contains(key))
            && hold.is_of_this_task()
    };
    AROUND.with_borrow(|around| around.iter().rev().find(holds).map(|hold| hold.guard.view()))
}

/// Whether the running code is polled by the body that holds `lease`.
pub(crate) fn is_within(lease: &Arc<Lease>) -> bool {
    let holds = |hold: &Hold| Arc::ptr_eq(hold.guard.lease(), lease) && hold.is_of_this_task();
    AROUND.with_borrow(|around| around.iter().rev().any(holds))
}
