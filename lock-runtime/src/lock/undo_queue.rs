//! What unanswered requests may have left in the store, until it is released.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backend::{LeaseRef, ReleaseOutcome, ReleaseRequest};
use crate::base::backend_error::BackendError;
use crate::base::clock::Instant;
use crate::base::sync::{Mutex, MutexGuard};
use crate::lease::tracker::InFlightToken;

/// Entries of one request to the store.
const BATCH: usize = 128;

/// Entries of a pool, about 250 bytes each. Beyond that, the entry that has been due for the longest time is left to its
/// ttl.
const MOST: usize = 65_536;

/// A store that was frozen may serve a request this long after the ttl of its grant. A request that is served even later
/// blocks its keys for one ttl.
const LATEST: Duration = Duration::from_secs(60);

/// The longest pause between two requests for one entry.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What requests of one owner token may have left in the store, or may leave there when they are served late.
#[derive(Debug)]
pub(crate) struct Leftover {
    pub(crate) lease: LeaseRef,
    /// A release keeps the keys locked until then.
    pub(crate) locked_until: Instant,
    /// When the store has forgotten the unanswered requests. An answer to a later release ends the undo.
    pub(crate) ambiguous_until: Instant,
    /// When the store has forgotten all requests, answered or not. An undo without any answer goes on until then.
    pub(crate) forgotten_at: Instant,
    /// Once releases have ended this many grants, the undo ends earlier.
    pub(crate) grants: usize,
}

/// The undo of a [`Leftover`], and its progress. Dropping it leaves the rest to its ttl.
#[derive(Debug)]
pub(super) struct Undo {
    leftover: Leftover,
    /// Grants that a release has ended.
    undone: usize,
    is_answered: bool,
    pause: Duration,
    _token: InFlightToken,
}

impl Undo {
    pub(super) fn new(leftover: Leftover, token: InFlightToken) -> Self {
        Self {
            leftover,
            undone: 0,
            is_answered: false,
            pause: Duration::from_millis(20),
            _token: token,
        }
    }

    /// The release request at `now`.
    pub(super) fn request(&self, now: Instant) -> ReleaseRequest {
        ReleaseRequest {
            free_after: self.leftover.locked_until.since(now),
            ..ReleaseRequest::new(self.leftover.lease.clone())
        }
    }

    /// The answer to `request`. Returns when to send it again; `None` if that is not needed.
    pub(super) fn on_outcome(
        &mut self,
        request: &ReleaseRequest,
        outcome: &Result<ReleaseOutcome, BackendError>,
        now: Instant,
    ) -> Option<Instant> {
        self.is_answered |= outcome.is_ok();
        match outcome {
            Ok(_) if now >= self.leftover.ambiguous_until => return None,
            Ok(ReleaseOutcome::NotHeld) | Err(_) => {}
            Ok(_) if request.free_after.is_zero() => self.undone += 1,
            Ok(_) => {}
        }
        if self.is_answered && self.undone >= self.leftover.grants {
            return None;
        }
        let due = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Some(due)
    }

    /// Whether the store has answered at all. A shutdown waits for requests that have arrived at the store, not for
    /// those that may never arrive.
    pub(super) fn is_answered(&self) -> bool {
        self.is_answered
    }

    fn is_too_late(&self, now: Instant) -> bool {
        now >= self.leftover.ambiguous_until.max(self.leftover.forgotten_at) + LATEST
    }
}

/// The undos of a pool that are not complete after their first requests, by the time of the next request.
///
/// One task works on them, from the first entry until there is none. The number of entries is bounded by [`MOST`].
#[derive(Debug, Default)]
pub(crate) struct UndoQueue(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    by_due: BTreeMap<(Instant, u64), Undo>,
    last_id: u64,
    /// Whether a task works on them.
    has_worker: bool,
}

/// What the task does next.
pub(super) enum UndoStep {
    Send(Vec<Undo>),
    WaitUntil(Instant),
    Over,
}

/// How the pool limits its undos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UndoScope {
    All,
    /// The store is silent: without entries that are too late.
    Silent,
    /// The pool shuts down: without entries that are too late, and without answered ones.
    Closing,
    /// The pool has shut down.
    None,
}

impl UndoQueue {
    /// Adds `undo`, due at `due`. Returns whether the caller has to start a task.
    pub(super) fn push(&self, undo: Undo, due: Instant) -> bool {
        let mut entries = self.entries();
        let excess = if entries.by_due.len() >= MOST { entries.by_due.pop_first() } else { None };
        entries.last_id += 1;
        let id = entries.last_id;
        entries.by_due.insert((due, id), undo);
        let had_worker = std::mem::replace(&mut entries.has_worker, true);
        drop(entries);
        drop(excess);
        !had_worker
    }

