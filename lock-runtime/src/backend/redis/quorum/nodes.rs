//! The nodes of a quorum, and requests that are sent to all of them.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use redis::Value;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::backend::redis::cluster::fan_out::{BoxedCall, fan_out};
use crate::backend::redis::quorum::grants::{Grants, MajorityGrant};
use crate::backend::redis::quorum::message::{BallotOperation, BallotRequest, VoteToken};
use crate::backend::redis::quorum::node::{QuorumNode, timeout_error};
use crate::backend::redis::quorum::pacing::{self, ResponseTimes};
use crate::backend::redis::quorum::pending_withdrawals::{PendingWithdrawals, Withdrawal};
use crate::backend::redis::quorum::push::ChangeReports;
use crate::backend::redis::quorum::url::NodeAddress;
use crate::backend::redis::quorum::vote_count::{Decision, Vote, VoteCount};
use crate::backend::{AcquireRequest, BackendConfig, BackendError, LeaseRef, LeaseStatus, Warning};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::exec::inline_task::poll_then_spawn;

/// The nodes, and what this pool has stored on them.
pub(crate) struct Nodes {
    nodes: Vec<Arc<QuorumNode>>,
    pub(crate) clock: Clock,
    /// Requests to a node that sends nothing for this time fail.
    pub(crate) request_timeout: Duration,
    /// A node that answers nothing for this time counts as silent. `None`: the limit follows its response times.
    pub(crate) node_timeout: Option<Duration>,
    /// By node index.
    pending_withdrawals: Vec<PendingWithdrawals>,
    attempts: AtomicU32,
    pub(crate) changes: Arc<ChangeReports>,
    pub(crate) grants: Grants,
    is_closed: AtomicBool,
    /// Number of withdrawals with their first try in flight.
    withdrawing: watch::Sender<usize>,
    /// Runs the tasks that outlive a call.
    runtime: Handle,
}

/// A message about the requests of a call to one node.
pub(crate) struct NodeReply {
    /// The index of the node.
    pub(crate) node: usize,
    pub(crate) content: ReplyContent,
}

pub(crate) enum ReplyContent {
    /// Results, each with the index of its request.
    Results(Vec<(usize, Result<Value, BackendError>)>),
    /// The node is silent on the requests with these indices. Their results may still follow.
    Silent(Vec<usize>),
}

/// Replies in order of arrival. Dropping the receiver does not stop the requests.
pub(crate) type Replies = UnboundedReceiver<NodeReply>;

impl Nodes {
    /// Connects to all nodes at the same time. Fails if fewer than a majority can be reached; the others are
    /// retried in the background.
    pub(crate) async fn connect(
        addresses: Vec<NodeAddress>,
        config: BackendConfig<'_>,
    ) -> Result<Self, LockError> {
        let BackendConfig { clock, request_timeout, node_timeout, .. } = config;
        let changes = Arc::new(ChangeReports::new(addresses.len()));
        let connect = |(index, address)| -> BoxedCall<'_, _> {
            Box::pin(QuorumNode::connect(address, index, &changes, config))
        };
        let connected =
            fan_out(addresses.into_iter().enumerate().map(connect).collect(), None).await;
        let connected: Result<Vec<_>, _> = connected.into_iter().flatten().collect();
        let (nodes, opened): (Vec<_>, Vec<_>) =
            connected?.into_iter().map(|(node, opened)| (Arc::new(node), opened)).unzip();
        let pending_withdrawals = nodes.iter().map(|_| PendingWithdrawals::default()).collect();
        let nodes = Self {
            nodes,
            clock,
            request_timeout,
            node_timeout,
            pending_withdrawals,
            attempts: AtomicU32::new(0),
            changes,
            grants: Grants::default(),
            is_closed: AtomicBool::new(false),
            withdrawing: watch::Sender::new(0),
            runtime: Handle::current(),
        };
        let failures: Vec<_> = opened.iter().filter_map(|opened| opened.as_ref().err()).collect();
        nodes.check_majority(&failures).map_err(LockError::backend)?;
        Ok(nodes)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &QuorumNode> {
        self.nodes.iter().map(|node| &**node)
    }

    pub(crate) fn new_token(&self, claim: &AcquireRequest) -> VoteToken {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        VoteToken::new(claim.owner, attempt, claim.label)
    }

    pub(crate) fn new_count(&self) -> VoteCount {
        VoteCount::new(self.nodes.len())
    }

