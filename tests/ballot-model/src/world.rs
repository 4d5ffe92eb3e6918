//! Every step that the world may take, and what must hold after each.

use std::hash::{Hash, Hasher};

use stateright::{Model, Property};

use crate::attempt::{Attempt, MOST_ATTEMPTS, Sending, Stage};
use crate::claims::Claims;
use crate::node::{Node, Presence, Reply};
use crate::rules::{
    Back, Faults, LateRenewal, Registers, Release, Retake, Rules, States, Token, Withdrawal,
};

pub(crate) const NODES: usize = 3;
const MAJORITY: u32 = 2;

#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    pub(crate) attempts: [Attempt; MOST_ATTEMPTS],
    /// In an order that has nothing to do with their names: which node is which makes no difference.
    pub(crate) nodes: [Node; NODES],
    faults_left: u8,
    /// All clocks have passed this number.
    passed: u8,
}

/// Attempts and nodes by their places in the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The attempt begins, or opens a new round with the same token, with any number: so nothing depends on
    /// what clocks and counters say.
    Propose {
        attempt: u8,
        first: u8,
    },
    /// It has counted a majority for its newest sending.
    Decide {
        attempt: u8,
    },
    Renew {
        attempt: u8,
    },
    HandOn {
        attempt: u8,
    },
    Release {
        attempt: u8,
    },
    /// What was sent reaches a node. It may do so again.
    Reach {
        attempt: u8,
        sending: u8,
        node: u8,
    },
    ReachRelease {
        attempt: u8,
        node: u8,
    },
    /// With it, the deadline passes before which it could not: that a deadline has passed changes nothing but
    /// what it ends and allows, so it need not be a step of its own.
    Expire {
        node: u8,
    },
    /// The node forgets the key's register, and what it has accepted for any key was up to `floor`.
    Forget {
        node: u8,
        floor: u8,
    },
    JumpClock {
        node: u8,
    },
    Lose {
        node: u8,
    },
    /// The clocks pass what had been proposed before the loss.
    PassClocks {
        node: u8,
    },
    Return {
        node: u8,
    },
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) rules: Rules,
    pub(crate) claims: Claims,
}

fn place(at: u8) -> usize {
    usize::from(at)
}

impl Model for World {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let faults_left = match self.rules.faults {
            Faults::None => 0,
            Faults::ClockSteps(count) | Faults::Losses(count, _) => count,
        };
        let nodes = ['A', 'B', 'C'].map(Node::new);
        vec![State { attempts: [Attempt::IDLE; MOST_ATTEMPTS], nodes, faults_left, passed: 0 }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if self.is_over(state) {
            return;
        }
        for attempt in 0..self.rules.attempts {
            self.steps_of_attempt(state, attempt, steps);
        }
        for node in 0..NODES {
            self.steps_of_node(state, node, steps);
        }
    }

    fn properties(&self) -> Vec<Property<Self>> {
        self.claims.properties()
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = *state;
        match step {
            Step::Propose { attempt, first } => self.propose(&mut next, attempt, first),
            Step::Decide { attempt } => self.decide(&mut next, attempt),
            Step::Renew { attempt } => self.renew(&mut next, attempt),
            Step::HandOn { attempt } => self.hand_on(&mut next, attempt),
            Step::Release { attempt } => self.release(&mut next, attempt),
            Step::Reach { attempt, sending, node } => {
                self.reach(&mut next, attempt, sending, node);
                if next.nodes[place(node)] == state.nodes[place(node)] {
                    return None;
                }
            }
            Step::ReachRelease { attempt, node } => {
                let from = &next.attempts[place(attempt)];
                let above = u8::from(self.rules.retake == Retake::UnlessAbove);
                let (greatest, was_granted) = (from.released + above, from.was_granted());
                let is = &mut next.nodes[place(node)];
                match (self.rules.release, self.rules.withdrawal) {
                    (Release::FreesOnly, _) => is.free(attempt),
                    (_, Withdrawal::OfWhatWasNotGranted) if was_granted => {
                        is.release(attempt, greatest);
                    }
                    (_, Withdrawal::Never) => is.release(attempt, greatest),
                    (_, Withdrawal::OfWhatWasNotGranted | Withdrawal::OfAll) => {
                        is.withdraw(attempt, greatest);
                    }
                }
                if next.nodes[place(node)] == state.nodes[place(node)] {
                    return None;
                }
            }
            Step::Expire { node } => {
                if let Some(key) = next.nodes[place(node)].key.take() {
                    self.pass_deadlines(&mut next, key.owner, key.until + 1);
                }
            }
            Step::Forget { node, floor } => next.nodes[place(node)].forget(floor),
            Step::JumpClock { node } => {
                next.faults_left -= 1;
                next.nodes[place(node)].key = None;
            }
            Step::Lose { node } => self.lose(&mut next, node),
            Step::PassClocks { node } => Self::pass_clocks(&mut next, node),
            Step::Return { node } => self.come_back(&mut next, node),
        }
        if self.rules.states == States::AreMerged {
            self.settle(&mut next);
            next.order_nodes();
        }
        Some(next)
    }
}

