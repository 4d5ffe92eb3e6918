//! The line of a lock in Redis: how processes hand a hot lock to each other, in order, without polling.
//!
//! Beside the key `K` of a lock that is waited for stands a sorted set, its line: tokens by the server's
//! time of their coming. Whoever releases the lock gives it to the head of the line in the same
//! script and tells that process alone. `line.lua` has all transitions; this is what they keep to.
//!
//! ```text
//! free ── SET NX ──> held ── claim of another: joins the line, marks K, tells the holder ──> held+
//!   ^                 │                                                                       │
//!   └──── release ────┘   granted: K = the head's token for a grant's time <── release ───────┘
//!                             │ claim by the head: K for its whole ttl, now it enters
//!                             └ no claim in time: K expires, and whoever claims next has it
//! ```
//!
//! A message goes to the channel of a pool. In a Redis Cluster a channel is heard at all servers, and so each message goes
//! to all; from 7.0 on a message to a pool that also has a channel in the lock's shard goes to that alone ([`shard`](crate::backend::redis::conn::shard_channel)).
//!
//! 1. **A message is a hint.** Nobody enters on one: a process that is called sends its claim again, and only
//!    the answer to that is a grant, believed from the moment the claim was sent. So nothing hangs on when a
//!    message was sent or came, and a lost one costs time only.
//! 2. **One token from the first claim to the release.** A claim is idempotent: who has the lock is told so,
//!    who stands in line keeps its place. The token belongs to the line of the process, not to a
//!    task: if the task in front gives up, the next one claims on.
//! 3. **The mark.** The first to wait puts a `+` behind the holder's token. The plain compare-and-delete of
//!    a release that knows nothing of it then fails inside the script, which goes on to serve the line. So a
//!    lock that nobody waits for costs two plain commands, and nobody looks at a line on a free key.
//! 4. **Others wait.** A holder learns it from the count in the answer to its claim, from the message of
//!    the first in line, sent again with each of its looks, and from its renewals. Until then it hands the
//!    lock on among its own tasks; from then on for a slice. Its release puts the process at the end of
//!    the line in the same step if more of its tasks wait, or keeps the lock if nobody is in line after all.
//! 5. **The dead and the frozen.** A message to a dead process reaches nobody, and the same script calls the
//!    next. A frozen one does not claim its grant, which is short; the next in line has been told for how long,
//!    and claims when that is over. A process that is called under a name it has given up passes the
//!    lock on. The line itself is forgotten 10 s after the last look.
//! 6. **Whoever asks is alive.** A claim that finds the lock free takes it, wherever it stands in line; those
//!    before it keep their places.
//! 7. **Others.** A holder with a token of another format knows no line: those who wait are woken by client
//!    tracking, and by the end of the ttl. A process that may not use channels or scripts like these takes no
//!    place and leaves no mark; its own token is such a foreign one.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::backend::Owner;
use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::key::Key;

/// In front of the name of each process's channel, which `line.lua` knows too.
const CHANNEL: &str = "lock_runtime:";

const OWNER: usize = 32;

const POOL: usize = 12;

/// The channel of one pool, and behind its name four digits for that of one shard; see [`shard`](crate::backend::redis::conn::shard_channel).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel([u8; POOL + 4]);

impl Channel {
    /// Of no shard.
    pub(crate) fn random() -> Result<Self, LockError> {
        let mut id = [b'0'; POOL + 4];
        id[..POOL].copy_from_slice(&Owner::random()?.as_bytes()[..POOL]);
        Ok(Self(id))
    }

    /// The same pool's in the shard of this number; zero is none.
    pub(crate) fn in_shard(self, number: u16) -> Self {
        let mut id = self.0;
        for (at, digit) in id[POOL..].iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[usize::from(number >> (12 - 4 * at) & 0xf)];
        }
        Self(id)
    }

    /// On which the pool hears what any server of a cluster says.
    pub(crate) fn name(self) -> Vec<u8> {
        [CHANNEL.as_bytes(), &self.0[..POOL]].concat()
    }

    /// On which it hears one shard.
    pub(crate) fn shard_name(self) -> String {
        let id: String = self.0.iter().copied().map(char::from).collect();
        [CHANNEL, &id].concat()
    }
}

/// What stands in a key for its holder: the owner, and the channel on which its process is told that others
/// wait, if it hears any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Token {
    bytes: [u8; OWNER + 1 + 16],
    len: usize,
}

