//! Withdrawals that a node has not confirmed yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::redis::quorum::fence_block::FenceBlock;
use crate::backend::redis::quorum::message::{BallotOperation, BallotRequest, VoteToken};
use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::mutex::{Mutex, MutexGuard};

/// The unconfirmed withdrawals of one node. At most one task sends them.
#[derive(Debug, Default)]
pub(crate) struct PendingWithdrawals(Mutex<WithdrawalQueue>);

#[derive(Debug, Default)]
struct WithdrawalQueue {
    withdrawals: VecDeque<Withdrawal>,
    has_worker: bool,
}

/// Removes a vote or a grant from a node.
#[derive(Clone, Debug)]
pub(crate) struct Withdrawal {
    pub(crate) request: BallotRequest,
    /// Until then the lock stays taken on the node.
    pub(crate) keep_until: Option<Instant>,
    /// By then the vote has expired on the node, and the withdrawal is dropped.
    pub(crate) until: Instant,
}

impl Withdrawal {
    /// A withdrawal that frees the lock immediately.
    pub(crate) fn new(
        operation: BallotOperation,
        keys: &Arc<[Key]>,
        token: VoteToken,
        block: Option<FenceBlock>,
        until: Instant,
    ) -> Self {
        let keys = keys.clone();
        let request = BallotRequest { operation, keys, token, ttl: Duration::ZERO, block };
        Self { request, keep_until: None, until }
    }

    /// The request if it is sent at `now`.
    pub(crate) fn at(&self, now: Instant) -> BallotRequest {
        let ttl = self.keep_until.map_or_else(Default::default, |until| until.since(now));
        BallotRequest { ttl, ..self.request.clone() }
    }
}

impl PendingWithdrawals {
    /// Above this count the oldest withdrawal is dropped, and its vote expires on the node.
    const MOST: usize = 10_000;
    /// Withdrawals in one request.
    const BATCH: usize = 128;

    /// Returns true if no worker is running: the caller must start one.
    pub(crate) fn add(&self, withdrawals: impl Iterator<Item = Withdrawal>) -> bool {
        let mut queue = self.queue();
        for withdrawal in withdrawals {
            if queue.withdrawals.len() >= Self::MOST {
                queue.withdrawals.pop_front();
            }
            queue.withdrawals.push_back(withdrawal);
        }
        !queue.withdrawals.is_empty() && !std::mem::replace(&mut queue.has_worker, true)
    }

    /// The next batch for the worker. An empty batch ends it: the next [`add`](Self::add) needs a new worker.
    pub(crate) fn take(&self, now: Instant) -> Vec<Withdrawal> {
        let mut queue = self.queue();
        queue.withdrawals.retain(|withdrawal| withdrawal.until > now);
        let count = queue.withdrawals.len().min(Self::BATCH);
        queue.has_worker = count > 0;
        queue.withdrawals.drain(..count).collect()
    }

    fn queue(&self) -> MutexGuard<'_, WithdrawalQueue> {
        self.0.lock()
    }
}