impl World {
    /// No lease is valid any more, or will be.
    fn is_over(&self, state: &State) -> bool {
        let attempts = &state.attempts[..place(self.rules.attempts)];
        self.rules.token == Token::IsNotUsedAgain
            && self.rules.states == States::AreMerged
            && attempts.iter().all(|attempt| attempt.stage == Stage::Released)
    }

    fn steps_of_attempt(&self, state: &State, at: u8, steps: &mut Vec<Step>) {
        let attempt = &state.attempts[place(at)];
        // In the order of their names: before it begins, one attempt is as good as another.
        let may_begin = at == 0 || state.attempts[place(at - 1)].stage != Stage::Idle;
        let may_propose = match attempt.stage {
            Stage::Idle => may_begin,
            Stage::Asking => true,
            Stage::Released => self.rules.token == Token::IsProposedAgain,
            Stage::Holding(_) => false,
        };
        if may_propose && attempt.proposals() < self.rules.rounds {
            // Each round of an attempt is above the one before.
            let numbers = state.passed.max(attempt.greatest()) + 1..=self.rules.greatest;
            steps.extend(numbers.map(|first| Step::Propose { attempt: at, first }));
        }
        if state.votes_for(at) >= MAJORITY {
            steps.push(Step::Decide { attempt: at });
        }
        if let Stage::Holding(_) = attempt.stage {
            if attempt.renewals() < self.rules.renewals {
                steps.push(Step::Renew { attempt: at });
            }
            if attempt.is_valid() && attempt.handed + 1 < self.rules.block {
                steps.push(Step::HandOn { attempt: at });
            }
        }
        if matches!(attempt.stage, Stage::Asking | Stage::Holding(_)) {
            steps.push(Step::Release { attempt: at });
        }
    }

    fn steps_of_node(&self, state: &State, at: usize, steps: &mut Vec<Step>) {
        let node = u8::try_from(at).unwrap_or(u8::MAX);
        let is = &state.nodes[at];
        match is.presence {
            Presence::Up => {}
            Presence::Behind(_) => return steps.push(Step::PassClocks { node }),
            Presence::Out(_) => return steps.push(Step::Return { node }),
        }
        for attempt in 0..self.rules.attempts {
            let from = &state.attempts[place(attempt)];
            steps.extend((0..from.sent).map(|sending| Step::Reach { attempt, sending, node }));
            if from.released > 0 {
                steps.push(Step::ReachRelease { attempt, node });
            }
        }
        if is.key.is_some() {
            steps.push(Step::Expire { node });
        }
        let greatest = self.rules.last(self.rules.greatest);
        match self.rules.registers {
            Registers::GiveWayToFloor => {
                let floors = is.promised + 1..=greatest;
                steps.extend(floors.map(|floor| Step::Forget { node, floor }));
            }
            Registers::AreForgotten if is.promised > 0 => {
                steps.push(Step::Forget { node, floor: 0 });
            }
            Registers::AreForgotten | Registers::Stay => {}
        }
        if state.faults_left > 0 {
            match self.rules.faults {
                Faults::None => {}
                Faults::ClockSteps(_) if is.key.is_none() => {}
                Faults::ClockSteps(_) => steps.push(Step::JumpClock { node }),
                Faults::Losses(..) => steps.push(Step::Lose { node }),
            }
        }
    }

    fn settle(&self, next: &mut State) {
        for attempt in &mut next.attempts {
            attempt.settle(self.late_too());
        }
        let matters_from = next.attempts.each_ref().map(Attempt::matters_from);
        for node in &mut next.nodes {
            node.settle(&matters_from);
            // Only renewals depend on the accepted number.
            if self.rules.renewals == 0 {
                node.forget_accepted();
            }
        }
    }

    fn late_too(&self) -> bool {
        self.rules.late_renewal == LateRenewal::IsCounted
    }

    fn propose(&self, next: &mut State, at: u8, first: u8) {
        let attempt = &next.attempts[place(at)];
        if attempt.stage == Stage::Idle {
            next.attempts[place(at)].follows = next.granted();
        }
        let attempt = &mut next.attempts[place(at)];
        attempt.stage = Stage::Asking;
        attempt.send(Sending::Proposal(first));
        next.drop_votes_for(at);
    }

