//! One call to acquire: rounds of votes, until each claim has a majority or can have none.

use std::sync::Arc;
use std::time::Duration;

use super::holdings::Holding;
use super::numbers::Block;
use super::request::{Request, Token, What};
use super::tally::{Tally, Verdict, Vote};
use super::{Nodes, granted, nodes, withdrawal};
use crate::backend::{Attempt, BackendError, Claim, Standing};
use crate::clock::Instant;
use crate::jitter;

/// Numbers that turn out too low are proposed anew so often, in one attempt.
const MOST_ROUNDS: u32 = 4;

/// The claims of one call. Dropped before its end it takes all votes back.
pub(super) struct Election {
    nodes: Arc<Nodes>,
    bids: Vec<Bid>,
}

/// One claim.
struct Bid {
    claim: Claim,
    token: Token,
    block: Option<Block>,
    rounds: u32,
    tally: Tally,
    /// When the votes of the present round are counted.
    until: Instant,
    stage: Stage,
    /// Whether some node may have voted for it.
    has_votes: bool,
}

enum Stage {
    /// To be proposed in the next round.
    Open,
    /// Proposed; votes are coming in.
    Voting,
    Granted,
    Refused(Result<Attempt, BackendError>),
    /// The caller has been told.
    Over,
}

impl Election {
    pub(super) fn open(nodes: &Arc<Nodes>, claims: &[&Claim]) -> Self {
        let bids = claims.iter().map(|claim| Bid::new(nodes, claim)).collect();
        Self { nodes: nodes.clone(), bids }
    }

    pub(super) async fn run(mut self) -> Vec<Result<Attempt, BackendError>> {
        while self.bids.iter().any(|bid| matches!(bid.stage, Stage::Open)) {
            self.round().await;
        }
        self.withdraw_refused();
        let nodes = &self.nodes;
        self.bids.iter_mut().map(|bid| bid.conclude(nodes)).collect()
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
                answered = answers.recv() => {
                    // Each node has answered by then.
                    let Some((place, answered)) = answered else { break };
                    self.count(&requests, place, answered.into_iter().map(Request::vote));
                }
                () = self.nodes.clock.sleep_until(next) => {}
            }
            let now = self.nodes.clock.now();
            voting.retain(|at| !self.bids[*at].is_decided(&self.nodes, now, sent));
        }
    }

    /// The votes of one node. Those that come after a decision count for nothing: what was granted is granted.
    fn count(&mut self, requests: &[Request], place: usize, votes: impl Iterator<Item = Vote>) {
        let mut bids = self.bids.iter_mut();
        for (request, vote) in requests.iter().zip(votes) {
            // In the same order; bids that were not part of the round are passed by.
            let Some(bid) = bids.find(|bid| bid.token == request.token) else { return };
            if let Stage::Voting = bid.stage {
                bid.has_votes |= !matches!(vote, Vote::Held { .. } | Vote::Low(_));
                bid.tally.count(place, vote);
            }
        }
    }

    fn withdraw_refused(&self) {
        let refused = self
            .bids
            .iter()
            .filter(|bid| bid.has_votes && !matches!(bid.stage, Stage::Granted | Stage::Over));
        let withdraw = |bid: &Bid| withdrawal(&bid.claim.keys, bid.token, bid.block);
        let requests: Vec<_> = refused.clone().map(withdraw).collect();
        if let Some(ttl) = refused.map(|bid| bid.claim.ttl).max() {
            // Nobody waits for the answers.
            drop(self.nodes.withdraw(requests, self.nodes.clock.now() + ttl));
        }
    }
}

impl Drop for Election {
    fn drop(&mut self) {
        // A grant that nobody was told of is one that nobody will release.
        for bid in &mut self.bids {
            if !matches!(bid.stage, Stage::Over) && bid.rounds > 0 {
                bid.stage = Stage::Voting;
                bid.has_votes = true;
            }
        }
        self.withdraw_refused();
    }
}

