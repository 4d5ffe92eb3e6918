//! What a pool has under way: its leases, its acquires, and whether it still takes new ones.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use crate::base::process::Process;
use crate::base::sync::{Mutex, MutexGuard};
use crate::lease::lease::Lease;

/// Whether a pool takes new acquires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Open,
    /// No new acquires; what is held may end.
    Draining,
    Closed,
}

#[derive(Debug)]
pub(crate) struct Registry {
    roll: Mutex<Roll>,
    last_id: AtomicU64,
    stage: watch::Sender<Stage>,
    /// Counts up with every entry that leaves.
    left: watch::Sender<u64>,
    /// Of the pool.
    process: Process,
}

/// Numbers of leases at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tally {
    pub(crate) released: usize,
    pub(crate) abandoned: usize,
    pub(crate) held: usize,
}

#[derive(Debug, Default)]
struct Roll {
    leases: HashMap<u64, Arc<Lease>>,
    /// Acquires and clean-ups that may still have a request at the store.
    errands: usize,
    /// Of the leases that ended: those that the store confirmed to be free, and the others.
    released: usize,
    abandoned: usize,
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self {
            roll: Mutex::default(),
            last_id: AtomicU64::new(0),
            stage: watch::Sender::new(Stage::Open),
            left: watch::Sender::new(0),
            process: Process::current(),
        }
    }

    /// Whether the pool belongs to a process that this one was forked from. Then none of its locks may be waited for:
    /// a thread that is not here may have had them at the fork.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.stage.borrow() == Stage::Open
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.stage.borrow() == Stage::Closed
    }

    /// Counts an acquire in, or `None` if the pool takes no more.
    pub(crate) fn admit(self: &Arc<Self>) -> Option<Errand> {
        let mut roll = self.roll();
        if !self.is_open() {
            return None;
        }
        roll.errands += 1;
        Some(Errand(self.clone()))
    }

    /// Counts in work that clears up after an acquire; the pool takes it at any stage.
    pub(crate) fn clear_up(self: &Arc<Self>) -> Errand {
        self.roll().errands += 1;
        Errand(self.clone())
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn enroll(&self, lease: &Arc<Lease>) {
        self.roll().leases.insert(lease.id, lease.clone());
    }

    /// `lease` has ended without a release: another one has taken its place.
    pub(crate) fn forget(&self, lease: &Lease) {
        self.roll().leases.remove(&lease.id);
    }

    /// `lease` has ended; `confirmed` if the store said so.
    pub(crate) fn strike(&self, lease: &Lease, confirmed: bool) {
        let mut roll = self.roll();
        if roll.leases.remove(&lease.id).is_none() {
            return;
        }
        if confirmed {
            roll.released += 1;
        } else {
            roll.abandoned += 1;
        }
        drop(roll);
        self.tell();
    }

    pub(crate) fn leases(&self) -> Vec<Arc<Lease>> {
        self.roll().leases.values().cloned().collect()
    }

    /// What became of the leases so far.
    pub(crate) fn tally(&self) -> Tally {
        let roll = self.roll();
        Tally { released: roll.released, abandoned: roll.abandoned, held: roll.leases.len() }
    }

    /// Moves on to `stage`. False if that was reached before.
    pub(crate) fn advance(&self, stage: Stage) -> bool {
        // Under the lock of `admit`, so that nobody slips in behind.
        let _roll = self.roll();
        self.stage.send_if_modified(|now| {
            let later = *now != stage && *now != Stage::Closed;
            if later {
                *now = stage;
            }
            later
        })
    }

    /// Resolves when the pool takes no more acquires.
    pub(crate) async fn closing(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage != Stage::Open).await;
    }

    /// Resolves when the pool has shut down.
    pub(crate) async fn closed(&self) {
        let _ = self.stage.subscribe().wait_for(|stage| *stage == Stage::Closed).await;
    }

    /// Resolves when nothing is under way.
    pub(crate) async fn idle(&self) {
        let mut left = self.left.subscribe();
        loop {
            left.mark_unchanged();
            {
                let roll = self.roll();
                if roll.leases.is_empty() && roll.errands == 0 {
                    return;
                }
            }
            // The sender lives in `self`.
            let _ = left.changed().await;
        }
    }

    /// Resolves when there are fewer leases than `held`.
    pub(crate) async fn fewer_than(&self, held: usize) {
        let mut left = self.left.subscribe();
        loop {
            left.mark_unchanged();
            if self.tally().held < held {
                return;
            }
            // The sender lives in `self`.
            let _ = left.changed().await;
        }
    }

    fn tell(&self) {
        // Who begins to listen after this looks at the roll first, which has changed already.
        if self.left.receiver_count() > 0 {
            self.left.send_modify(|left| *left += 1);
        }
    }

    fn roll(&self) -> MutexGuard<'_, Roll> {
        self.roll.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Something under way that a shutdown waits for.
#[derive(Debug)]
pub(crate) struct Errand(Arc<Registry>);

impl Drop for Errand {
    fn drop(&mut self) {
        if !self.0.is_inherited() {
            self.0.roll().errands -= 1;
            self.0.tell();
        }
    }
}
