//! Votes that are to be taken back at a node which does not answer.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::redis::quorum::message::Request;
use crate::base::clock::Instant;

/// Of one node. One task works on them, however many there are.
#[derive(Debug, Default)]
pub(crate) struct Leftovers(Mutex<Heap>);

#[derive(Debug, Default)]
struct Heap {
    withdrawals: VecDeque<Withdrawal>,
    has_worker: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Withdrawal {
    pub(crate) request: Request,
    /// Until then the lock stays taken at the node.
    pub(crate) keep_until: Option<Instant>,
    /// By then the node has forgotten the vote by itself.
    pub(crate) until: Instant,
}

impl Withdrawal {
    /// To be sent at `now`.
    pub(crate) fn at(&self, now: Instant) -> Request {
        let ttl = self.keep_until.map_or_else(Default::default, |until| until.since(now));
        Request { ttl, ..self.request.clone() }
    }
}

impl Leftovers {
    /// More than this are not remembered: the node then forgets the oldest by itself.
    const MOST: usize = 10_000;
    const TOGETHER: usize = 128;

    /// True if the caller has to start the worker.
    pub(crate) fn add(&self, withdrawals: impl Iterator<Item = Withdrawal>) -> bool {
        let mut heap = self.heap();
        for withdrawal in withdrawals {
            if heap.withdrawals.len() >= Self::MOST {
                heap.withdrawals.pop_front();
            }
            heap.withdrawals.push_back(withdrawal);
        }
        !heap.withdrawals.is_empty() && !std::mem::replace(&mut heap.has_worker, true)
    }

    /// The next for the worker. Without any it is none any more.
    pub(crate) fn take(&self, now: Instant) -> Vec<Withdrawal> {
        let mut heap = self.heap();
        heap.withdrawals.retain(|withdrawal| withdrawal.until > now);
        let count = heap.withdrawals.len().min(Self::TOGETHER);
        heap.has_worker = count > 0;
        heap.withdrawals.drain(..count).collect()
    }

    fn heap(&self) -> MutexGuard<'_, Heap> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