impl Bid {
    fn new(nodes: &Nodes, claim: &Claim) -> Self {
        let mut bid = Self {
            claim: claim.clone(),
            token: nodes.new_token(claim.owner),
            block: None,
            rounds: 0,
            tally: nodes.new_tally(),
            until: Instant::from_nanos(0),
            stage: Stage::Open,
            has_votes: false,
        };
        bid.choose_number(nodes);
        bid
    }

    /// The next numbers, if fences are wanted.
    fn choose_number(&mut self, nodes: &Nodes) {
        if !self.claim.fencing || !matches!(self.stage, Stage::Open) {
            return;
        }
        match nodes.numbers.propose(self.claim.spare_fences.saturating_add(1)) {
            Ok(block) => self.block = Some(block),
            Err(error) => self.stage = Stage::Refused(Err(error)),
        }
    }

    fn propose(&mut self, nodes: &Nodes, sent: Instant) -> Request {
        let claim = &self.claim;
        self.rounds += 1;
        self.tally = nodes.new_tally();
        self.stage = Stage::Voting;
        self.until = sent + nodes::patience_of_node(claim.ttl, nodes.node_patience);
        if claim.attempt > 0 {
            claim.keys.iter().for_each(|key| nodes.changes.forget(key.as_str()));
        }
        // Who waits asks again, and is told the rest then.
        let is_plain = claim.attempt == 0 && claim.in_line && self.block.is_none();
        let what = if is_plain { What::Set } else { What::Propose };
        let (token, ttl, block) = (self.token, claim.ttl, self.block);
        Request { what, keys: claim.keys.clone(), token, ttl, block }
    }

    /// Whether the present round is over for this claim.
    fn is_decided(&mut self, nodes: &Nodes, now: Instant, sent: Instant) -> bool {
        if now >= self.until {
            // Whoever has not answered may have voted all the same.
            self.has_votes = true;
            nodes.close(&mut self.tally, self.until.since(sent));
        }
        let Some(verdict) = self.tally.verdict() else { return false };
        self.stage = match verdict {
            Verdict::Granted => Stage::Granted,
            Verdict::Held { free_in, split } => {
                self.has_votes |= self.tally.is_open();
                Stage::Refused(Ok(self.busy(nodes, free_in, split)))
            }
            Verdict::Low(number) => {
                self.has_votes |= self.tally.is_open();
                nodes.numbers.see(number);
                if self.rounds < MOST_ROUNDS {
                    Stage::Open
                } else {
                    // Others outbid it all the time.
                    Stage::Refused(Ok(self.busy(nodes, None, true)))
                }
            }
            Verdict::Failed => {
                self.has_votes = true;
                Stage::Refused(Err(nodes.failure(&self.tally)))
            }
        };
        self.choose_number(nodes);
        true
    }

    fn busy(&self, nodes: &Nodes, free_in: Option<Duration>, split: bool) -> Attempt {
        // A lost push costs no more than this.
        const LOOK: Duration = Duration::from_millis(800);
        const ROUNDING: Duration = Duration::from_millis(1);
        if split {
            // Several compete: after a random time, so that one of them is first.
            return Attempt::busy(None);
        }
        let waits = self.claim.in_line || self.claim.keys.len() > 1;
        if !nodes.tell() {
            return Attempt::busy(free_in);
        }
        let look = jitter::below(LOOK);
        let ask_again = match free_in {
            // Only the next attempt has the locks watched.
            _ if self.claim.attempt == 0 && waits => Duration::ZERO,
            Some(free_in) => look.min(free_in + ROUNDING),
            None => look,
        };
        Attempt::Busy { free_in, standing: Standing::Watching { ask_again } }
    }

    /// What the caller is told. From here on a grant is the caller's to release.
    fn conclude(&mut self, nodes: &Nodes) -> Result<Attempt, BackendError> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Granted => {
                let (token, ttl, block) = (self.token, self.claim.ttl, self.block);
                let holding = Holding { token, ttl, block, leaves_until: None };
                nodes.holdings.note(self.claim.owner, holding, nodes.clock.now());
                Ok(granted(self.block))
            }
            Stage::Refused(refused) => refused,
            Stage::Open | Stage::Voting | Stage::Over => Err(nodes.failure(&self.tally)),
        }
    }
}
