//! One call to acquire: rounds of votes, until each claim has a majority or can have none.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::{Answer, Nodes, Said, granted, url, withdrawal};
use crate::backend::redis::quorum::fence_block::Block;
use crate::backend::redis::quorum::grants::Holding;
use crate::backend::redis::quorum::message::{Request, Token, What};
use crate::backend::redis::quorum::vote_count::{Tally, Verdict, Vote};
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;

/// Numbers that turn out too low are proposed anew so often, in one attempt.
const MOST_ROUNDS: u32 = 4;

/// A single try that meets others at a free lock backs off so often before it gives up.
const MOST_TRIES: u32 = 3;

/// The claims of one call. Dropped before its end it takes all votes back.
pub(crate) struct Election {
    nodes: Arc<Nodes>,
    bids: Vec<Bid>,
}

/// One claim.
struct Bid {
    claim: AcquireRequest,
    token: Token,
    block: Option<Block>,
    rounds: u32,
    /// How often it has backed off.
    tries: u32,
    tally: Tally,
    /// The nodes that answer nothing in the present round, a bit for each.
    silent: u64,
    /// When the votes of the present round are counted at the latest.
    until: Instant,
    stage: Stage,
    /// Whether some node may have voted for it, or may do so yet.
    has_votes: bool,
}

enum Stage {
    /// To be proposed in the next round.
    Open,
    /// Proposed; votes are coming in.
    Voting,
    /// To be proposed again then, under another token: several compete, and none has won.
    BackingOff(Instant),
    Granted,
    Refused(Result<AcquireOutcome, BackendError>),
    /// The caller has been told.
    Over,
}

impl Election {
    pub(crate) fn open(nodes: &Arc<Nodes>, claims: &[&AcquireRequest]) -> Self {
        let bids = claims.iter().map(|claim| Bid::new(nodes, claim)).collect();
        Self { nodes: nodes.clone(), bids }
    }

    pub(crate) async fn run(mut self) -> Vec<Result<AcquireOutcome, BackendError>> {
        loop {
            self.come_back().await;
            if !self.bids.iter().any(|bid| matches!(bid.stage, Stage::Open)) {
                break;
            }
            self.round().await;
        }
        self.withdraw_if(|bid| !matches!(bid.stage, Stage::Granted));
        let nodes = &self.nodes;
        self.bids.iter_mut().map(|bid| bid.conclude(nodes)).collect()
    }

    /// Opens those again that have backed off for long enough, under other tokens.
    async fn come_back(&mut self) {
        let backing_off = |bid: &Bid| match bid.stage {
            Stage::BackingOff(until) => Some(until),
            _ => None,
        };
        let Some(first) = self.bids.iter().filter_map(backing_off).min() else { return };
        self.withdraw_if(|bid| matches!(bid.stage, Stage::BackingOff(_)));
        if !self.bids.iter().any(|bid| matches!(bid.stage, Stage::Open)) {
            self.nodes.clock.sleep_until(first).await;
        }
        let now = self.nodes.clock.now();
        for bid in &mut self.bids {
            if let Stage::BackingOff(until) = bid.stage {
                // What stood behind the old token is on its way back, also if it is not its turn yet.
                bid.has_votes = false;
                if until <= now {
                    bid.token = self.nodes.new_token(bid.claim.owner);
                    bid.stage = Stage::Open;
                    bid.choose_number(0);
                }
            }
        }
    }

