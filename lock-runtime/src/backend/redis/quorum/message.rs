//! The requests to a node of a quorum, and the meaning of its answers.

use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::Lazy;
use redis::Value;

use crate::backend::redis::keyspace::BallotLog;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::inspect;
use crate::backend::redis::protocol::script::{By, RELEASE, Script};
use crate::backend::redis::protocol::value::{millis, read_holders, unexpected};
use crate::backend::redis::quorum::fence_block::{FenceBlock, SYNCHRONISE};
use crate::backend::redis::quorum::vote_count::Vote;
use crate::backend::{BackendError, FailureKind, Owner, OwnerInfo};
use crate::base::hex;
use crate::base::key::Key;
use crate::base::owner_info::OwnerLabel;

/// One node's part in a quorum.
static BALLOT: Lazy<Script> = Lazy::new(|| Script::new(include_str!("ballot.lua")));

/// The value of a lock on a node: the owner token, the number of the owner's attempt, and a text about the owner.
///
/// The text follows the number in hexadecimal digits, so that to a node both are one long number. Each version of `ballot.lua`
/// therefore parses values of all versions. All requests of an attempt have the same text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VoteToken {
    owner: Owner,
    /// `None` matches any attempt of the owner: another connection has made it.
    attempt: Option<u32>,
    label: OwnerLabel,
}

impl VoteToken {
    /// `attempt` must be new.
    pub(crate) const fn new(owner: Owner, attempt: u32, label: OwnerLabel) -> Self {
        Self { owner, attempt: Some(attempt), label }
    }

    pub(crate) const fn of_any_attempt(owner: Owner) -> Self {
        Self { owner, attempt: None, label: OwnerLabel::EMPTY }
    }

    fn encoded(self) -> Vec<u8> {
        let mut text = Vec::with_capacity(160);
        text.extend_from_slice(self.owner.as_bytes());
        if let Some(attempt) = self.attempt {
            text.push(b'/');
            HexText(&mut text).push(&attempt.to_be_bytes());
            // A buffer in memory takes all of it.
            let _ = write!(HexText(&mut text), "{}", self.label);
        }
        text
    }
}

/// The text belongs to the attempt, and distinguishes nothing.
impl PartialEq for VoteToken {
    fn eq(&self, other: &Self) -> bool {
        (self.owner, self.attempt) == (other.owner, other.attempt)
    }
}

impl Eq for VoteToken {}

/// Writes text as hexadecimal digits.
struct HexText<'a>(&'a mut Vec<u8>);

impl HexText<'_> {
    fn push(&mut self, bytes: &[u8]) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |value: u8| DIGITS[usize::from(value)];
        self.0.extend(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]));
    }
}

impl Write for HexText<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

/// One request, sent unchanged to every node.
#[derive(Clone, Debug)]
pub(crate) struct BallotRequest {
    pub(crate) operation: BallotOperation,
    pub(crate) keys: Arc<[Key]>,
    pub(crate) token: VoteToken,
    /// How long the node keeps the locks from now. Zero for a release or a withdrawal, unless the locks stay taken
    /// for that time.
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
    /// Removes a grant. The lock stays taken until the lease expires on the node.
    ReleaseAtExpiry,
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
    /// The token of the attempt with its text, or the whole value if another client has stored it.
    pub(crate) token: Vec<u8>,
    /// The first ballot number.
    pub(crate) fence: Option<u64>,
}

impl StoredVote {
    /// Parses `token`, or `token#first#before`, after a `~` if the lock is kept after its release.
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

    /// What the token says of the owner.
    pub(crate) fn info(&self) -> Option<OwnerInfo> {
        self.owner()?;
        let (_, text) = self.token.split_at_checked(OWNER_LEN + ATTEMPT_LEN)?;
        OwnerInfo::parse(&hex::bytes(text)?)
    }
}

fn owner_of_vote(token: &[u8]) -> Option<Owner> {
    let (owner, attempt) = token.split_at_checked(OWNER_LEN)?;
    let is_token = attempt.is_empty() || attempt.starts_with(b"/");
    Owner::from_bytes(owner).filter(|_| is_token)
}

impl BallotRequest {
    /// A read of one lock.
    pub(crate) fn inspection(key: &Key) -> Self {
        // No owner has this token, and none is compared.
        let token = VoteToken::of_any_attempt(Owner::from_text([b'0'; OWNER_LEN]));
        let (operation, ttl) = (BallotOperation::Inspect, Duration::from_secs(1));
        Self { operation, keys: [key.clone()].into(), token, ttl, block: None }
    }