    /// The next step at `now`. Ends the entries that `scope` excludes.
    pub(super) fn next(&self, now: Instant, scope: UndoScope) -> UndoStep {
        let is_over = |undo: &Undo| match scope {
            UndoScope::All => false,
            UndoScope::Silent => undo.is_too_late(now),
            UndoScope::Closing => undo.is_too_late(now) || undo.is_answered,
            UndoScope::None => true,
        };
        let mut entries = self.entries();
        let mut ended = BTreeMap::new();
        if scope != UndoScope::All {
            let (over, rest) = std::mem::take(&mut entries.by_due)
                .into_iter()
                .partition::<BTreeMap<_, _>, _>(|(_, undo)| is_over(undo));
            (ended, entries.by_due) = (over, rest);
        }
        let step = entries.next(now);
        entries.has_worker = !matches!(step, UndoStep::Over);
        drop(entries);
        drop(ended);
        step
    }

    /// The task has ended early.
    pub(super) fn on_worker_dropped(&self) {
        self.entries().has_worker = false;
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock()
    }
}

impl Entries {
    fn next(&mut self, now: Instant) -> UndoStep {
        let mut due = Vec::new();
        while due.len() < BATCH
            && let Some(first) = self.by_due.first_entry()
        {
            if first.key().0 > now {
                let until = first.key().0;
                let is_empty = due.is_empty();
                return if is_empty { UndoStep::WaitUntil(until) } else { UndoStep::Send(due) };
            }
            due.push(first.remove());
        }
        if due.is_empty() { UndoStep::Over } else { UndoStep::Send(due) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::Owner;
    use crate::base::key::Key;
    use crate::lease::tracker::LeaseTracker;

    fn leftover(ambiguous_until: Instant, forgotten_at: Instant) -> Leftover {
        let (keys, ttl) = ([Key::from_static("k")], Duration::from_secs(1));
        let lease = LeaseRef::new(keys, Owner::random().unwrap(), ttl);
        let locked_until = Instant::ORIGIN;
        Leftover { lease, locked_until, ambiguous_until, forgotten_at, grants: 1 }
    }

    /// An answered grant of an owner that gave up has no unanswered request.
    #[test]
    fn a_grant_is_too_late_to_undo_a_minute_after_the_store_has_forgotten_it() {
        let at = |secs| Instant::ORIGIN + Duration::from_secs(secs);
        let tracker = Arc::new(LeaseTracker::new());
        for (ambiguous_until, forgotten_at) in [(at(0), at(1_000)), (at(1_000), at(0))] {
            for scope in [UndoScope::Silent, UndoScope::Closing] {
                let queue = UndoQueue::default();
                let undo =
                    Undo::new(leftover(ambiguous_until, forgotten_at), tracker.begin_cleanup());
                queue.push(undo, at(2_000));
                assert!(matches!(queue.next(at(1_059), scope), UndoStep::WaitUntil(_)));
                assert!(matches!(queue.next(at(1_060), scope), UndoStep::Over));
            }
        }
    }

    #[test]
    fn the_number_of_entries_is_bounded_and_the_one_that_is_due_first_is_left_to_its_ttl() {
        const EXCESS: usize = 100;
        let tracker = Arc::new(LeaseTracker::new());
        let at = |millis: usize| Instant::ORIGIN + Duration::from_millis(millis as u64);
        let (queue, end) = (UndoQueue::default(), at(usize::MAX >> 32));
        // The last one is due first.
        for n in (0..MOST + EXCESS).rev() {
            queue.push(Undo::new(leftover(end, end), tracker.begin_cleanup()), at(n));
            assert!(queue.entries().by_due.len() <= MOST);
        }
        let first = queue.entries().by_due.keys().next().map(|(due, _)| *due);
        // Each one beyond the bound makes room, which the next one takes.
        assert_eq!(first, Some(at(0)));
        assert_eq!(queue.entries().by_due.len(), MOST);
        let UndoStep::Send(due) = queue.next(end, UndoScope::All) else { panic!("all are due") };
        assert_eq!(due.len(), BATCH);
        assert!(matches!(queue.next(end, UndoScope::None), UndoStep::Over));
        assert_eq!(queue.entries().by_due.len(), 0);
    }
}
