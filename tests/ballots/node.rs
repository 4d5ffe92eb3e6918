//! One node's part: what its script does in one step.

use super::attempt::MOST_ATTEMPTS;
use super::rules::{Low, Retake, Rules, Ttl};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) owner: u8,
    pub(crate) first: u8,
    /// It does not expire before the deadline of this sending of its owner.
    pub(crate) until: u8,
}

/// Whether a node answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Up,
    /// It has lost its data. How much each attempt had sent when its wait began.
    Out([u8; MOST_ATTEMPTS]),
    /// It has lost its data, and clocks have yet to pass this number before its wait begins.
    Behind(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// For people only: nodes that differ in nothing else are the same.
    pub(crate) name: char,
    pub(crate) key: Option<Key>,
    /// No number up to this is accepted: the key's register, or the floor that stands in for it.
    pub(crate) accepted: u8,
    /// Whose newest sending it has granted, a bit for each attempt.
    pub(crate) votes: u8,
    pub(crate) presence: Presence,
}

/// What a node answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Granted,
    Held,
    Low,
}

impl Node {
    pub(crate) const fn new(name: char) -> Self {
        Self { name, key: None, accepted: 0, votes: 0, presence: Presence::Up }
    }

    pub(crate) const fn is_up(&self) -> bool {
        matches!(self.presence, Presence::Up)
    }

    /// `at` says which sending of the owner this is.
    pub(crate) fn propose(&mut self, rules: &Rules, owner: u8, first: u8, at: u8) -> Reply {
        let mut until = at;
        let mut is_again = false;
        if let Some(key) = self.key {
            if key.owner != owner {
                return Reply::Held;
            }
            is_again = key.first == first;
            until = match rules.ttl {
                // A late copy of an earlier round makes it no shorter.
                Ttl::IsSetAgain => until.max(key.until),
                Ttl::StaysAsItIs => key.until,
            };
        }
        if !is_again && first <= self.accepted {
            if rules.low == Low::TakesTheKey {
                self.key = Some(Key { owner, first, until });
            }
            return Reply::Low;
        }
        self.key = Some(Key { owner, first, until });
        self.accepted = self.accepted.max(rules.last(first));
        Reply::Granted
    }

    pub(crate) fn renew(&mut self, rules: &Rules, owner: u8, first: u8, at: u8) -> Reply {
        match self.key {
            Some(key) if key.owner != owner => return Reply::Held,
            Some(key) => self.key = Some(Key { until: at.max(key.until), ..key }),
            None => {
                let last = rules.last(first);
                let is_low = match rules.retake {
                    Retake::UnlessAbove => last < self.accepted,
                    Retake::Above => last <= self.accepted,
                    Retake::Always => false,
                };
                if is_low {
                    return Reply::Low;
                }
                self.key = Some(Key { owner, first, until: at });
                self.accepted = self.accepted.max(rules.last(first));
            }
        }
        Reply::Granted
    }

    /// A proposal that comes after it is refused, if it is not above `greatest`.
    pub(crate) fn release(&mut self, owner: u8, greatest: u8) {
        if self.key.is_some_and(|key| key.owner == owner) {
            self.key = None;
        }
        self.accepted = self.accepted.max(greatest);
    }

    pub(crate) fn lose(&mut self) {
        self.key = None;
        self.accepted = 0;
    }

    /// Forgets deadlines that make no difference any more: those before `matters_from` of each attempt.
    pub(crate) fn settle(&mut self, matters_from: &[u8; MOST_ATTEMPTS]) {
        if let Some(key) = &mut self.key
            && key.until < matters_from[usize::from(key.owner)]
        {
            key.until = 0;
        }
        if let Presence::Out(sent) = &mut self.presence {
            for (sent, from) in sent.iter_mut().zip(matters_from) {
                if *sent <= *from {
                    *sent = 0;
                }
            }
        }
    }

    /// All that makes it what it is, but the name.
    pub(crate) fn packed(&self) -> u64 {
        let word = match self.key {
            None => Word::default().with(9, 0),
            Some(Key { owner, first, until }) => {
                Word::default().with(2, owner + 1).with(4, first).with(3, until)
            }
        };
        let word = word.with(5, self.accepted).with(3, self.votes);
        match self.presence {
            Presence::Up => word.with(11, 0),
            Presence::Behind(number) => word.with(2, 1).with(9, number),
            Presence::Out(sent) => {
                sent.iter().fold(word.with(2, 2), |word, sent| word.with(3, *sent))
            }
        }
        .bits()
    }
}

/// Small numbers, packed one after the other.
#[derive(Clone, Copy, Default)]
pub(crate) struct Word(u64);

impl Word {
    pub(crate) const fn with(self, width: u32, value: u8) -> Self {
        assert!(
            (value as u64) < 1 << width,
            "a bound is larger than its place in the packed state"
        );
        Self((self.0 << width) | value as u64)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }
}
