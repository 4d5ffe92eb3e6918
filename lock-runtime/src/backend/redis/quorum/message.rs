//! The requests to a node of a quorum, and the meaning of its answers.

use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::Lazy;
use redis::{Cmd, Value};

use crate::backend::redis::keyspace::BallotLog;
use crate::backend::redis::protocol::inspect;
use crate::backend::redis::protocol::script::{By, RELEASE, Script};
use crate::backend::redis::protocol::value::{millis, unexpected};
use crate::backend::redis::quorum::fence_block::{FenceBlock, SYNCHRONISE};
use crate::backend::redis::quorum::vote_count::Vote;
use crate::backend::{BackendError, FailureKind, Owner};
use crate::base::key::Key;

/// One node's part in a quorum.
static BALLOT: Lazy<Script> = Lazy::new(|| Script::new(include_str!("ballot.lua")));

/// The value of a lock on a node: the owner token and the number of the owner's attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VoteToken {
    owner: Owner,
    /// `None` matches any attempt of the owner: another connection has made it.
    attempt: Option<u32>,
}

impl VoteToken {
    /// `attempt` must be new.
    pub(crate) const fn new(owner: Owner, attempt: u32) -> Self {
        Self { owner, attempt: Some(attempt) }
    }

    pub(crate) const fn of_any_attempt(owner: Owner) -> Self {
        Self { owner, attempt: None }
    }

    fn encoded(self) -> Vec<u8> {
        let mut text = self.owner.as_bytes().to_vec();
        if let Some(attempt) = self.attempt {
            text.extend_from_slice(format!("/{attempt:08x}").as_bytes());
        }
        text
    }
}

/// One request, sent unchanged to every node.
#[derive(Clone, Debug)]
pub(crate) struct BallotRequest {
    pub(crate) operation: BallotOperation,
    pub(crate) keys: Arc<[Key]>,
    pub(crate) token: VoteToken,
    /// How long the node keeps the locks from now. Zero for a release or a withdrawal, unless the locks are to stay
    /// taken for that time.
    pub(crate) ttl: Duration,
    /// The ballot numbers that the holder may use as fencing tokens.
    pub(crate) block: Option<FenceBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BallotOperation {
    /// A vote by one plain `SET`, for one lock without a ballot number. The answer does not name the holder.
    Set,
    /// A vote.
    Propose,
    /// Extends the lease, and restores it where it is missing.
    Extend,
    /// Removes a grant.
    Release,
    /// Removes a vote that did not lead to a grant.
    Withdraw,
    /// Reads the holder.
    Read,
    /// Reads the holder and when its lease expires.
    Inspect,
}

/// The value of a lock on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredVote {
    /// The token of the attempt, or the whole value if another client has stored it.
    pub(crate) token: Vec<u8>,
    /// The first ballot number.
    pub(crate) fence: Option<u64>,
}

impl StoredVote {
    /// Parses `token`, or `token#first#before`, behind a `~` if the lock is kept after its release.
    pub(crate) fn parse(value: &[u8]) -> Self {
        let vote = value.strip_prefix(b"~").unwrap_or(value);
        let mut parts = vote.split(|byte| *byte == b'#');
        let (token, first) = (parts.next().unwrap_or_default(), parts.next());
        if owner_of_vote(token).is_none() {
            return Self { token: value.to_vec(), fence: None };
        }
        Self { token: token.to_vec(), fence: first.and_then(number_in) }
    }

    pub(crate) fn owner(&self) -> Option<Owner> {
        owner_of_vote(&self.token)
    }
}

fn owner_of_vote(token: &[u8]) -> Option<Owner> {
    let (owner, attempt) = token.split_at_checked(OWNER_LEN)?;
    let is_token = attempt.is_empty() || attempt.starts_with(b"/");
    Owner::in_bytes(owner).filter(|_| is_token)
}

impl BallotRequest {
    /// A read of one lock.
    pub(crate) fn inspection(key: &Key) -> Self {
        // No owner has this token, and none is compared.
        let token = VoteToken::of_any_attempt(Owner::from_text([b'0'; OWNER_LEN]));
        let (operation, ttl) = (BallotOperation::Inspect, Duration::from_secs(1));
        Self { operation, keys: [key.clone()].into(), token, ttl, block: None }
    }

