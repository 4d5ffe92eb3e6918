//! The channel of a pool in one shard of a cluster. A message on it reaches that shard's servers only.
//!
//! A shard channel is subscribed to and published on at the server that has the slot of its name (`SSUBSCRIBE`,
//! `SPUBLISH`, Redis 7.0). So each connection to a server of a cluster searches for four digits. They place the name of
//! the pool's channel in a slot of that server. The tokens stored at that server end with these digits. If the shard
//! channel cannot be used, a message goes to the channel without the digits, which reaches all connections of the pool.
//!
//! The digits only route messages. A key that has moved with its slot keeps the digits of the server that stored it.
//! Its holder is notified over the pool's channel. So is the owner of a moved entry of a wait queue. If that owner
//! has sent a new claim meanwhile, the message is for a token that was given up, and the lock is passed on.
//!
//! When the slot of the name leaves the server, the connection ends (see [`shard_stream`](super::shard_stream)); the
//! next connection finds other digits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use redis::Value;
use redis::aio::{ConnectionLike, MultiplexedConnection};

use crate::backend::redis::channel::Channel;
use crate::backend::redis::hash_slot::slot_of;
use crate::backend::redis::server_error;
use crate::backend::redis::slot_map::{Address, SlotMap};

/// Which messages on one connection are for this pool's locks.
#[derive(Clone, Debug)]
pub(crate) enum MessageScope {
    /// All: the server has all keys.
    AllSlots,
    /// Messages about keys in the slots of the server at `address`. The servers of a cluster forward each message to
    /// each other, so the connections to the others deliver copies. A copy may arrive after the lock has been
    /// released.
    OwnedSlots { slots: Arc<SlotMap>, address: Address, shard: ShardChannel },
}

impl MessageScope {
    pub(crate) fn contains(&self, key: &str) -> bool {
        match self {
            Self::AllSlots => true,
            Self::OwnedSlots { slots, address, .. } => slots.is_owner(slot_of(key), address),
        }
    }

    /// The channel that tokens at this server name.
    pub(crate) fn channel(&self, channel: Channel) -> Channel {
        match self {
            Self::AllSlots => channel,
            Self::OwnedSlots { shard, .. } => shard.of(channel),
        }
    }

    /// Subscribes `connection` to a shard channel, if the server is part of a cluster and has shard channels.
    pub(crate) async fn subscribe(&self, connection: &mut MultiplexedConnection, channel: Channel) {
        if let Self::OwnedSlots { slots, address, shard } = self {
            let is_here = |slot| slots.is_owner(slot, address);
            shard.subscribe(connection, channel, is_here).await;
        }
    }

    /// A slot of this server.
    pub(crate) fn some_slot(&self) -> u16 {
        match self {
            Self::AllSlots => 0,
            Self::OwnedSlots { slots, address, .. } => slots.some_slot(address).unwrap_or(0),
        }
    }
}

/// The number of the shard channel that the connection to one server is subscribed to, or zero. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ShardChannel(Arc<AtomicU16>);

impl ShardChannel {
    fn of(&self, channel: Channel) -> Channel {
        channel.in_shard(self.0.load(Ordering::Relaxed))
    }

    /// Subscribes `connection` to a shard channel. `is_here`: whether the server has a slot.
    async fn subscribe(
        &self,
        connection: &mut MultiplexedConnection,
        channel: Channel,
        is_here: impl Fn(u16) -> bool,
    ) {
        // The map may still list slots that have left the server.
        const TRIES: usize = 8;
        // Enough for a server with one slot in two hundred, and too few to delay the driver.
        const NUMBERS: u16 = 2_048;
        self.0.store(0, Ordering::Relaxed);
        let mut gone = Vec::new();
        for number in 1..=NUMBERS {
            let name = channel.in_shard(number).shard_name();
            let slot = slot_of(&name);
            if !is_here(slot) || gone.contains(&slot) {
                continue;
            }
            let mut subscribe = redis::cmd("SSUBSCRIBE");
            subscribe.arg(name);
            let answer = connection.req_packed_command(&subscribe).await;
            match answer.and_then(Value::extract_error) {
                Ok(Value::Push { .. }) => return self.0.store(number, Ordering::Relaxed),
                Err(error) if server_error::is_about_slots(&error) && gone.len() < TRIES => {
                    gone.push(slot);
                }
                // An older server, or the user has no right to the command.
                Ok(_) | Err(_) => return,
            }
        }
    }
}
