//! The Pub/Sub channels of a pool, and the messages that the scripts publish on them.

use std::time::Duration;

use crate::backend::Owner;
use crate::base::error::LockError;

/// The prefix of every channel name; `wait_queue.lua` contains it too.
const PREFIX: &str = "lock_runtime:";

/// The length of an owner token.
pub(crate) const OWNER_LEN: usize = 32;

const POOL: usize = 12;

/// The channel of one pool, and four digits that select a shard channel of a cluster
/// (see [`shard_channel`](crate::backend::redis::net::shard_channel)).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Channel([u8; POOL + 4]);

impl Channel {
    /// A new channel, without a shard.
    pub(crate) fn random() -> Result<Self, LockError> {
        let mut id = [b'0'; POOL + 4];
        id[..POOL].copy_from_slice(&Owner::random()?.as_bytes()[..POOL]);
        Ok(Self(id))
    }

    /// The same pool's channel with shard number `number`; zero is no shard.
    pub(crate) fn in_shard(self, number: u16) -> Self {
        let mut id = self.0;
        for (at, digit) in id[POOL..].iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[usize::from(number >> (12 - 4 * at) & 0xf)];
        }
        Self(id)
    }

    /// The name for `SUBSCRIBE`: in a cluster, messages on it reach all servers.
    pub(crate) fn name(self) -> Vec<u8> {
        [PREFIX.as_bytes(), &self.0[..POOL]].concat()
    }

    /// The name for `SSUBSCRIBE`: messages on it stay in one shard.
    pub(crate) fn shard_name(self) -> String {
        let id: String = self.0.iter().copied().map(char::from).collect();
        [PREFIX, &id].concat()
    }

    /// The part of the name that is stored in tokens.
    pub(crate) fn id(&self) -> &[u8] {
        &self.0
    }
}

/// A message about one lock, published on the channel of a pool.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChannelMessage<'a> {
    pub(crate) event: ChannelEvent,
    pub(crate) owner: Owner,
    pub(crate) key: &'a str,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChannelEvent {
    /// The owner has been granted the lock, or is the next in the queue and may claim the lock after this time.
    HeadOfQueue(Duration),
    /// The owner holds the lock, and a waiter has joined the queue.
    Contended,
    /// A test message of the pool to itself.
    Probe,
}

impl<'a> ChannelMessage<'a> {
    /// Parses `event:milliseconds:`, the 32 digits of the owner, and the key. `None` for anything else.
    pub(crate) fn parse(payload: &'a [u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(payload).ok()?.splitn(3, ':');
        let (event, millis, rest) = (parts.next()?, parts.next()?, parts.next()?);
        let event = match event {
            "called" => ChannelEvent::HeadOfQueue(Duration::from_millis(millis.parse().ok()?)),
            "wanted" => ChannelEvent::Contended,
            "probe" => ChannelEvent::Probe,
            _ => return None,
        };
        let (owner, key) = rest.split_at_checked(OWNER_LEN)?;
        Some(Self { event, owner: Owner::from_text(owner.as_bytes().try_into().ok()?), key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_parsed_and_anything_else_ignored() {
        let owner = [b'a'; OWNER_LEN];
        let parsed = |payload: String| -> Option<(ChannelEvent, String)> {
            ChannelMessage::parse(payload.as_bytes()).map(|message| {
                assert_eq!(message.owner.as_bytes(), &owner);
                (message.event, message.key.to_owned())
            })
        };
        let text = String::from_utf8(owner.to_vec()).unwrap();
        let key = || "a:b:{ü}".to_owned();
        assert_eq!(
            parsed(format!("called:150:{text}a:b:{{ü}}")),
            Some((ChannelEvent::HeadOfQueue(Duration::from_millis(150)), key()))
        );
        let contended = parsed(format!("wanted:0:{text}a:b:{{ü}}"));
        assert_eq!(contended, Some((ChannelEvent::Contended, key())));
        for odd in ["", "called", "called:x:", "sold:0:", "called:0:short"] {
            assert_eq!(ChannelMessage::parse(odd.as_bytes()), None, "{odd}");
        }
    }
}
