//! One acquire call: rounds of votes until each proposal has a majority or cannot get one.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::backend::redis::protocol::value::ROUNDING;
use crate::backend::redis::quorum::fence_block::FenceBlock;
use crate::backend::redis::quorum::grants::{MajorityGrant, acquired};
use crate::backend::redis::quorum::message::{BallotOperation, BallotRequest, VoteToken};
use crate::backend::redis::quorum::nodes::{NodeReply, Nodes, ReplyContent};
use crate::backend::redis::quorum::pacing;
use crate::backend::redis::quorum::pending_withdrawals::Withdrawal;
use crate::backend::redis::quorum::vote_count::{Decision, Vote, VoteCount};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;

/// The maximum number of rounds of a proposal, if its ballot numbers turn out too low.
const MAX_ROUNDS: u32 = 4;

/// How many times a proposal without a waiter backs off when others compete for a free lock.
const MAX_BACK_OFFS: u32 = 3;

/// The proposals of one call. Dropped before its end, it withdraws all votes.
pub(crate) struct Election {
    nodes: Arc<Nodes>,
    proposals: Vec<Proposal>,
    /// The time by which the last round ends.
    ends: Instant,
}

/// One request of the call and its votes.
struct Proposal {
    claim: AcquireRequest,
    token: VoteToken,
    block: Option<FenceBlock>,
    rounds: u32,
    back_offs: u32,
    votes: VoteCount,
    /// The nodes that are silent in the current round, one bit each.
    silent: u64,
    /// The time by which the votes of the current round are counted.
    until: Instant,
    state: ProposalState,
    /// Whether a node may have voted for it, or may still do so.
    has_votes: bool,
}

enum ProposalState {
    /// To be sent in the next round.
    Open,
    /// Sent; votes are arriving.
    Voting,
    /// To be sent again at this time under another token: several proposals compete, and none has a majority.
    BackingOff(Instant),
    Granted,
    Rejected(Result<AcquireOutcome, BackendError>),
    /// The outcome was returned.
    Concluded,
}

impl Election {
    pub(crate) fn open(nodes: &Arc<Nodes>, claims: &[&AcquireRequest]) -> Self {
        let proposals = claims.iter().map(|claim| Proposal::new(nodes, claim)).collect();
        let ends = nodes.clock.now() + pacing::max_election_time(nodes.request_timeout);
        Self { nodes: nodes.clone(), proposals, ends }
    }

    pub(crate) async fn run(mut self) -> Vec<Result<AcquireOutcome, BackendError>> {
        loop {
            self.reopen().await;
            if !self.has_open() {
                break;
            }
            self.round().await;
        }
        self.withdraw_if(|proposal| !matches!(proposal.state, ProposalState::Granted));
        let nodes = &self.nodes;
        self.proposals.iter_mut().map(|proposal| proposal.conclude(nodes)).collect()
    }

    fn has_open(&self) -> bool {
        self.proposals.iter().any(|proposal| matches!(proposal.state, ProposalState::Open))
    }

    /// Opens proposals under new tokens after their back-off. Sleeps if no other proposal is open.
    async fn reopen(&mut self) {
        let backing_off = |proposal: &Proposal| match proposal.state {
            ProposalState::BackingOff(until) => Some(until),
            _ => None,
        };
        let Some(first) = self.proposals.iter().filter_map(backing_off).min() else { return };
        self.withdraw_if(|proposal| matches!(proposal.state, ProposalState::BackingOff(_)));
        if !self.has_open() {
            self.nodes.clock.sleep_until(first).await;
        }
        let now = self.nodes.clock.now();
        for proposal in &mut self.proposals {
            if let ProposalState::BackingOff(until) = proposal.state {
                // The votes of the old token are being withdrawn, even if the back-off is not over.
                proposal.has_votes = false;
                if until <= now {
                    proposal.token = self.nodes.new_token(&proposal.claim);
                    proposal.state = ProposalState::Open;
                    proposal.choose_block(0);
                }
            }
        }
    }

    async fn round(&mut self) {
        let sent = self.nodes.clock.now();
        let mut voting = Vec::new();
        let mut requests = Vec::new();
        for (at, proposal) in self.proposals.iter_mut().enumerate() {
            if let ProposalState::Open = proposal.state {
                requests.push(proposal.propose(&self.nodes, sent, self.ends));
                voting.push(at);
            }
        }
        // Only a waiter needs change notifications, and a first attempt may not have to wait.
        let tracked = voting.iter().any(|at| self.proposals[*at].claim.attempt > 0);
        let requests: Arc<[BallotRequest]> = requests.into();
        let mut replies = self.nodes.send(&requests, tracked);
        while !voting.is_empty() {
            let next = voting.iter().map(|at| self.proposals[*at].until).min().unwrap_or(sent);
            tokio::select! {
                biased;
                reply = replies.recv() => {
                    // The channel closes after the results of all nodes.
                    let Some(NodeReply { node, content }) = reply else { break };
                    match content {
                        ReplyContent::Results(results) => self.count(&requests, node, results),
                        ReplyContent::Silent(on) => self.note_silence(&requests, node, &on),
                    }
                }
                () = self.nodes.clock.sleep_until(next) => {}
            }
            let now = self.nodes.clock.now();
            voting.retain(|at| !self.proposals[*at].is_decided(&self.nodes, now, sent, self.ends));
        }
    }

