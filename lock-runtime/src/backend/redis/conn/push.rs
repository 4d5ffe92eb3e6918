//! What a server says without being asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use once_cell::sync::OnceCell;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::mpsc::UnboundedSender;

use crate::backend::redis::channel::{Channel, ChannelEvent, ChannelMessage};
use crate::backend::redis::conn::shard_channel::Shard;
use crate::backend::redis::protocol::contended_keys::ContendedKeys;
use crate::backend::redis::routing::slots::{Address, Slots, slot};
use crate::backend::{Notifier, Owner};
use crate::base::clock::Clock;

/// A grant for an owner that this pool has given up.
pub(crate) struct Stray {
    pub(crate) key: String,
    pub(crate) owner: Owner,
}

/// Which messages that come on one connection are meant.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    /// All: the server has all keys.
    Server,
    /// Those about the slots that the node has. The nodes of a cluster pass each message on to each other, and the
    /// connections to the others bring copies: some so late that the lock has been let go meanwhile.
    Node { slots: Arc<Slots>, address: Address, shard: Shard },
}

impl Home {
    fn keeps(&self, key: &str) -> bool {
        match self {
            Self::Server => true,
            Self::Node { slots, address, .. } => slots.is_owner(slot(key), address),
        }
    }

    /// The channel that tokens name here.
    pub(crate) fn channel(&self, channel: Channel) -> Channel {
        match self {
            Self::Server => channel,
            Self::Node { shard, .. } => shard.of(channel),
        }
    }

    /// Has messages of this server told on `connection` alone, where the server has shard channels.
    pub(crate) async fn listen(&self, connection: &mut MultiplexedConnection, channel: Channel) {
        match self {
            Self::Server => {}
            Self::Node { slots, address, shard } => {
                let is_here = |slot| slots.is_owner(slot, address);
                shard.listen(connection, channel, is_here).await;
            }
        }
    }

    /// Any slot of it.
    pub(crate) fn some_slot(&self) -> u16 {
        match self {
            Self::Server => 0,
            Self::Node { slots, address, .. } => slots.some_slot(address).unwrap_or(0),
        }
    }
}

/// Takes pushes from the connections' own tasks, so it never blocks.
pub(crate) struct Ears {
    notifier: OnceCell<Notifier>,
    newcomers: Mutex<HashMap<Owner, bool>>,
    strays: UnboundedSender<Stray>,
    hot: Arc<ContendedKeys>,
    clock: Clock,
}

impl Ears {
    pub(crate) fn new(
        strays: UnboundedSender<Stray>,
        hot: Arc<ContendedKeys>,
        clock: Clock,
    ) -> Self {
        Self { notifier: OnceCell::new(), newcomers: Mutex::default(), strays, hot, clock }
    }

    pub(crate) fn subscribe(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// The connection is a new one: what happened meanwhile has been said to nobody.
    pub(crate) fn has_missed_something(&self) {
        if let Some(notifier) = self.notifier.get() {
            notifier.resync();
        }
    }

    /// A renewal has seen that others wait.
    pub(crate) fn contended(&self, key: &str) {
        self.hot.note(key, self.clock.now());
        if let Some(notifier) = self.notifier.get() {
            notifier.contended(key);
        }
    }

    pub(crate) fn hear(&self, push: &PushInfo, home: &Home) {
        let Some(notifier) = self.notifier.get() else { return };
        match (&push.kind, push.data.as_slice()) {
            (PushKind::Invalidate, [Value::Array(keys)]) => {
                for key in keys.iter().filter_map(text) {
                    notifier.key_changed(key);
                }
            }
            // All keys: FLUSHALL, FLUSHDB.
            (PushKind::Invalidate, _) => notifier.resync(),
            (PushKind::Message | PushKind::SMessage, [_, Value::BulkString(payload)]) => {
                self.told(notifier, payload, home);
            }
            _ => {}
        }
    }

    /// Notes `owners` whose first claim goes to the line. The pool knows their names from the answer on, and
    /// they may be called before it has looked at that.
    pub(crate) fn expect(&self, owners: Vec<Owner>) -> Newcomers<'_> {
        if !owners.is_empty() {
            self.newcomers().extend(owners.iter().map(|owner| (*owner, false)));
        }
        Newcomers { ears: self, owners }
    }

    fn newcomers(&self) -> MutexGuard<'_, HashMap<Owner, bool>> {
        self.newcomers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self, notifier: &Notifier, payload: &[u8], home: &Home) {
        let Some(ChannelMessage { event, owner, key }) = ChannelMessage::parse(payload) else {
            return;
        };
        if !home.keeps(key) {
            return;
        }
        match event {
            ChannelEvent::HeadOfQueue(within) => {
                if !notifier.head_of_queue(key, &owner, within) && within.is_zero() {
                    match self.newcomers().get_mut(&owner) {
                        Some(called) => *called = true,
                        None => drop(self.strays.send(Stray { key: key.to_owned(), owner })),
                    }
                }
            }
            ChannelEvent::Contended => self.contended(key),
            ChannelEvent::Probe => {}
        }
    }
}

/// Owners whose first claim is on its way.
pub(crate) struct Newcomers<'a> {
    ears: &'a Ears,
    owners: Vec<Owner>,
}

impl Newcomers<'_> {
    /// Whether `owner` has been called meanwhile.
    pub(crate) fn was_called(&self, owner: &Owner) -> bool {
        !self.owners.is_empty() && self.ears.newcomers().get(owner) == Some(&true)
    }
}

impl Drop for Newcomers<'_> {
    fn drop(&mut self) {
        if !self.owners.is_empty() {
            let mut newcomers = self.ears.newcomers();
            for owner in &self.owners {
                newcomers.remove(owner);
            }
        }
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}
