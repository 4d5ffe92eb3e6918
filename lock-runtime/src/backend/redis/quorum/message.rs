//! What a node of a quorum is asked, and what it answers.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use crate::backend::redis::keyspace::Book;
use crate::backend::redis::protocol::script::{BALLOT, By, RELEASE};
use crate::backend::redis::protocol::value::{millis, unexpected};
use crate::backend::redis::quorum::fence_block::Block;
use crate::backend::redis::quorum::vote_count::Vote;
use crate::backend::{BackendError, FailureKind, Owner};
use crate::base::key::Key;

/// What stands in a lock for its holder: the owner, and which of its attempts it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    owner: Owner,
    /// `None` for whichever it was, of an owner whose attempt another connection has made.
    attempt: Option<u32>,
}

impl Token {
    /// Of an attempt that nobody has made before under this number.
    pub(crate) const fn new(owner: Owner, attempt: u32) -> Self {
        Self { owner, attempt: Some(attempt) }
    }

    pub(crate) const fn of_any_attempt(owner: Owner) -> Self {
        Self { owner, attempt: None }
    }

    fn text(self) -> Vec<u8> {
        let mut text = self.owner.as_bytes().to_vec();
        if let Some(attempt) = self.attempt {
            text.extend_from_slice(format!("/{attempt:08x}").as_bytes());
        }
        text
    }
}

/// One request, the same to every node.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) what: What,
    pub(crate) keys: Arc<[Key]>,
    pub(crate) token: Token,
    /// How long the node keeps the locks from now; at an end zero, unless they stay taken still.
    pub(crate) ttl: Duration,
    /// The numbers that the holder may give out as fences.
    pub(crate) block: Option<Block>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A vote, by one plain command: of one lock, without a number. Says no more than yes or no.
    Set,
    /// A vote.
    Propose,
    /// Go on; and take what is missing.
    Extend,
    /// Take back what was granted.
    Release,
    /// Take back a vote that came to nothing: nobody was granted anything by it.
    Withdraw,
    /// Who is it?
    Read,
}

impl Request {
    /// For a node that has this book. Without one, while a slot of a cluster moves and the book may be at another
    /// server than the lock, a lock that is there is extended or freed, and no number is noted.
    pub(crate) fn command(&self, by: By, book: Option<&Book>) -> Cmd {
        let ttl = millis(self.ttl);
        let noted = self.block.zip(book);
        let what = match (self.what, &*self.keys) {
            (What::Set, [key]) => {
                let mut set = Cmd::with_capacity(6, 6 * 48);
                set.arg("SET").arg(key.as_str()).arg(self.token.text());
                set.arg("NX").arg("PX").arg(ttl);
                return set;
            }
            (What::Read, keys) => {
                let mut get = redis::cmd("MGET");
                for key in keys {
                    get.arg(key.as_str());
                }
                return get;
            }
            // The usual case in a script that does no more than this.
            (What::Release | What::Withdraw, [key])
                if self.ttl.is_zero() && self.block.is_none() && self.token.attempt.is_some() =>
            {
                let mut call = RELEASE.call(by, 1, 1);
                call.arg(key.as_str()).arg(self.token.text());
                return call;
            }
            (What::Set | What::Propose, _) => "propose",
            // Of an attempt that is not known to be held, nothing is taken that is missing.
            (What::Extend, _) if self.token.attempt.is_none() => "keep",
            (What::Extend, _) if self.block.is_some() && noted.is_none() => "keep",
            (What::Extend, _) => "extend",
            (What::Release, _) => "release",
            (What::Withdraw, _) => "withdraw",
        };
        let locks = self.keys.len();
        let mut call = BALLOT.call(by, locks + usize::from(noted.is_some()), 8);
        for key in self.keys.iter() {
            call.arg(key.as_str());
        }
        if let Some((_, book)) = noted {
            call.arg(&*book.name);
        }
        let (first, last, most, spare) = noted
            .map_or((0, 0, 0, 0), |(block, book)| (block.first, block.last, book.most, book.spare));
        let is_end = matches!(self.what, What::Release | What::Withdraw);
        let ttl = if is_end && self.ttl.is_zero() { 0 } else { ttl };
        call.arg(what).arg(self.token.text()).arg(ttl).arg(locks).arg(first).arg(last).arg(most);
        call.arg(spare);
        call
    }

    pub(crate) fn vote(&self, answer: Result<Value, BackendError>) -> Vote {
        let value = match answer {
            Ok(value) => value,
            Err(error) => return Vote::Failed(error),
        };
        let parts = match &value {
            Value::Okay => return Vote::Granted,
            Value::Nil => return Vote::Held { expires_in: None, by: Vec::new() },
            Value::Array(parts) => parts.as_slice(),
            _ => return Vote::Failed(unexpected(&value)),
        };
        match parts {
            [Value::Int(1)] => Vote::Granted,
            [Value::Int(0), Value::Int(expires_in), Value::BulkString(holder)] => Vote::Held {
                expires_in: u64::try_from(*expires_in).ok().map(Duration::from_millis),
                by: holder.iter().take(OWNER).copied().collect(),
            },
            [Value::Int(2), Value::BulkString(number)] => match number_in(number) {
                Some(number) if number < MOST => Vote::Low(number),
                _ => Vote::Failed(unexpected(&value)),
            },
            [Value::Int(3), Value::BulkString(clock)] => {
                let last = self.block.map_or(0, |block| block.last);
                let ahead = last.saturating_sub(number_in(clock).unwrap_or(last));
                let text = format!(
                    "a number is {:?} ahead of a node's clock",
                    Duration::from_micros(ahead)
                );
                Vote::Failed(BackendError::new(FailureKind::Rejected, text).remedy(SYNCHRONISE))
            }
            _ => Vote::Failed(unexpected(&value)),
        }
    }

    /// Whether the locks were the token's. For all but votes.
    pub(crate) fn was_ours(
        &self,
        answer: Result<Value, BackendError>,
    ) -> Result<bool, BackendError> {
        match answer? {
            Value::Int(outcome @ 0..=2) => Ok(outcome > 0),
            Value::Array(holders) if self.what == What::Read => {
                let token = self.token.text();
                Ok(holders.iter().all(|holder| {
                    matches!(holder, Value::BulkString(holder) if holder.starts_with(&token))
                }))
            }
            other => Err(unexpected(&other)),
        }
    }
}

const OWNER: usize = 32;

/// A double counts exactly up to here; what is above is no number of ours.
const MOST: u64 = 1 << 53;

pub(crate) const SYNCHRONISE: &str = "synchronise the clocks of the nodes and of all machines that take locks; without fences (`fencing(false)`) their difference does not matter";

fn number_in(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