    /// The command for a node with this ballot log. While a slot of a cluster moves, the log may be on another server
    /// than the lock. Without a log, an existing lock is extended or freed, and no ballot number is recorded.
    pub(crate) fn command(&self, by: By, book: Option<&BallotLog>) -> Cmd {
        let ttl = millis(self.ttl);
        let noted = self.block.zip(book);
        let operation = match (self.operation, &*self.keys) {
            (BallotOperation::Set, [key]) => {
                let mut set = Cmd::with_capacity(6, 6 * 48);
                set.arg("SET").arg(key.as_str()).arg(self.token.encoded());
                set.arg("NX").arg("PX").arg(ttl);
                return set;
            }
            (BallotOperation::Inspect, [key]) => return inspect::command(by, key, None),
            (BallotOperation::Read | BallotOperation::Inspect, keys) => {
                let mut get = redis::cmd("MGET");
                for key in keys {
                    get.arg(key.as_str());
                }
                return get;
            }
            // The usual case: a script that only compares and deletes is enough.
            (BallotOperation::Release | BallotOperation::Withdraw, [key])
                if self.ttl.is_zero() && self.block.is_none() && self.token.attempt.is_some() =>
            {
                let mut call = RELEASE.call(by, 1, 1);
                call.arg(key.as_str()).arg(self.token.encoded());
                return call;
            }
            (BallotOperation::Set | BallotOperation::Propose, _) => "propose",
            // A missing lock is not restored for an attempt that is not known to hold it.
            (BallotOperation::Extend, _) if self.token.attempt.is_none() => "keep",
            (BallotOperation::Extend, _) if self.block.is_some() && noted.is_none() => "keep",
            (BallotOperation::Extend, _) => "extend",
            (BallotOperation::Release, _) => "release",
            (BallotOperation::Withdraw, _) => "withdraw",
        };
        let locks = self.keys.len();
        let mut call = BALLOT.call(by, locks + usize::from(noted.is_some()), 8);
        for key in self.keys.iter() {
            call.arg(key.as_str());
        }
        if let Some((_, book)) = noted {
            call.arg(&*book.key);
        }
        let (first, last, most, spare) = noted.map_or((0, 0, 0, 0), |(block, book)| {
            (block.first, block.last, book.max_entries, book.max_idle)
        });
        let is_end = matches!(self.operation, BallotOperation::Release | BallotOperation::Withdraw);
        let ttl = if is_end && self.ttl.is_zero() { 0 } else { ttl };
        call.arg(operation).arg(self.token.encoded()).arg(ttl).arg(locks);
        call.arg(first).arg(last).arg(most).arg(spare);
        call
    }

    /// The vote in an answer to [`Set`](BallotOperation::Set) or [`Propose`](BallotOperation::Propose).
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
                by: holder.iter().take(OWNER_LEN).copied().collect(),
            },
            [Value::Int(2), Value::BulkString(number)] => match number_in(number) {
                Some(number) if number < MAX_NUMBER => Vote::Low(number),
                _ => Vote::Failed(unexpected(&value)),
            },
            [Value::Int(3), Value::BulkString(clock)] => {
                let last = self.block.map_or(0, |block| block.last);
                let ahead = last.saturating_sub(number_in(clock).unwrap_or(last));
                let text = format!(
                    "the proposed fence is {:?} ahead of a node's clock",
                    Duration::from_micros(ahead)
                );
                Vote::Failed(BackendError::new(FailureKind::Rejected, text).remedy(SYNCHRONISE))
            }
            _ => Vote::Failed(unexpected(&value)),
        }
    }

    /// Whether the locks had the token, by an answer to an operation that is no vote.
    pub(crate) fn had_token(
        &self,
        answer: Result<Value, BackendError>,
    ) -> Result<bool, BackendError> {
        match answer? {
            Value::Int(outcome @ 0..=2) => Ok(outcome > 0),
            Value::Array(holders) if self.operation == BallotOperation::Read => {
                let token = self.token.encoded();
                Ok(holders.iter().all(|holder| {
                    matches!(holder, Value::BulkString(holder) if holder.starts_with(&token))
                }))
            }
            other => Err(unexpected(&other)),
        }
    }
}

/// Digits of an owner token.
const OWNER_LEN: usize = 32;

/// A Lua number (double) counts exactly up to here. No greater ballot number is valid.
const MAX_NUMBER: u64 = 1 << 53;

fn number_in(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