impl Token {
    pub(crate) fn new(owner: &Owner, channel: Option<Channel>) -> Self {
        let mut bytes = [b'@'; OWNER + 1 + 16];
        bytes[..OWNER].copy_from_slice(owner.as_bytes());
        let mut len = OWNER;
        if let Some(channel) = channel {
            bytes[OWNER + 1..].copy_from_slice(&channel.0);
            len = bytes.len();
        }
        Self { bytes, len }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Whether `holder`, which stands in a key, is a token of `owner`.
pub(crate) fn is_of(holder: &[u8], owner: &Owner) -> bool {
    holder.starts_with(owner.as_bytes())
}

/// What a process is told on its channel about a lock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    pub(crate) what: What,
    pub(crate) owner: Owner,
    pub(crate) key: &'a str,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// It has the lock, or will be next after this time.
    Called(Duration),
    /// Others wait for the lock that it holds.
    Wanted,
    /// It hears itself.
    Probe,
}

impl<'a> Message<'a> {
    /// `what:milliseconds:`, the 32 digits of the owner, and the key. `None` for anything else.
    pub(crate) fn parse(payload: &'a [u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(payload).ok()?.splitn(3, ':');
        let (what, millis, rest) = (parts.next()?, parts.next()?, parts.next()?);
        let what = match what {
            "called" => What::Called(Duration::from_millis(millis.parse().ok()?)),
            "wanted" => What::Wanted,
            "probe" => What::Probe,
            _ => return None,
        };
        let (owner, key) = rest.split_at_checked(OWNER)?;
        Some(Self { what, owner: Owner::from_text(owner.as_bytes().try_into().ok()?), key })
    }
}

/// How long the head of the line has to claim what it was given, when a lease of `ttl` is released. The
/// longest time that a process which is frozen at that moment holds the others up.
pub(crate) fn grant(ttl: Duration) -> Duration {
    (ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(1)).min(ttl)
}

/// When somebody in line looks again by itself: at the front soon, in case a message was lost.
pub(crate) fn look(rank: u64) -> Duration {
    if rank < 3 { Duration::from_millis(300) } else { Duration::from_secs(1) }
}

/// Keys that somebody waited for a moment ago. Their next acquire goes to the line at once, without
/// the plain command that would most likely fail.
#[derive(Debug, Default)]
pub(crate) struct Hot(Mutex<HashMap<Key, Instant>>);

impl Hot {
    const COOLS_IN: Duration = Duration::from_secs(1);
    const MOST: usize = 1024;

    pub(crate) fn note(&self, key: &str, now: Instant) {
        let mut hot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if hot.len() >= Self::MOST {
            hot.retain(|_, noted| now.since(*noted) < Self::COOLS_IN);
            if hot.len() >= Self::MOST {
                return;
            }
        }
        hot.insert(key.into(), now);
    }

    pub(crate) fn has(&self, key: &Key, now: Instant) -> bool {
        let hot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hot.get(key).is_some_and(|noted| now.since(*noted) < Self::COOLS_IN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_understood_or_left_alone() {
        let owner = [b'a'; OWNER];
        let told = |payload: String| -> Option<(What, String)> {
            Message::parse(payload.as_bytes()).map(|message| {
                assert_eq!(message.owner.as_bytes(), &owner);
                (message.what, message.key.to_owned())
            })
        };
        let text = String::from_utf8(owner.to_vec()).unwrap();
        let key = || "a:b:{ü}".to_owned();
        assert_eq!(
            told(format!("called:150:{text}a:b:{{ü}}")),
            Some((What::Called(Duration::from_millis(150)), key()))
        );
        assert_eq!(told(format!("wanted:0:{text}a:b:{{ü}}")), Some((What::Wanted, key())));
        for odd in ["", "called", "called:x:", "sold:0:", "called:0:short"] {
            assert_eq!(Message::parse(odd.as_bytes()), None, "{odd}");
        }
    }

    #[test]
    fn a_token_is_its_owners_with_and_without_the_mark() {
        let (owner, other) = (Owner::random().unwrap(), Owner::random().unwrap());
        let channel = Channel::random().unwrap();
        for channel in [None, Some(channel), Some(channel.in_shard(0xa0f3))] {
            let token = Token::new(&owner, channel);
            assert!(is_of(token.as_bytes(), &owner));
            assert!(is_of(&[token.as_bytes(), b"+"].concat(), &owner));
            assert!(!is_of(token.as_bytes(), &other));
            assert!(!is_of(b"", &owner));
        }
        let names = [channel, channel.in_shard(0xa0f3)].map(|it| (it.name(), it.shard_name()));
        assert_eq!(names[0].0, names[1].0, "one channel of the pool");
        assert!(names[0].1.ends_with("0000") && names[1].1.ends_with("a0f3"), "{names:?}");
    }
}