    async fn round(&mut self) {
        let sent = self.nodes.clock.now();
        let mut voting = Vec::new();
        let mut requests = Vec::new();
        for (at, bid) in self.bids.iter_mut().enumerate() {
            if let Stage::Open = bid.stage {
                requests.push(bid.propose(&self.nodes, sent));
                voting.push(at);
            }
        }
        // Who waits wants to be told of changes, and the first attempt does not know yet that it has to.
        let is_tracked = voting.iter().any(|at| self.bids[*at].claim.attempt > 0);
        let requests: Arc<[Request]> = requests.into();
        let mut answers = self.nodes.ask(&requests, is_tracked);
        while !voting.is_empty() {
            let next = voting.iter().map(|at| self.bids[*at].until).min().unwrap_or(sent);
            tokio::select! {
                biased;
                answer = answers.recv() => {
                    // Each node has answered by then.
                    let Some(Answer { place, said }) = answer else { break };
                    match said {
                        Said::Answered(answered) => self.count(&requests, place, answered),
                        Said::Nothing(to) => self.note_silence(&requests, place, &to),
                    }
                }
                () = self.nodes.clock.sleep_until(next) => {}
            }
            let now = self.nodes.clock.now();
            voting.retain(|at| !self.bids[*at].is_decided(&self.nodes, now, sent));
        }
    }

    /// Votes of one node. Those that come after a decision count for nothing: what was granted is granted.
    fn count(
        &mut self,
        requests: &[Request],
        place: usize,
        answers: Vec<(usize, Result<Value, BackendError>)>,
    ) {
        let mut bids = self.bids.iter_mut();
        for (at, answer) in answers {
            let request = &requests[at];
            let vote = request.vote(answer);
            // In the same order; bids that were not part of the round are passed by.
            let Some(bid) = bids.find(|bid| bid.token == request.token) else { return };
            if let Stage::Voting = bid.stage {
                bid.has_votes |= !matches!(vote, Vote::Held { .. } | Vote::Low(_));
                bid.tally.count(place, vote);
            }
        }
    }

    /// The node at `place` answers nothing, to the requests at `to` among others.
    fn note_silence(&mut self, requests: &[Request], place: usize, to: &[usize]) {
        let mut bids = self.bids.iter_mut();
        for at in to {
            // In the same order, as the votes.
            let Some(bid) = bids.find(|bid| bid.token == requests[*at].token) else { return };
            bid.silent |= 1 << place;
        }
    }

    fn withdraw_if(&self, is_over: impl Fn(&Bid) -> bool) {
        let now = self.nodes.clock.now();
        let over = self.bids.iter().filter(|bid| bid.has_votes && is_over(bid));
        let withdraw = |bid: &Bid| {
            let (claim, until) = (&bid.claim, now + bid.claim.ttl);
            withdrawal(What::Withdraw, &claim.keys, bid.token, bid.block, until)
        };
        // Nobody waits for the answers.
        drop(self.nodes.withdraw(over.map(withdraw).collect()));
    }
}

impl Drop for Election {
    fn drop(&mut self) {
        // A grant that nobody was told of is one that nobody will release.
        for bid in &mut self.bids {
            bid.has_votes |= bid.rounds > 0;
        }
        self.withdraw_if(|bid| !matches!(bid.stage, Stage::Over));
    }
}

impl Bid {
    fn new(nodes: &Nodes, claim: &AcquireRequest) -> Self {
        let mut bid = Self {
            claim: claim.clone(),
            token: nodes.new_token(claim.owner),
            block: None,
            rounds: 0,
            tries: 0,
            tally: nodes.new_tally(),
            silent: 0,
            until: Instant::from_nanos(0),
            stage: Stage::Open,
            has_votes: false,
        };
        bid.choose_number(0);
        bid
    }

    /// The next numbers above `promised`, if fences are wanted.
    fn choose_number(&mut self, promised: u64) {
        if self.claim.fencing {
            match Block::above(promised, self.claim.extra_fences.saturating_add(1)) {
                Ok(block) => self.block = Some(block),
                Err(error) => self.stage = Stage::Refused(Err(error)),
            }
        }
    }

    fn propose(&mut self, nodes: &Nodes, sent: Instant) -> Request {
        let claim = &self.claim;
        self.rounds += 1;
        self.tally = nodes.new_tally();
        self.silent = 0;
        self.stage = Stage::Voting;
        self.until =
            sent + url::longest_patience(claim.ttl, nodes.request_timeout, nodes.node_timeout);
        if claim.attempt > 0 {
            claim.keys.iter().for_each(|key| nodes.changes.forget(key.as_str()));
        }
        // Who waits asks again, and is told the rest then.
        let is_plain = claim.attempt == 0 && claim.enqueue && self.block.is_none();
        let what = if is_plain { What::Set } else { What::Propose };
        let (token, ttl, block) = (self.token, claim.ttl, self.block);
        Request { what, keys: claim.keys.clone(), token, ttl, block }
    }

