//! The tasks that listen for the end of a lease.

use std::task::Waker;

use crate::exec::panic_boundary;

/// The wakers of listening tasks, by growing numbers. The end of the lease takes them out, and wakes each once.
#[derive(Debug, Default)]
#[must_use = "a listener that is not woken never resolves"]
pub(crate) struct Listeners {
    wakers: Vec<(u64, Waker)>,
    last_id: u64,
}

impl Listeners {
    /// Keeps `waker` for `listener`, which gets a number if it has none. Returns the waker that it replaces.
    ///
    /// The caller drops the replaced waker without a lock: the last waker of a task may drop the task, and with it another
    /// listener.
    pub(super) fn register(&mut self, listener: &mut Option<u64>, waker: &Waker) -> Option<Waker> {
        if let Some(at) = listener.and_then(|id| self.find(id)) {
            let (_, known) = &mut self.wakers[at];
            let is_same = known.will_wake(waker);
            return (!is_same).then(|| std::mem::replace(known, waker.clone()));
        }
        self.last_id += 1;
        self.wakers.push((self.last_id, waker.clone()));
        *listener = Some(self.last_id);
        None
    }

    /// Removes the listener. The caller drops its waker without a lock, as with [`register`](Self::register).
    pub(super) fn remove(&mut self, listener: u64) -> Option<Waker> {
        self.find(listener).map(|at| self.wakers.remove(at).1)
    }

    fn find(&self, id: u64) -> Option<usize> {
        self.wakers.binary_search_by_key(&id, |listener| listener.0).ok()
    }

    /// Wakes all of them. Not under a lock: a waker is code of the program.
    pub(crate) fn wake(self) {
        for (_, waker) in self.wakers {
            panic_boundary::wake(waker);
        }
    }
}