    /// Writes the command for a node with this ballot log. While a slot of a cluster moves, the log may be on another server
    /// than the lock. Without a log, an existing lock is extended or freed, and no ballot number is recorded.
    pub(crate) fn command(&self, by: By, book: Option<&BallotLog>, out: &mut CommandWriter<'_>) {
        let ttl = millis(self.ttl);
        let noted = self.block.zip(book);
        let operation = match (self.operation, &*self.keys) {
            (BallotOperation::Set, [key]) => {
                out.arg("SET").arg(key.as_str()).arg(self.token.encoded());
                out.arg("NX").arg("PX").arg(ttl);
                return;
            }
            (BallotOperation::Inspect, [key]) => return inspect::command(by, key, None, out),
            (BallotOperation::Read | BallotOperation::Inspect, keys) => {
                return read_holders(keys, out);
            }
            // The usual case: a script that only compares and deletes is enough.
            (BallotOperation::Release | BallotOperation::Withdraw, [key])
                if self.ttl.is_zero() && self.block.is_none() && self.token.attempt.is_some() =>
            {
                RELEASE.call(out, by, 1).arg(key.as_str()).arg(self.token.encoded());
                return;
            }
            (BallotOperation::Set | BallotOperation::Propose, _) => "propose",
            // A missing lock is not restored for an attempt that is not known to hold it.
            (BallotOperation::Extend, _) if self.token.attempt.is_none() => "keep",
            (BallotOperation::Extend, _) if self.block.is_some() && noted.is_none() => "keep",
            (BallotOperation::Extend, _) => "extend",
            (BallotOperation::Release, _) => "release",
            (BallotOperation::ReleaseAtExpiry, _) => "release at expiry",
            (BallotOperation::Withdraw, _) => "withdraw",
        };
        let locks = self.keys.len();
        let call = BALLOT.call(out, by, locks + usize::from(noted.is_some()));
        for key in self.keys.iter() {
            call.arg(key.as_str());
        }
        if let Some((_, book)) = noted {
            call.arg(&*book.key);
        }
        let (first, last, most, spare) = noted.map_or((0, 0, 0, 0), |(block, book)| {
            (block.first, block.last, book.max_entries, book.max_idle)
        });
        call.arg(operation).arg(self.token.encoded()).arg(ttl).arg(locks);
        call.arg(first).arg(last).arg(most).arg(spare);
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

    /// Whether the locks had the token, by an answer to an operation that is not a vote.
    pub(crate) fn had_token(
        &self,
        answer: Result<Value, BackendError>,
    ) -> Result<bool, BackendError> {
        match answer? {
            Value::Int(outcome @ 0..=2) => Ok(outcome > 0),
            // The digit of `release.lua`.
            Value::BulkString(digit) if matches!(&*digit, b"0" | b"1") => Ok(*digit == *b"1"),
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

/// A slash, and the digits of the number of an attempt.
const ATTEMPT_LEN: usize = 9;

/// A Lua number (double) counts exactly up to here. No greater ballot number is valid.
const MAX_NUMBER: u64 = 1 << 53;

fn number_in(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `ballot.lua` expects of a token since its first version: `%x+/%x+`.
    fn is_token(text: &[u8]) -> bool {
        let mut parts = text.split(|byte| *byte == b'/');
        let is_hex = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_hexdigit);
        parts.next().is_some_and(is_hex)
            && parts.next().is_some_and(is_hex)
            && parts.next().is_none()
    }

    #[test]
    fn a_text_about_the_owner_is_a_part_of_the_number_of_its_attempt() {
        let (owner, label) = (Owner::random().unwrap(), OwnerLabel::of_process(None));
        let told = VoteToken::new(owner, 0x2a, label).encoded();
        let silent = VoteToken::new(owner, 0x2a, OwnerLabel::EMPTY).encoded();
        assert!(silent.ends_with(b"/0000002a") && silent.len() == OWNER_LEN + ATTEMPT_LEN);
        assert!(told.starts_with(&silent) && told.len() > silent.len());
        assert!(is_token(&told) && is_token(&silent));
        for value in [told.clone(), [&told[..], b"#70#1"].concat(), [b"~", &told[..]].concat()] {
            let stored = StoredVote::parse(&value);
            assert_eq!((stored.owner(), stored.info()), (Some(owner), label.info()));
            assert_eq!(stored.token, told);
        }
        assert_eq!(StoredVote::parse(&silent).info(), None);
        assert_eq!(VoteToken::of_any_attempt(owner).encoded(), owner.as_bytes());
        assert_eq!(StoredVote::parse(owner.as_bytes()).info(), None);
    }

    #[test]
    fn no_token_is_the_prefix_of_another_attempt_or_owner() {
        let label = OwnerLabel::of_process(None);
        let [one, other] = [Owner::random().unwrap(), Owner::random().unwrap()];
        let tokens = [(one, 1), (one, 16), (other, 1)].map(|(owner, attempt)| {
            [OwnerLabel::EMPTY, label].map(|label| VoteToken::new(owner, attempt, label).encoded())
        });
        for (at, texts) in tokens.iter().enumerate() {
            for (_, others) in tokens.iter().enumerate().filter(|(index, _)| *index != at) {
                for text in texts {
                    assert!(!others.iter().any(|other| other.starts_with(text)));
                }
            }
        }
    }

    #[test]
    fn digits_of_other_clients_are_no_text() {
        let owner = Owner::random().unwrap();
        let text = String::from_utf8(owner.as_bytes().to_vec()).unwrap();
        for behind in ["/0000002a7", "/0000002a7z", "/0000002aff", "/0000002a2f", "-0000002a", "/"]
        {
            assert_eq!(StoredVote::parse(format!("{text}{behind}").as_bytes()).info(), None);
        }
    }
}
