//! The wait queue of a lock in Redis: contended locks pass between processes in FIFO order, without polling.
//!
//! A contended lock with the key `K` has a sorted set beside it, its wait queue: tokens, ordered by the server's time
//! of their arrival. A release transfers the lock to the head of the queue in the same script and notifies only that
//! process. `wait_queue.lua` has all transitions; this is the contract.
//!
//! ```text
//! free ── SET NX ──> held ── claim of another owner: enqueues, marks K, notifies the holder ──> contended
//!   ^                 │                                                                             │
//!   └──── release ────┘   reserved: K = the head's token for a reservation time <── release ────────┘
//!                             │ claim by the head: K for its whole ttl, now the lock is acquired
//!                             └ no claim in time: K expires, and the next claim acquires the lock
//! ```
//!
//! A message goes to the channel of a pool. In a Redis Cluster, every server delivers a message on a channel, so the
//! message goes to all servers. From 7.0 on a pool may also have a channel in the lock's shard: then the message goes
//! only to that shard ([`shard_channel`](crate::backend::redis::net::shard_channel)).
//!
//! 1. **A message is a hint.** No message grants a lock: the notified process sends its claim again. Only the reply to that
//!    claim is a grant, valid from the moment the claim was sent. So correctness does not depend on when a message is
//!    sent or arrives. A lost message costs time only.
//! 2. **One token from the first claim to the release.** A claim is idempotent. It reports a lock that the owner already
//!    holds, and keeps the position of a queued token. The token belongs to the queue of the process, not to a task.
//!    If the head waiter gives up, the next waiter continues with the same token. A shard channel that moves meanwhile gives
//!    the owner a second entry, which a hand-off by this owner removes.
//! 3. **The contended mark.** The first claim that waits puts a `+` after the holder's token. The plain
//!    compare-and-delete of a release then fails inside the script, and the release goes on to serve the queue. So an
//!    uncontended lock costs a `SET` and a short script, and no command reads the queue of a free key.
//! 4. **Contention.** A holder learns of waiters from the count in the reply to its claim, and from its renewals. The
//!    first waiter in the queue also sends a message to the holder, again at each of its rechecks. Until then the
//!    holder's process hands the lock off between its own tasks; from then on it does so for a limited time. If more of
//!    its tasks wait, its release enqueues the process at the end of the queue in the same step. If the queue is empty
//!    after all, the process keeps the lock.
//! 5. **Dead and frozen processes.** A message to a dead process has no receiver, and the same script goes on to the next token.
//!    A frozen process does not claim its reservation, which is short. The next waiter in the queue receives the duration of the
//!    reservation, and claims when the reservation is over. A process that receives a reservation for an abandoned token releases
//!    the lock to the next. The queue itself expires 10 s after the last recheck.
//! 6. **A claim proves that its process is alive.** A claim that finds the lock free acquires it, at any position in the
//!    queue. The tokens before it keep their positions.
//! 7. **Other libraries.** A holder with a token of another format does not know the queue. Client tracking and the end of
//!    the ttl wake its waiters. A process that may not use channels or these scripts does not enqueue and leaves no
//!    mark; its own token has such another format.
//! 8. **A text about the owner** follows the token and the mark, only in the value of the key. Nothing compares the text. Entries
//!    of the queue, releases and renewals have the token without it. A process of an older version takes the value for that of
//!    another library.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use redis::{RedisWrite, ToRedisArgs, ToSingleRedisArg};

use crate::backend::redis::channel::{Channel, OWNER_LEN};
use crate::backend::{Owner, OwnerInfo, OwnerTag};
use crate::base::owner_info::OwnerLabel;

/// The owner token, `@`, and the id of a channel.
const MAX_LEN: usize = OWNER_LEN + 1 + 16;

/// The value of a lock's key and of a queue entry: the owner token, and the channel that notifies its process.
///
/// Without a channel the process receives no messages, and the token is only the owner token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueToken {
    bytes: [u8; MAX_LEN],
    len: usize,
}

impl QueueToken {
    pub(crate) fn new(owner: &Owner, channel: Option<Channel>) -> Self {
        let mut bytes = [b'@'; MAX_LEN];
        bytes[..OWNER_LEN].copy_from_slice(owner.as_bytes());
        let mut len = OWNER_LEN;
        if let Some(channel) = channel {
            bytes[OWNER_LEN + 1..].copy_from_slice(channel.id());
            len = bytes.len();
        }
        Self { bytes, len }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    const fn has_channel(&self) -> bool {
        self.len == MAX_LEN
    }
}

/// The value of a lock: a token, then a space and a text about its owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LockValue {
    token: QueueToken,
    label: OwnerLabel,
}

impl LockValue {
    /// A token without a channel has no text.
    pub(crate) const fn new(token: QueueToken, label: OwnerLabel) -> Self {
        Self { token, label: if token.has_channel() { label } else { OwnerLabel::EMPTY } }
    }