    fn renew(&self, next: &mut State, at: u8) {
        let fence = next.attempts[place(at)].fence;
        let is_outdated = next.attempts.iter().any(|other| other.fence > fence);
        let attempt = &mut next.attempts[place(at)];
        attempt.is_outdated = is_outdated;
        attempt.send(Sending::Renewal);
        next.drop_votes_for(at);
    }

    fn decide(&self, next: &mut State, at: u8) {
        let attempt = &mut next.attempts[place(at)];
        let newest = attempt.sent - 1;
        match attempt.sending(newest) {
            Sending::Proposal(first) => attempt.fence = first,
            Sending::Renewal => attempt.outlived_a_newer |= attempt.is_outdated,
        }
        attempt.stage = Stage::Holding(newest);
        next.drop_votes_for(at);
    }

    fn hand_on(&self, next: &mut State, at: u8) {
        let attempt = &mut next.attempts[place(at)];
        attempt.handed += 1;
        let number = attempt.fence + attempt.handed;
        let last = self.rules.last(attempt.fence);
        let is_late = next.attempts.iter().any(|other| other.fence > last);
        debug_assert!(number <= last);
        next.attempts[place(at)].handed_late |= is_late;
    }

    fn release(&self, next: &mut State, at: u8) {
        let attempt = &mut next.attempts[place(at)];
        attempt.released_in_time = attempt.is_valid();
        attempt.stage = Stage::Released;
        attempt.released = self.rules.last(attempt.greatest());
        next.drop_votes_for(at);
    }

    fn reach(&self, next: &mut State, at: u8, sending: u8, node: u8) {
        let attempt = &next.attempts[place(at)];
        let is = &mut next.nodes[place(node)];
        let reply = self.reply(is, at, attempt, sending);
        if reply == Reply::Granted && attempt.counts(sending, self.late_too()) {
            is.votes |= 1 << at;
        }
    }

    pub(crate) fn reply(&self, node: &mut Node, at: u8, from: &Attempt, sending: u8) -> Reply {
        match from.sending(sending) {
            Sending::Proposal(first) => node.propose(&self.rules, at, first, sending),
            Sending::Renewal => node.renew(&self.rules, at, from.fence, sending),
        }
    }

    /// The deadlines of the first `count` sendings pass, if they have not yet.
    fn pass_deadlines(&self, next: &mut State, at: u8, count: u8) {
        let attempt = &mut next.attempts[place(at)];
        attempt.ended = attempt.ended.max(count);
        if attempt.sent > 0 && !attempt.counts(attempt.sent - 1, self.late_too()) {
            next.drop_votes_for(at);
        }
    }

    fn lose(&self, next: &mut State, node: u8) {
        let greatest = next.attempts.iter().map(Attempt::greatest).max().unwrap_or(0);
        let behind = Presence::Behind(if greatest == 0 { 0 } else { self.rules.last(greatest) });
        let out = Presence::Out(next.attempts.map(|attempt| attempt.sent));
        next.faults_left -= 1;
        let is = &mut next.nodes[place(node)];
        is.lose();
        is.presence = match self.rules.faults {
            Faults::Losses(_, Back::Seeded | Back::AfterTtl | Back::AfterTtlSeeded) => out,
            Faults::Losses(_, Back::AfterClocksAndTtl) => behind,
            Faults::Losses(_, Back::AtOnce) | Faults::ClockSteps(_) | Faults::None => Presence::Up,
        };
    }

    fn pass_clocks(next: &mut State, node: u8) {
        let sent = next.attempts.map(|attempt| attempt.sent);
        let is = &mut next.nodes[place(node)];
        if let Presence::Behind(number) = is.presence {
            is.presence = Presence::Out(sent);
            next.passed = next.passed.max(number);
        }
    }

    fn come_back(&self, next: &mut State, node: u8) {
        let Presence::Out(sent) = next.nodes[place(node)].presence else { return };
        let Faults::Losses(_, back) = self.rules.faults else { return };
        if matches!(back, Back::Seeded | Back::AfterTtlSeeded) {
            // One more than may have lost their data: of three, both others.
            let others = next.nodes.iter().enumerate().filter(|(at, _)| *at != place(node));
            if !others.clone().all(|(_, other)| other.is_up()) {
                return;
            }
            let promised = others.map(|(_, other)| other.promised).max().unwrap_or(0);
            next.nodes[place(node)].forget(promised);
        }
        if back != Back::Seeded {
            for at in 0..self.rules.attempts {
                self.pass_deadlines(next, at, sent[place(at)]);
            }
        }
        next.nodes[place(node)].presence = Presence::Up;
    }

