//! Pushes of a server: invalidations of tracked keys, and messages on the pool's channels.

use std::sync::Arc;

use redis::{PushInfo, PushKind, Value};
use tokio::sync::mpsc::UnboundedSender;

use crate::backend::queue_events::{PendingClaims, QueueEvents, UnclaimedGrant};
use crate::backend::redis::channel::{ChannelEvent, ChannelMessage};
use crate::backend::redis::net::handshake::PushSink;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::{BackendError, Notifier, Owner};

/// Passes the pushes of all connections of a pool to its [`Notifier`]. Methods run on the connections' tasks and
/// never block.
///
/// Pushes that arrive before [`subscribe`](Self::subscribe) are dropped.
pub(crate) struct PushHandler {
    events: Arc<QueueEvents>,
    on_contended: Box<dyn Fn(&str) + Send + Sync>,
}

impl PushHandler {
    /// Sends grants for unknown owners to `unclaimed`. `on_contended` receives each key for which a waiter has been
    /// seen.
    pub(crate) fn new(
        unclaimed: UnboundedSender<UnclaimedGrant>,
        on_contended: impl Fn(&str) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { events: QueueEvents::new(unclaimed), on_contended: Box::new(on_contended) })
    }

    pub(crate) fn subscribe(&self, notifier: Notifier) {
        self.events.subscribe(notifier);
    }

    /// A waiter has been seen in the queue of `key`, whose lock this pool holds.
    pub(crate) fn contended(&self, key: &str) {
        (self.on_contended)(key);
        self.events.contended(key);
    }

    /// Registers `owners` whose first claim enters the queue, until the returned value is dropped.
    pub(crate) fn expect(&self, owners: Vec<Owner>) -> PendingClaims<'_> {
        self.events.expect(owners)
    }

    fn on_message(&self, payload: &[u8], scope: &MessageScope) {
        let Some(ChannelMessage { event, owner, key }) = ChannelMessage::parse(payload) else {
            return;
        };
        if !scope.contains(key) {
            return;
        }
        match event {
            ChannelEvent::HeadOfQueue(available_in) => {
                self.events.head_of_queue(key, owner, available_in);
            }
            ChannelEvent::Contended => self.contended(key),
            ChannelEvent::Probe => {}
        }
    }
}

impl PushSink for PushHandler {
    fn on_push(&self, push: &PushInfo, scope: &MessageScope) {
        let Some(notifier) = self.events.notifier() else { return };
        match (&push.kind, push.data.as_slice()) {
            (PushKind::Invalidate, [Value::Array(keys)]) => {
                for key in keys.iter().filter_map(text) {
                    notifier.key_changed(key);
                }
            }
            // All keys: FLUSHALL, FLUSHDB.
            (PushKind::Invalidate, _) => notifier.resync(),
            (PushKind::Message | PushKind::SMessage, [_, Value::BulkString(payload)]) => {
                self.on_message(payload, scope);
            }
            _ => {}
        }
    }

    fn resync(&self) {
        self.events.resync();
    }

    fn disconnected(&self, error: &BackendError) {
        self.events.disconnected(error);
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}