    pub(crate) fn token(&self) -> &[u8] {
        self.token.as_bytes()
    }

    /// The text, or nothing.
    pub(crate) fn text(&self) -> String {
        self.label.to_string()
    }
}

impl ToRedisArgs for LockValue {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        let mut argument = out.writer_for_next_arg();
        // A buffer in memory takes all of it.
        let _ = argument.write_all(self.token.as_bytes());
        if self.label.is_some() {
            let _ = argument.write_all(b" ");
            let _ = self.label.write(&mut TextWriter(argument));
        }
    }
}

/// Text for a writer of bytes.
struct TextWriter<W>(W);

impl<W: Write> fmt::Write for TextWriter<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write_all(text.as_bytes()).map_err(|_| fmt::Error)
    }
}

impl ToSingleRedisArg for LockValue {}

/// The start of the value of an uncontended lock with a text about its owner. A token without a channel is the whole value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueStart(pub(crate) QueueToken);

impl ToRedisArgs for ValueStart {
    fn write_redis_args<W: ?Sized + RedisWrite>(&self, out: &mut W) {
        let mut start = [b' '; MAX_LEN + 1];
        let Self(QueueToken { bytes, len }) = self;
        start[..MAX_LEN].copy_from_slice(bytes);
        out.write_arg(&start[..if self.0.has_channel() { MAX_LEN + 1 } else { *len }]);
    }
}

impl ToSingleRedisArg for ValueStart {}

/// What the value of a lock says about its owner.
pub(crate) fn owner_info(value: &[u8]) -> Option<OwnerInfo> {
    let (token, text) = value.split_at_checked(MAX_LEN)?;
    let text = text.strip_prefix(b" ").or_else(|| text.strip_prefix(b"+"))?;
    owner_tag(token).and_then(|_| OwnerInfo::parse(text))
}

/// Whether `holder`, the value of a key, is a token of `owner`.
pub(crate) fn is_of(holder: &[u8], owner: &Owner) -> bool {
    holder.starts_with(owner.as_bytes())
}

/// The tag of the owner of `holder`, the value of a key or an entry of a queue. `None` if it is no token.
pub(crate) fn owner_tag(holder: &[u8]) -> Option<OwnerTag> {
    owner_in(holder).map(|owner| owner.tag())
}

/// The owner of `holder`, as [`owner_tag`].
pub(crate) fn owner_in(holder: &[u8]) -> Option<Owner> {
    let (owner, rest) = holder.split_at_checked(OWNER_LEN)?;
    let is_token = rest.is_empty() || rest.starts_with(b"@");
    Owner::from_bytes(owner).filter(|_| is_token)
}

/// How long a queued waiter waits for a message before it claims again. Shorter near the head, in case a message was
/// lost.
pub(crate) fn recheck_interval(rank: u64) -> Duration {
    if rank < 3 { Duration::from_millis(300) } else { Duration::from_secs(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_belongs_to_its_owner_with_and_without_the_contended_mark() {
        let (owner, other) = (Owner::random().unwrap(), Owner::random().unwrap());
        let channel = Channel::random().unwrap();
        for channel in [None, Some(channel), Some(channel.in_shard(0xa0f3))] {
            let token = QueueToken::new(&owner, channel);
            assert!(is_of(token.as_bytes(), &owner));
            assert!(is_of(&[token.as_bytes(), b"+"].concat(), &owner));
            assert!(!is_of(token.as_bytes(), &other));
            assert!(!is_of(b"", &owner));
            assert_eq!(owner_tag(token.as_bytes()), Some(owner.tag()));
            assert_eq!(
                owner_tag(&[token.as_bytes(), b"x"].concat()),
                channel.and(Some(owner.tag()))
            );
        }
        assert_eq!((owner_tag(b""), owner_tag(b"worker-7")), (None, None));
    }

    #[test]
    fn a_text_about_the_owner_follows_the_token() {
        let label = OwnerLabel::of_process(None);
        let (owner, channel) = (Owner::random().unwrap(), Channel::random().unwrap());
        let value = |channel, label| {
            let token = QueueToken::new(&owner, channel);
            LockValue::new(token, label).to_redis_args().concat()
        };
        let mut told = value(Some(channel), label);
        assert_eq!(owner_info(&told), label.info());
        assert_eq!(owner_tag(&told), Some(owner.tag()));
        told[MAX_LEN] = b'+';
        assert_eq!(owner_info(&told), label.info(), "contended");
        assert_eq!(value(Some(channel), OwnerLabel::EMPTY).len(), MAX_LEN);
        assert_eq!(value(None, label).len(), OWNER_LEN);
        assert_eq!(owner_info(&told[..=MAX_LEN]), None);
    }
}
