//! One attempt to acquire, with its single-use token, from its first proposal to its release.

use crate::node::Word;

pub(crate) const MOST_ATTEMPTS: usize = 3;
const MOST_SENDINGS: usize = 5;

/// What goes to all nodes at once. Once sent it may reach each node at any time, any number of times, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sending {
    /// With the first number of the block.
    Proposal(u8),
    Renewal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Idle,
    Asking,
    /// Its lease is valid until the deadline of this sending.
    Holding(u8),
    /// It has sent a release: of what it held, or of what it gave up.
    Released,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) stage: Stage,
    sendings: [Option<Sending>; MOST_SENDINGS],
    pub(crate) sent: u8,
    /// Of how many of its sendings the deadline has passed.
    pub(crate) ended: u8,
    /// The first number of the block that was granted, or 0.
    pub(crate) fence: u8,
    /// How many numbers of its block beyond the first it has handed on.
    pub(crate) handed: u8,
    /// The attempts that had been granted the lock before this one began, a bit each.
    pub(crate) follows: u8,
    /// Whether a greater number had been granted when the newest renewal was sent.
    pub(crate) is_outdated: bool,
    /// Whether such a renewal was counted.
    pub(crate) outlived_a_newer: bool,
    /// Whether it has handed a number on after a greater one was granted.
    pub(crate) handed_late: bool,
    /// Whether it released a lock with a valid lease.
    pub(crate) released_in_time: bool,
    /// The greatest number that its release names as proposed, or 0 before the release.
    pub(crate) released: u8,
}

impl Attempt {
    pub(crate) const IDLE: Self = Self {
        stage: Stage::Idle,
        sendings: [None; MOST_SENDINGS],
        sent: 0,
        ended: 0,
        fence: 0,
        handed: 0,
        follows: 0,
        is_outdated: false,
        outlived_a_newer: false,
        handed_late: false,
        released_in_time: false,
        released: 0,
    };

    pub(crate) fn is_valid(&self) -> bool {
        matches!(self.stage, Stage::Holding(sending) if sending >= self.ended)
    }

    pub(crate) const fn was_granted(&self) -> bool {
        self.fence > 0
    }

    pub(crate) fn has_renewed(&self) -> bool {
        matches!(self.stage, Stage::Holding(sending) if self.sending(sending) == Sending::Renewal)
    }

    pub(crate) fn send(&mut self, sending: Sending) {
        self.sendings[usize::from(self.sent)] = Some(sending);
        self.sent += 1;
    }

    pub(crate) fn sending(&self, at: u8) -> Sending {
        self.sendings[usize::from(at)].unwrap_or(Sending::Renewal)
    }

    pub(crate) fn renewals(&self) -> u8 {
        let renewals = self.sendings.iter().filter(|sent| **sent == Some(Sending::Renewal));
        u8::try_from(renewals.count()).unwrap_or(u8::MAX)
    }

    pub(crate) fn proposals(&self) -> u8 {
        self.sent - self.renewals()
    }

    /// The greatest first number that it has proposed.
    pub(crate) fn greatest(&self) -> u8 {
        let first = |sending: &Option<Sending>| match sending {
            Some(Sending::Proposal(first)) => *first,
            Some(Sending::Renewal) | None => 0,
        };
        self.sendings.iter().map(first).max().unwrap_or(0)
    }

    /// Whether replies to the sending still count: it is the newest, not decided, and in time.
    pub(crate) fn counts(&self, at: u8, late_too: bool) -> bool {
        if at + 1 != self.sent || at < self.ended {
            return false;
        }
        match self.stage {
            Stage::Asking => true,
            Stage::Holding(valid) => at != valid && (late_too || valid >= self.ended),
            Stage::Idle | Stage::Released => false,
        }
    }

    /// The first of its sendings with a relevant deadline: the deadline may end the validity, or the time for replies.
    pub(crate) fn matters_from(&self) -> u8 {
        match self.stage {
            Stage::Idle | Stage::Released => u8::MAX,
            Stage::Asking => self.sent - 1,
            Stage::Holding(valid) => valid,
        }
    }

    /// Forgets irrelevant facts, so that states that differ only in them are one.
    pub(crate) fn settle(&mut self, late_too: bool) {
        if self.ended <= self.matters_from() {
            self.ended = 0;
        }
        if self.is_outdated && !(self.sent > 0 && self.counts(self.sent - 1, late_too)) {
            self.is_outdated = false;
        }
    }

    /// All relevant facts.
    pub(crate) fn packed(&self) -> u64 {
        let (stage, valid) = match self.stage {
            Stage::Idle => (0, 0),
            Stage::Asking => (1, 0),
            Stage::Holding(valid) => (2, valid),
            Stage::Released => (3, 0),
        };
        let mut word = Word::default().with(2, stage).with(3, valid);
        for sending in self.sendings {
            word = word.with(
                4,
                match sending {
                    None => 0,
                    Some(Sending::Proposal(first)) => first,
                    Some(Sending::Renewal) => 15,
                },
            );
        }
        word.with(3, self.ended)
            .with(4, self.fence)
            .with(3, self.handed)
            .with(3, self.follows)
            .with(1, self.is_outdated.into())
            .with(1, self.outlived_a_newer.into())
            .with(1, self.handed_late.into())
            .with(1, self.released_in_time.into())
            .with(4, self.released)
            .bits()
    }
}
