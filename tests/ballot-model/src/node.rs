//! One node's part: what its script does in one step.

use crate::attempt::MOST_ATTEMPTS;
use crate::rules::{Low, Retake, Rules, Ttl};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) owner: u8,
    pub(crate) first: u8,
    /// What had been accepted before it.
    pub(crate) before: u8,
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
    /// For output only: nodes that differ only in it are the same.
    pub(crate) name: char,
    pub(crate) key: Option<Key>,
    /// No number up to this will be accepted: the key's register, or the floor that stands in for it.
    pub(crate) promised: u8,
    /// The greatest number that was accepted and may have been granted.
    pub(crate) accepted: u8,
    /// The attempts with a granted newest sending, a bit for each attempt.
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
        Self { name, key: None, promised: 0, accepted: 0, votes: 0, presence: Presence::Up }
    }

    pub(crate) const fn is_up(&self) -> bool {
        matches!(self.presence, Presence::Up)
    }

    /// `at` says which sending of the owner this is.
    pub(crate) fn propose(&mut self, rules: &Rules, owner: u8, first: u8, at: u8) -> Reply {
        let mut until = at;
        let mut is_again = false;
        let mut before = self.accepted;
        if let Some(key) = self.key {
            if key.owner != owner {
                return Reply::Held;
            }
            is_again = key.first == first;
            // An earlier round has no number of another attempt.
            before = key.before;
            until = match rules.ttl {
                // A late copy of an earlier round makes it no shorter.
                Ttl::IsSetAgain => until.max(key.until),
                Ttl::StaysAsItIs => key.until,
            };
        }
        if !is_again && first <= self.promised {
            if rules.low == Low::TakesTheKey {
                self.key = Some(Key { owner, first, before, until });
            }
            return Reply::Low;
        }
        self.key = Some(Key { owner, first, before, until });
        self.accept(rules.last(first));
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
                self.key = Some(Key { owner, first, before: self.accepted, until: at });
                self.accept(last);
            }
        }
        Reply::Granted
    }

    const fn accept(&mut self, last: u8) {
        self.promise(last);
        if last > self.accepted {
            self.accepted = last;
        }
    }

    const fn promise(&mut self, number: u8) {
        if number > self.promised {
            self.promised = number;
        }
    }

    /// The end of an attempt, where no memory is left for more.
    pub(crate) fn free(&mut self, owner: u8) {
        self.key.take_if(|key| key.owner == owner);
    }

    /// The end of an attempt that was granted. Neither a proposal up to `greatest` nor a renewal takes the key
    /// after it.
    pub(crate) fn release(&mut self, owner: u8, greatest: u8) {
        match &mut self.key {
            Some(key) if key.owner == owner => self.key = None,
            Some(key) => key.before = key.before.max(greatest),
            None => {}
        }
        self.accept(greatest);
    }

    /// The end of an attempt that was not granted, and never will be. A proposal that comes after it is refused,
    /// if it is not above `greatest`; for renewals of others it is as if it had never been here.
    pub(crate) fn withdraw(&mut self, owner: u8, greatest: u8) {
        if let Some(key) = self.key.take_if(|key| key.owner == owner) {
            self.accepted = key.before;
        }
        self.promise(greatest);
    }

    pub(crate) fn forget(&mut self, floor: u8) {
        self.promised = floor;
        self.accepted = floor;
    }

    pub(crate) fn lose(&mut self) {
        self.key = None;
        self.forget(0);
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

    pub(crate) fn forget_accepted(&mut self) {
        self.accepted = 0;
        if let Some(key) = &mut self.key {
            key.before = 0;
        }
    }

    /// All relevant facts without the name.
    pub(crate) fn packed(&self) -> u64 {
        let word = match self.key {
            None => Word::default().with(14, 0),
            Some(Key { owner, first, before, until }) => {
                Word::default().with(2, owner + 1).with(4, first).with(5, before).with(3, until)
            }
        };
        let word = word.with(5, self.promised).with(5, self.accepted).with(3, self.votes);
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