    /// Whether the present round is over for this claim.
    fn is_decided(&mut self, nodes: &Nodes, now: Instant, sent: Instant) -> bool {
        let missing = if now >= self.until {
            u64::MAX
        } else if self.tally.is_contested() || nodes.node_timeout.is_some() {
            self.silent
        } else {
            // Nothing is lost by waiting: no competitor has a vote.
            0
        };
        if missing != 0 {
            // Whoever has not answered may have voted all the same.
            self.has_votes = true;
            nodes.close(&mut self.tally, missing, now.since(sent));
        }
        let Some(verdict) = self.tally.verdict() else { return false };
        self.has_votes |= self.tally.is_open();
        match verdict {
            Verdict::Granted => self.stage = Stage::Granted,
            // Whoever waits asks again by itself.
            Verdict::Held { split: true, .. } if !self.waits() && self.tries < MOST_TRIES => {
                self.tries += 1;
                let least = url::least_patience(self.claim.ttl);
                let request_timeout = nodes.node_timeout.unwrap_or(least);
                self.stage = Stage::BackingOff(now + jitter::below(request_timeout));
            }
            Verdict::Held { expires_in, split } => {
                self.stage = Stage::Refused(Ok(self.busy(nodes, expires_in, split)));
            }
            Verdict::Low(number) if self.rounds < MOST_ROUNDS => {
                self.stage = Stage::Open;
                self.choose_number(number);
            }
            // Others outbid it all the time.
            Verdict::Low(_) => self.stage = Stage::Refused(Ok(self.busy(nodes, None, true))),
            Verdict::Failed => {
                self.has_votes = true;
                self.stage = Stage::Refused(Err(nodes.failure(&self.tally)));
            }
        }
        true
    }

    fn waits(&self) -> bool {
        self.claim.enqueue || self.claim.keys.len() > 1
    }

    fn busy(&self, nodes: &Nodes, expires_in: Option<Duration>, split: bool) -> AcquireOutcome {
        // A lost push costs no more than this.
        const LOOK: Duration = Duration::from_millis(800);
        const ROUNDING: Duration = Duration::from_millis(1);
        /// Long enough for one of those who compete to be done before the next begins.
        const BACK_OFF: Duration = Duration::from_millis(50);
        if split {
            let retry_after = jitter::below(BACK_OFF);
            return AcquireOutcome::Contended {
                expires_in: None,
                wait_mode: WaitMode::Watch { retry_after },
            };
        }
        if !nodes.tell() {
            return AcquireOutcome::contended(expires_in);
        }
        let look = jitter::below(LOOK);
        let retry_after = match expires_in {
            // Only the next attempt has the locks watched.
            _ if self.claim.attempt == 0 => Duration::ZERO,
            Some(expires_in) => look.min(expires_in + ROUNDING),
            None => look,
        };
        AcquireOutcome::Contended { expires_in, wait_mode: WaitMode::Watch { retry_after } }
    }

    /// What the caller is told. From here on a grant is the caller's to release.
    fn conclude(&mut self, nodes: &Nodes) -> Result<AcquireOutcome, BackendError> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Granted => {
                let (token, ttl, block) = (self.token, self.claim.ttl, self.block);
                let holding = Holding { token, ttl, block, leaves_until: None };
                nodes.holdings.note(self.claim.owner, holding, nodes.clock.now());
                Ok(granted(self.block))
            }
            Stage::Refused(refused) => refused,
            Stage::Open | Stage::Voting | Stage::BackingOff(_) | Stage::Over => {
                Err(nodes.failure(&self.tally))
            }
        }
    }
}
