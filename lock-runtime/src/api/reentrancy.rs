//! The locks that the running task holds: a call for one of them is an error, or passes through, instead of a deadlock.

use std::cell::RefCell;
use std::sync::Arc;

use tokio::task;

use crate::api::guard::LockGuard;
use crate::base::key::Key;
use crate::lease::lease::{Lease, RunningBody};
use crate::lock::core::PoolCore;

thread_local! {
    /// The locks around the code that runs on this thread, innermost last. Filled during one poll, so it follows a task across
    /// threads, and other tasks do not see it.
    static AROUND: RefCell<Vec<HeldAround>> = const { RefCell::new(Vec::new()) };
}

/// A lock around the running code.
struct HeldAround {
    guard: LockGuard,
    /// The tokio task that polls the body. A `LocalSet` polls its tasks within the poll of another one.
    task: Option<task::Id>,
}

impl HeldAround {
    fn new(guard: &LockGuard) -> Self {
        Self { guard: guard.borrowed(), task: task::try_id() }
    }

    fn is_of_this_task(&self) -> bool {
        self.task == task::try_id()
    }
}

/// Runs `poll` as code under `guard`'s lock, in a body that runs.
pub(crate) fn enter<R>(
    guard: &LockGuard,
    _running: &RunningBody<'_>,
    poll: impl FnOnce() -> R,
) -> R {
    /// Removes the entry even if `poll` panics.
    struct Leave;

    impl Drop for Leave {
        fn drop(&mut self) {
            drop(with_around(Vec::pop));
        }
    }

    with_around(|around| around.push(HeldAround::new(guard)));
    let _leave = Leave;
    poll()
}

/// `None` at the end of a thread, where destructors of thread-local values may still lock.
fn with_around<R>(access: impl FnOnce(&mut Vec<HeldAround>) -> R) -> Option<R> {
    AROUND.try_with(|around| access(&mut around.borrow_mut())).ok()
}

/// The innermost lock of this task, in this pool, that has one of `keys`.
pub(crate) fn find_held(core: &Arc<PoolCore>, keys: &[Key]) -> Option<LockGuard> {
    let holds = |hold: &&HeldAround| {
        let guard = &hold.guard;
        Arc::ptr_eq(guard.core(), core)
            && guard.keys().iter().any(|key| keys.contains(key))
            && hold.is_of_this_task()
    };
    with_around(|around| around.iter().rev().find(holds).map(|hold| hold.guard.borrowed()))?
}

/// The locks of this task in all pools, innermost last.
pub(crate) fn held_by_task() -> Vec<(Arc<PoolCore>, Arc<Lease>)> {
    let held = with_around(|around| {
        let mut held = Vec::<(Arc<PoolCore>, Arc<Lease>)>::new();
        for HeldAround { guard, .. } in around.iter().filter(|hold| hold.is_of_this_task()) {
            // A call that passed through has the lease of an outer call.
            if !held.iter().any(|(_, lease)| Arc::ptr_eq(lease, guard.lease())) {
                held.push((guard.core().clone(), guard.lease().clone()));
            }
        }
        held
    });
    held.unwrap_or_default()
}

/// Whether the body that holds `lease` polls the running code.
pub(crate) fn is_polled_within(lease: &Arc<Lease>) -> bool {
    let holds =
        |hold: &HeldAround| Arc::ptr_eq(hold.guard.lease(), lease) && hold.is_of_this_task();
    with_around(|around| around.iter().rev().any(holds)).unwrap_or(false)
}