    /// An error unless a majority works; `failures` are the errors of the other nodes.
    pub(crate) fn check_majority(&self, failures: &[&BackendError]) -> Result<(), BackendError> {
        let (count, majority) = (self.nodes.len(), VoteCount::majority_of(self.nodes.len()));
        let working = count - failures.len();
        let Some(first) = failures.first() else { return Ok(()) };
        if working >= majority {
            return Ok(());
        }
        let texts: Vec<_> = failures.iter().map(ToString::to_string).collect();
        let text = format!(
            "{working} of {count} nodes answer and {majority} are needed: {}",
            texts.join("; ")
        );
        Err(BackendError::new(first.kind(), text).remedy(first.remedy_text()))
    }

    /// Whether a majority sends change notifications.
    pub(crate) fn reports_changes(&self) -> bool {
        let reporting = self.nodes.iter().filter(|node| node.reports_changes()).count();
        reporting >= VoteCount::majority_of(self.nodes.len())
    }

    /// Problems of connections that work.
    pub(crate) fn connection_warnings(&self) -> impl Iterator<Item = Warning> {
        self.nodes.iter().filter_map(|node| node.warning())
    }

    /// Waits for withdrawals in flight, for half of the request timeout at most, then closes all connections.
    pub(crate) async fn close(&self) {
        // Votes that did not lead to a grant must not remain on the nodes.
        let mut withdrawing = self.withdrawing.subscribe();
        let none = withdrawing.wait_for(|count| *count == 0);
        let _ = timeout(self.request_timeout / 2, none).await;
        self.is_closed.store(true, Ordering::Relaxed);
        for node in &self.nodes {
            node.close();
        }
    }
}

/// Requests.
impl Nodes {
    /// Sends the same requests to all nodes at the same time.
    pub(crate) fn send(
        self: &Arc<Self>,
        requests: &Arc<[BallotRequest]>,
        tracked: bool,
    ) -> Replies {
        let (replies, received) = unbounded_channel();
        if requests.is_empty() {
            return received;
        }
        for (index, node) in self.nodes.iter().enumerate() {
            for group in node.groups(requests.iter().map(|request| &*request.keys)) {
                let (nodes, node) = (self.clone(), node.clone());
                let (requests, replies) = (requests.clone(), replies.clone());
                poll_then_spawn(&self.runtime, None, async move {
                    let on_silence = || {
                        let content = ReplyContent::Silent(group.indices(requests.len()));
                        let _ = replies.send(NodeReply { node: index, content });
                    };
                    let selected = group.select(&requests);
                    let results =
                        nodes.send_to(&node, &selected, tracked, &group.times, on_silence).await;
                    drop(selected);
                    let content = ReplyContent::Results(group.with_indices(results));
                    let _ = replies.send(NodeReply { node: index, content });
                });
            }
        }
        received
    }

    /// Sends requests to one node. Fails if the node is silent for the request timeout of the pool. Before that,
    /// `on_silence` is called once if the node exceeds its silence limit.
    async fn send_to(
        &self,
        node: &QuorumNode,
        requests: &[BallotRequest],
        tracked: bool,
        times: &ResponseTimes,
        on_silence: impl FnOnce(),
    ) -> Vec<Result<Value, BackendError>> {
        // Bounds the wait for a reply that is lost on a connection on which other replies arrive.
        const MAX_TIMEOUTS: u32 = 4;
        // A timer this late means that this thread did not run, so unread answers may have arrived.
        const LATE: Duration = Duration::from_millis(5);
        let sent = self.clock.now();
        let shortest = requests.iter().map(|request| request.ttl).min().unwrap_or_default();
        let min_limit = pacing::min_silence_limit(shortest);
        let mut on_silence = Some(on_silence);
        // The time from which silence counts against the node.
        let mut since = sent;
        let mut results = pin!(node.send(requests, tracked));
        loop {
            let fails_at = times
                .silent_at(since, self.request_timeout, Some(self.request_timeout))
                .min(sent + self.request_timeout.saturating_mul(MAX_TIMEOUTS));
            let silent_at = times.silent_at(since, min_limit, self.node_timeout);
            let next = if on_silence.is_some() { silent_at.min(fails_at) } else { fails_at };
            if self.clock.now() >= next {
                if next == fails_at {
                    times.on_timeout();
                    let error = timeout_error(&node.name, self.request_timeout);
                    return requests.iter().map(|_| Err(error.clone())).collect();
                }
                if let Some(on_silence) = on_silence.take() {
                    on_silence();
                }
                continue;
            }
            tokio::select! {
                biased;
                results = &mut results => {
                    if results.iter().any(Result::is_ok) {
                        times.on_answer(sent, self.clock.now());
                    }
                    return results;
                }
                () = self.clock.sleep_until(next) => {
                    let now = self.clock.now();
                    if now.since(next) > LATE {
                        since = now;
                    }
                }
            }
        }
    }

