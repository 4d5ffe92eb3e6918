//! Change notifications of the nodes of a quorum.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::OnceCell;
use tokio::runtime::Handle;

use crate::backend::notifier::NotifySink;
use crate::backend::redis::keyspace::BallotLog;
use crate::backend::redis::quorum::vote_count::VoteCount;
use crate::backend::{BackendError, Notifier, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::Mutex;

/// Collects change notifications of a lock until a majority of the nodes has sent one, then notifies the pool.
#[derive(Debug)]
pub(crate) struct ChangeReports {
    notifier: OnceCell<Notifier>,
    nodes: usize,
    /// The nodes, one bit each, that have reported a change since the last proposal for the key.
    by_key: Mutex<HashMap<String, u64>>,
}

impl ChangeReports {
    /// With more keys than this, the counts are dropped and the change is passed on immediately.
    const MAX_KEYS: usize = 10_000;

    pub(crate) fn new(nodes: usize) -> Self {
        Self { notifier: OnceCell::new(), nodes, by_key: Mutex::default() }
    }

    pub(crate) fn subscribe(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// Drops the reports of `key`: the proposal that follows sees those changes.
    pub(crate) fn clear(&self, key: &str) {
        self.by_key.lock().remove(key);
    }

    /// Returns true if a majority has now reported. A single report may be about a vote that was withdrawn.
    fn add(&self, key: &str, node: usize) -> bool {
        let mut by_key = self.by_key.lock();
        if by_key.len() >= Self::MAX_KEYS {
            by_key.clear();
            return true;
        }
        let reported = by_key.entry(key.to_owned()).or_default();
        *reported |= 1 << node;
        if (reported.count_ones() as usize) < VoteCount::majority_of(self.nodes) {
            return false;
        }
        by_key.remove(key);
        true
    }
}

/// Receives the notifications of one node.
pub(crate) struct NodeWakeups {
    node: usize,
    changes: Arc<ChangeReports>,
    resyncs: Arc<ResyncLimiter>,
}

impl NodeWakeups {
    /// For the node with the index `node`.
    pub(crate) fn new(node: usize, changes: &Arc<ChangeReports>, clock: Clock) -> Self {
        let resyncs = ResyncLimiter { clock, runtime: Handle::current(), last: Mutex::default() };
        Self { node, changes: changes.clone(), resyncs: Arc::new(resyncs) }
    }
}

impl NotifySink for NodeWakeups {
    fn key_changed(&self, key: &str) {
        if let Some(notifier) = self.changes.notifier.get()
            && !BallotLog::is_log(key)
            && self.changes.add(key, self.node)
        {
            notifier.key_changed(key);
        }
    }

    /// The node was disconnected or flushed: renewals restore the locks there.
    fn resync(&self) {
        if let Some(notifier) = self.changes.notifier.get() {
            ResyncLimiter::notify(&self.resyncs, notifier);
        }
    }

    /// One node is not the store.
    fn disconnected(&self, _: &BackendError) {}

    fn head_of_queue(&self, _: &str, _: &Owner, _: Duration) -> bool {
        true
    }

    fn contended(&self, _: &str) {}
}

/// Limits how often a node that reconnects repeatedly causes a renewal of all leases.
struct ResyncLimiter {
    clock: Clock,
    runtime: Handle,
    last: Mutex<Option<LastResync>>,
}

#[derive(Clone, Copy)]
enum LastResync {
    At(Instant),
    /// The next resync is scheduled.
    Scheduled,
}

impl ResyncLimiter {
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Notifies immediately, or [`INTERVAL`](Self::INTERVAL) after the last resync.
    fn notify(self: &Arc<Self>, notifier: &Notifier) {
        let now = self.clock.now();
        let mut state = self.last.lock();
        match *state {
            Some(LastResync::Scheduled) => {}
            Some(LastResync::At(last)) if now.since(last) < Self::INTERVAL => {
                *state = Some(LastResync::Scheduled);
                let (resyncs, notifier) = (self.clone(), notifier.clone());
                self.runtime.spawn(async move {
                    resyncs.clock.sleep_until(last + Self::INTERVAL).await;
                    *resyncs.last.lock() = Some(LastResync::At(resyncs.clock.now()));
                    notifier.resync();
                });
            }
            Some(LastResync::At(_)) | None => {
                *state = Some(LastResync::At(now));
                drop(state);
                notifier.resync();
            }
        }
    }
}