    // What must hold.

    /// M: no two leases are valid at the same time.
    pub(crate) fn is_exclusive(&self, state: &State) -> bool {
        state.attempts.iter().filter(|attempt| attempt.is_valid()).count() <= 1
    }

    /// F1: a grant's numbers are above those of all that were granted before its acquire began.
    pub(crate) fn is_ordered(&self, state: &State) -> bool {
        let granted = |attempt: &&Attempt| attempt.was_granted();
        state.attempts.iter().filter(granted).all(|later| {
            let earlier = state.attempts.iter().enumerate();
            let mut earlier = earlier.filter(|(at, _)| later.follows & (1 << at) != 0);
            earlier.all(|(_, earlier)| self.rules.last(earlier.fence) < later.fence)
        })
    }

    /// F2: no number is granted twice.
    pub(crate) fn is_unique(&self, state: &State) -> bool {
        let mut granted = state.attempts.iter().filter(|attempt| attempt.was_granted());
        while let Some(one) = granted.next() {
            let mut others = granted.clone();
            if others.any(|other| one.fence.abs_diff(other.fence) < self.rules.block) {
                return false;
            }
        }
        true
    }

    /// R: no renewal that is sent after a greater number was granted succeeds.
    pub(crate) fn no_renewal_outlives(&self, state: &State) -> bool {
        !state.attempts.iter().any(|attempt| attempt.outlived_a_newer)
    }

    /// H: no number is handed on after a greater one was granted.
    pub(crate) fn is_handed_on_in_order(&self, state: &State) -> bool {
        !state.attempts.iter().any(|attempt| attempt.handed_late)
    }

    // What must happen in some way.

    pub(crate) fn all_are_granted(&self, state: &State) -> bool {
        state.attempts[..place(self.rules.attempts)].iter().all(Attempt::was_granted)
    }

    /// A grant ended by its release, not by time, and the next lease is valid.
    pub(crate) fn is_granted_after_release(&self, state: &State) -> bool {
        let was_released =
            |attempt: &Attempt| attempt.released_in_time && attempt.stage == Stage::Released;
        let released = state.attempts.iter().enumerate();
        let mut released = released.filter(|(_, attempt)| was_released(attempt));
        released.any(|(at, _)| {
            let follows = |later: &Attempt| later.follows & (1 << at) != 0;
            state.attempts.iter().any(|later| follows(later) && later.is_valid())
        })
    }

    pub(crate) fn is_renewed(&self, state: &State) -> bool {
        state.attempts.iter().any(|attempt| attempt.is_valid() && attempt.has_renewed())
    }

    pub(crate) fn is_handed_on(&self, state: &State) -> bool {
        state.attempts.iter().any(|attempt| attempt.handed > 0)
    }

    /// The faults are over, all nodes are there, and more than one has been granted the lock.
    pub(crate) fn is_granted_after_faults(&self, state: &State) -> bool {
        let is_well = state.faults_left == 0 && state.nodes.iter().all(Node::is_up);
        is_well && state.attempts.iter().filter(|attempt| attempt.was_granted()).count() > 1
    }
}

impl State {
    fn granted(&self) -> u8 {
        let granted = self.attempts.iter().enumerate().filter(|(_, is)| is.was_granted());
        granted.fold(0, |all, (at, _)| all | 1 << at)
    }

    fn votes_for(&self, attempt: u8) -> u32 {
        self.nodes.iter().map(|node| u32::from(node.votes >> attempt & 1)).sum()
    }

    fn drop_votes_for(&mut self, attempt: u8) {
        for node in &mut self.nodes {
            node.votes &= !(1 << attempt);
        }
    }

    fn order_nodes(&mut self) {
        let mut keyed = self.nodes.map(|node| (node.packed(), node));
        keyed.sort_by_key(|(packed, _)| *packed);
        self.nodes = keyed.map(|(_, node)| node);
    }

    fn packed(&self) -> [u64; MOST_ATTEMPTS + NODES + 1] {
        let [x, y, z] = self.attempts.each_ref().map(Attempt::packed);
        let [a, b, c] = self.nodes.each_ref().map(Node::packed);
        [x, y, z, a, b, c, u64::from(self.faults_left) << 8 | u64::from(self.passed)]
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.packed() == other.packed()
    }
}

impl Eq for State {}

impl Hash for State {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.packed().hash(state);
    }
}