    /// Counts the votes of one node. Votes after a decision are ignored: a grant stays a grant.
    fn count(
        &mut self,
        requests: &[BallotRequest],
        node: usize,
        results: Vec<(usize, Result<Value, BackendError>)>,
    ) {
        let mut proposals = self.proposals.iter_mut();
        for (at, result) in results {
            let request = &requests[at];
            let vote = request.vote(result);
            // Results are in the order of the proposals. Proposals outside of the round are skipped.
            let Some(proposal) = proposals.find(|one| one.token == request.token) else { return };
            if let ProposalState::Voting = proposal.state {
                proposal.has_votes |= !matches!(vote, Vote::Held { .. } | Vote::Low(_));
                proposal.votes.count(node, vote);
            }
        }
    }

    /// Records that `node` is silent on the requests with the indices `on`.
    fn note_silence(&mut self, requests: &[BallotRequest], node: usize, on: &[usize]) {
        let mut proposals = self.proposals.iter_mut();
        for at in on {
            // In the order of the proposals, like the results.
            let Some(proposal) = proposals.find(|one| one.token == requests[*at].token) else {
                return;
            };
            proposal.silent |= 1 << node;
        }
    }

    fn withdraw_if(&self, is_over: impl Fn(&Proposal) -> bool) {
        let now = self.nodes.clock.now();
        let over = self.proposals.iter().filter(|one| one.has_votes && is_over(one));
        let withdraw = |proposal: &Proposal| {
            let (keys, until) = (&proposal.claim.keys, now + proposal.claim.ttl);
            let operation = BallotOperation::Withdraw;
            Withdrawal::new(operation, keys, proposal.token, proposal.block, until)
        };
        // The replies are not needed.
        drop(self.nodes.withdraw(over.map(withdraw).collect()));
    }
}

impl Drop for Election {
    fn drop(&mut self) {
        // A grant that was not returned would never be released.
        for proposal in &mut self.proposals {
            proposal.has_votes |= proposal.rounds > 0;
        }
        self.withdraw_if(|proposal| !matches!(proposal.state, ProposalState::Concluded));
    }
}

impl Proposal {
    fn new(nodes: &Nodes, claim: &AcquireRequest) -> Self {
        let mut proposal = Self {
            claim: claim.clone(),
            token: nodes.new_token(claim),
            block: None,
            rounds: 0,
            back_offs: 0,
            votes: nodes.new_count(),
            silent: 0,
            until: Instant::ORIGIN,
            state: ProposalState::Open,
            has_votes: false,
        };
        proposal.choose_block(0);
        proposal
    }

    /// Chooses the next ballot numbers above `promised`, if the request needs a fencing token.
    fn choose_block(&mut self, promised: u64) {
        if self.claim.fencing {
            match FenceBlock::above(promised, self.claim.extra_fences) {
                Ok(block) => self.block = Some(block),
                Err(error) => self.state = ProposalState::Rejected(Err(error)),
            }
        }
    }

    fn propose(&mut self, nodes: &Nodes, sent: Instant, ends: Instant) -> BallotRequest {
        let claim = &self.claim;
        self.rounds += 1;
        self.votes = nodes.new_count();
        self.silent = 0;
        self.state = ProposalState::Voting;
        self.until = (sent + pacing::max_round_time(claim.ttl, nodes.node_timeout)).min(ends);
        if claim.attempt > 0 {
            claim.keys.iter().for_each(|key| nodes.changes.clear(key.as_str()));
        }
        // A waiter sends a second request, and the answer to that names the holder.
        let is_plain = claim.attempt == 0 && claim.enqueue && self.block.is_none();
        let operation = if is_plain { BallotOperation::Set } else { BallotOperation::Propose };
        let (token, ttl, block) = (self.token, claim.ttl, self.block);
        BallotRequest { operation, keys: claim.keys.clone(), token, ttl, block }
    }