    /// Waits until the votes decide each request, at most until `until`, or until `others_until` once one request is
    /// decided. Then the votes received so far decide.
    pub(crate) async fn decide(
        &self,
        mut replies: Replies,
        requests: &[BallotRequest],
        until: Instant,
        others_until: Instant,
    ) -> Vec<Result<bool, BackendError>> {
        let began = self.clock.now();
        let mut counts: Vec<_> = requests.iter().map(|_| self.new_count()).collect();
        let is_undecided = |count: &VoteCount| count.decision().is_none();
        while counts.iter().any(is_undecided) {
            let until = if counts.iter().all(is_undecided) { until } else { others_until };
            tokio::select! {
                biased;
                reply = replies.recv() => {
                    let Some(NodeReply { node, content }) = reply else { break };
                    let ReplyContent::Results(results) = content else { continue };
                    for (at, result) in results {
                        counts[at].count(node, match requests[at].had_token(result) {
                            Ok(true) => Vote::Granted,
                            Ok(false) => Vote::Held { expires_in: None, by: Vec::new() },
                            Err(error) => Vote::Failed(error),
                        });
                    }
                }
                () = self.clock.sleep_until(until) => break,
            }
        }
        let waited = self.clock.now().since(began);
        let outcome = |(request, mut count): (&BallotRequest, VoteCount)| {
            // A missing vote is a failure only if the decision depends on it.
            if is_undecided(&count) {
                self.fail_missing(&mut count, u64::MAX, waited);
            }
            match count.decision() {
                Some(Decision::Granted) => Ok(true),
                Some(Decision::Held { .. }) => Ok(false),
                Some(Decision::Low(_) | Decision::Failed) | None => Err(match request.operation {
                    BallotOperation::Read => self.failure(&count),
                    _ => self.ambiguous_failure(&count),
                }),
            }
        };
        requests.iter().zip(counts).map(outcome).collect()
    }

    /// Counts the missing votes of the nodes in `silent`, one bit each, as failed.
    pub(crate) fn fail_missing(&self, count: &mut VoteCount, silent: u64, waited: Duration) {
        count.fail_missing(silent, |index| self.silence_of(index, waited));
    }

    /// The error of a node that has not answered for `waited`.
    pub(crate) fn silence_of(&self, index: usize, waited: Duration) -> BackendError {
        timeout_error(self.nodes.get(index).map_or("a node", |node| &node.name), waited)
    }

    /// The error if nodes fail and no majority remains.
    pub(crate) fn failure(&self, count: &VoteCount) -> BackendError {
        let names = self.nodes.iter().map(|node| node.name.as_str());
        let (text, failure) = count.summary(names);
        BackendError::new(failure, text).remedy(count.remedy())
    }

    /// As [`failure`](Self::failure), for a request that takes effect at a node even if it arrives late.
    pub(crate) fn ambiguous_failure(&self, count: &VoteCount) -> BackendError {
        let error = self.failure(count);
        if count.is_ambiguous() { error.after_a_part() } else { error }
    }

    pub(crate) fn request(
        &self,
        operation: BallotOperation,
        lease: &LeaseRef,
        grant: &MajorityGrant,
    ) -> BallotRequest {
        let MajorityGrant { token, block, .. } = *grant;
        BallotRequest { operation, keys: lease.keys.clone(), token, ttl: lease.kept_for(), block }
    }

    /// Extends or reads leases on all nodes, within `limit`, or within `others_limit` once one lease is decided.
    pub(crate) async fn lease_status(
        self: &Arc<Self>,
        leases: &[LeaseRef],
        operation: BallotOperation,
        limit: Duration,
        others_limit: Duration,
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let now = self.clock.now();
        let (until, others_until) = (now + limit, now + others_limit.min(limit));
        let request = |lease| self.request(operation, lease, &self.grants.of(lease));
        let requests: Arc<[BallotRequest]> = leases.iter().map(request).collect();
        let tracked = operation == BallotOperation::Extend && self.reports_changes();
        let replies = self.send(&requests, tracked);
        let outcomes = self.decide(replies, &requests, until, others_until).await;
        outcomes.into_iter().map(|outcome| outcome.map(LeaseStatus::of)).collect()
    }
}

