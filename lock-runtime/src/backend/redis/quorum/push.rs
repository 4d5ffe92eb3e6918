//! What the nodes of a quorum say without being asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use once_cell::sync::OnceCell;
use tokio::runtime::Handle;

use crate::backend::notifier::NotifySink;
use crate::backend::redis::keyspace::Book;
use crate::backend::redis::quorum::vote_count::Tally;
use crate::backend::{Notifier, Owner};
use crate::base::clock::{Clock, Instant};

/// What they say, until a majority has said it of the same lock.
#[derive(Debug)]
pub(crate) struct Changes {
    notifier: OnceCell<Notifier>,
    nodes: usize,
    /// Which nodes have told of a change since the lock was last asked for.
    by_key: Mutex<HashMap<String, u64>>,
}

impl Changes {
    /// More locks than this are not counted: then each change is told at once.
    const MOST: usize = 10_000;

    pub(crate) fn new(nodes: usize) -> Self {
        Self { notifier: OnceCell::new(), nodes, by_key: Mutex::default() }
    }

    pub(crate) fn subscribe(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// The lock is about to be asked for: what was said so far is known.
    pub(crate) fn forget(&self, key: &str) {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// True if that makes a majority. One node's word may be about a vote that was taken back.
    fn count(&self, key: &str, place: usize) -> bool {
        let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        if by_key.len() >= Self::MOST {
            by_key.clear();
            return true;
        }
        let told = by_key.entry(key.to_owned()).or_default();
        *told |= 1 << place;
        if (told.count_ones() as usize) < Tally::majority_of(self.nodes) {
            return false;
        }
        by_key.remove(key);
        true
    }
}

/// What one node says.
pub(crate) struct MemberEar {
    place: usize,
    changes: Arc<Changes>,
    all: Arc<AllChanged>,
}

impl MemberEar {
    /// Of the node at `place`.
    pub(crate) fn new(place: usize, changes: &Arc<Changes>, clock: Clock) -> Self {
        let all = AllChanged { clock, runtime: Handle::current(), last: Mutex::default() };
        Self { place, changes: changes.clone(), all: Arc::new(all) }
    }
}

impl NotifySink for MemberEar {
    fn key_changed(&self, key: &str) {
        if let Some(notifier) = self.changes.notifier.get()
            && !Book::is_at(key)
            && self.changes.count(key, self.place)
        {
            notifier.key_changed(key);
        }
    }

    /// The node was away or has been emptied: whoever holds a lock takes it there again.
    fn resync(&self) {
        if let Some(notifier) = self.changes.notifier.get() {
            AllChanged::tell(&self.all, notifier);
        }
    }

    fn head_of_queue(&self, _: &str, _: &Owner, _: Duration) -> bool {
        true
    }

    fn contended(&self, _: &str) {}
}

/// A node that comes and goes must not have all leases renewed all the time.
struct AllChanged {
    clock: Clock,
    runtime: Handle,
    last: Mutex<Option<Last>>,
}

/// When all locks were last said to have changed.
#[derive(Clone, Copy)]
enum Last {
    At(Instant),
    /// It will be said again.
    Coming,
}

impl AllChanged {
    const AT_MOST_EVERY: Duration = Duration::from_secs(1);

    /// At once, or as soon as it may be said again.
    fn tell(self: &Arc<Self>, notifier: &Notifier) {
        let now = self.clock.now();
        let mut state = self.last();
        match *state {
            Some(Last::Coming) => {}
            Some(Last::At(last)) if now.since(last) < Self::AT_MOST_EVERY => {
                *state = Some(Last::Coming);
                let (all, notifier) = (self.clone(), notifier.clone());
                self.runtime.spawn(async move {
                    all.clock.sleep_until(last + Self::AT_MOST_EVERY).await;
                    *all.last() = Some(Last::At(all.clock.now()));
                    notifier.resync();
                });
            }
            Some(Last::At(_)) | None => {
                *state = Some(Last::At(now));
                drop(state);
                notifier.resync();
            }
        }
    }

    fn last(&self) -> MutexGuard<'_, Option<Last>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