    /// Whether the current round, which was sent at `sent`, is over for this proposal. The election has to end by `ends`.
    fn is_decided(&mut self, nodes: &Nodes, now: Instant, sent: Instant, ends: Instant) -> bool {
        let missing = if now >= self.until {
            u64::MAX
        } else if self.votes.is_contested() || nodes.node_timeout.is_some() {
            self.silent
        } else {
            // Waiting has no cost: no competing proposal has a vote.
            0
        };
        if missing != 0 {
            // A node that has not answered may have voted.
            self.has_votes = true;
            nodes.fail_missing(&mut self.votes, missing, now.since(sent));
        }
        let Some(decision) = self.votes.decision() else { return false };
        self.has_votes |= self.votes.is_incomplete();
        let taken = now.since(sent);
        // A further round takes as long as this one.
        let retry_at = self.retry_at(nodes, now).filter(|until| *until + taken <= ends);
        match (decision, retry_at) {
            (Decision::Granted, _) => self.state = ProposalState::Granted,
            (Decision::Held { split: true, .. }, Some(until)) => self.back_off(until),
            // Nodes that fail late leave no time.
            (Decision::Failed, Some(until)) if taken < self.until.since(sent) / 4 => {
                self.has_votes = true;
                self.back_off(until);
            }
            // A majority answers, and a competitor has some of its votes.
            (Decision::Failed, _) if self.claim.enqueue && self.votes.majority_has_not_failed() => {
                self.has_votes = true;
                let is_ambiguous = self.block.is_none() && self.votes.is_ambiguous();
                self.state = ProposalState::Rejected(if is_ambiguous {
                    Err(nodes.ambiguous_failure(&self.votes).contended())
                } else {
                    Ok(self.contended(nodes, None, true))
                });
            }
            (Decision::Held { expires_in, split }, _) => {
                self.state = ProposalState::Rejected(Ok(self.contended(nodes, expires_in, split)));
            }
            (Decision::Low(number), _) if self.rounds < MAX_ROUNDS && now < ends => {
                self.state = ProposalState::Open;
                self.choose_block(number);
            }
            // Other proposals had greater numbers in each round.
            (Decision::Low(_), _) => {
                self.state = ProposalState::Rejected(Ok(self.contended(nodes, None, true)));
            }
            (Decision::Failed, _) => {
                self.has_votes = true;
                // Without a number, a node cannot tell a vote that arrives after its withdrawal from a new one.
                let error = match self.block {
                    Some(_) => nodes.failure(&self.votes),
                    None => nodes.ambiguous_failure(&self.votes),
                };
                self.state = ProposalState::Rejected(Err(error));
            }
        }
        true
    }

    /// When the request could be proposed again in this call because others compete. A waiter retries without a back-off here.
    fn retry_at(&self, nodes: &Nodes, now: Instant) -> Option<Instant> {
        if self.claim.enqueue || self.back_offs == MAX_BACK_OFFS || !self.votes.is_contested() {
            return None;
        }
        let least = pacing::min_silence_limit(self.claim.ttl);
        let longest = nodes.node_timeout.unwrap_or(least);
        Some(now + jitter::below(longest))
    }

    fn back_off(&mut self, until: Instant) {
        self.back_offs += 1;
        self.state = ProposalState::BackingOff(until);
    }

    fn contended(
        &self,
        nodes: &Nodes,
        expires_in: Option<Duration>,
        split: bool,
    ) -> AcquireOutcome {
        // Bounds the delay after a lost notification.
        const RECHECK: Duration = Duration::from_millis(800);
        /// Long enough for one competitor to finish before the next starts.
        const BACK_OFF: Duration = Duration::from_millis(50);
        if split {
            let retry_after = jitter::below(BACK_OFF);
            return AcquireOutcome::Contended {
                expires_in: None,
                wait_mode: WaitMode::Watch { retry_after },
            };
        }
        if !nodes.reports_changes() {
            return AcquireOutcome::contended(expires_in);
        }
        let recheck = jitter::below(RECHECK);
        let retry_after = match expires_in {
            // Tracking starts with the second attempt.
            _ if self.claim.attempt == 0 => Duration::ZERO,
            Some(expires_in) => recheck.min(expires_in + ROUNDING),
            None => recheck,
        };
        AcquireOutcome::Contended { expires_in, wait_mode: WaitMode::Watch { retry_after } }
    }

    /// The outcome for the caller, which from then on has to release a grant.
    fn conclude(&mut self, nodes: &Nodes) -> Result<AcquireOutcome, BackendError> {
        match std::mem::replace(&mut self.state, ProposalState::Concluded) {
            ProposalState::Granted => {
                let (token, ttl, block) = (self.token, self.claim.ttl, self.block);
                let grant = MajorityGrant { token, ttl, block, releasing_until: None };
                nodes.grants.insert(self.claim.owner, grant, nodes.clock.now());
                Ok(acquired(self.block))
            }
            ProposalState::Rejected(outcome) => outcome,
            ProposalState::Open
            | ProposalState::Voting
            | ProposalState::BackingOff(_)
            | ProposalState::Concluded => Err(nodes.failure(&self.votes)),
        }
    }
}