/// Withdrawals.
impl Nodes {
    /// Withdraws votes at all nodes. A node that fails receives the withdrawal again until the vote has expired there.
    /// The replies are those to the first try.
    pub(crate) fn withdraw(self: &Arc<Self>, withdrawals: Vec<Withdrawal>) -> Replies {
        let (replies, received) = unbounded_channel();
        if withdrawals.is_empty() {
            return received;
        }
        let withdrawals: Arc<[Withdrawal]> = withdrawals.into();
        for (index, node) in self.nodes.iter().enumerate() {
            for group in node.groups(withdrawals.iter().map(|one| &*one.request.keys)) {
                let (nodes, withdrawals, replies) =
                    (self.clone(), withdrawals.clone(), replies.clone());
                // Counted from here, so that `close` waits for it.
                let in_flight = WithdrawalToken::new(self);
                poll_then_spawn(&self.runtime, None, async move {
                    let selected = group.select(&withdrawals);
                    let results = nodes.withdraw_at(index, &selected, &group.times).await;
                    drop(selected);
                    let content = ReplyContent::Results(group.with_indices(results));
                    let _ = replies.send(NodeReply { node: index, content });
                    drop(in_flight);
                });
            }
        }
        received
    }

    async fn withdraw_at(
        self: &Arc<Self>,
        index: usize,
        withdrawals: &[Withdrawal],
        times: &ResponseTimes,
    ) -> Vec<Result<Value, BackendError>> {
        let (node, pending) = (&self.nodes[index], &self.pending_withdrawals[index]);
        let results = self.withdraw_once(node, withdrawals, times).await;
        let failed = withdrawals.iter().zip(&results).filter(|(_, result)| result.is_err());
        if pending.add(failed.map(|(withdrawal, _)| withdrawal.clone())) {
            self.runtime.spawn(self.clone().retry_withdrawals(index));
        }
        results
    }

    async fn withdraw_once(
        &self,
        node: &QuorumNode,
        withdrawals: &[Withdrawal],
        times: &ResponseTimes,
    ) -> Vec<Result<Value, BackendError>> {
        let now = self.clock.now();
        let requests: Vec<_> = withdrawals.iter().map(|withdrawal| withdrawal.at(now)).collect();
        self.send_to(node, &requests, false, times, || {}).await
    }

    /// Sends the pending withdrawals of a node until none is left or the pool closes.
    async fn retry_withdrawals(self: Arc<Self>, index: usize) {
        const MAX_PAUSE: Duration = Duration::from_secs(1);
        let (Some(node), Some(pending)) =
            (self.nodes.get(index), self.pending_withdrawals.get(index))
        else {
            return;
        };
        let mut pause = Duration::from_millis(10);
        while !self.is_closed.load(Ordering::Relaxed) {
            self.clock.sleep_until(self.clock.now() + pause).await;
            let batch = pending.take(self.clock.now());
            if batch.is_empty() {
                return;
            }
            let results = self.withdraw_once(node, &batch, &node.times).await;
            pause = if results.iter().any(Result::is_ok) {
                Duration::from_millis(1)
            } else {
                (pause * 2).min(MAX_PAUSE)
            };
            let failed = batch.into_iter().zip(results).filter(|(_, result)| result.is_err());
            // No new worker is needed: this task is the worker.
            let _ = pending.add(failed.map(|(withdrawal, _)| withdrawal));
        }
    }

    /// Withdraws the grant of the request's owner: it does not fit the request, or is over. The owner then proposes a
    /// new token and a greater number; the old number is refused on every node that has granted another owner since.
    pub(crate) fn withdraw_grant(self: &Arc<Self>, request: &AcquireRequest) {
        let Some(MajorityGrant { token, ttl, block, .. }) = self.grants.get(&request.owner) else {
            return;
        };
        self.grants.remove(&request.owner);
        let until = self.clock.now() + ttl;
        let release = Withdrawal::new(BallotOperation::Release, &request.keys, token, block, until);
        // The replies are not needed.
        drop(self.withdraw(vec![release]));
    }
}

/// Counts a withdrawal as in flight until it is dropped.
struct WithdrawalToken(Arc<Nodes>);

impl WithdrawalToken {
    fn new(nodes: &Arc<Nodes>) -> Self {
        nodes.withdrawing.send_modify(|count| *count += 1);
        Self(nodes.clone())
    }
}

impl Drop for WithdrawalToken {
    fn drop(&mut self) {
        self.0.withdrawing.send_modify(|count| *count -= 1);
    }
}
