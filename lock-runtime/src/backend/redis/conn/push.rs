//! Pushes of a server: invalidations of tracked keys, and messages on the pool's channels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use once_cell::sync::OnceCell;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::mpsc::UnboundedSender;

use crate::backend::redis::channel::{ChannelEvent, ChannelMessage};
use crate::backend::redis::net::handshake::PushSink;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::{BackendError, Notifier, Owner};

/// A grant for an owner token that this pool has given up.
pub(crate) struct UnclaimedGrant {
    pub(crate) key: String,
    pub(crate) owner: Owner,
}

/// Passes the pushes of all connections of a pool to its [`Notifier`]. Methods run on the connections' tasks and
/// never block.
///
/// Pushes that arrive before [`subscribe`](Self::subscribe) are dropped.
pub(crate) struct PushHandler {
    notifier: OnceCell<Notifier>,
    /// Owners with an unanswered first claim, and whether the owner has become the head of the queue meanwhile.
    pending_claims: Mutex<HashMap<Owner, bool>>,
    unclaimed: UnboundedSender<UnclaimedGrant>,
    on_contended: Box<dyn Fn(&str) + Send + Sync>,
}

impl PushHandler {
    /// Sends grants for unknown owners to `unclaimed`. `on_contended` receives each key for which a waiter has been
    /// seen.
    pub(crate) fn new(
        unclaimed: UnboundedSender<UnclaimedGrant>,
        on_contended: impl Fn(&str) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (notifier, pending_claims) = (OnceCell::new(), Mutex::default());
        Arc::new(Self { notifier, pending_claims, unclaimed, on_contended: Box::new(on_contended) })
    }

    pub(crate) fn subscribe(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    /// A waiter has been seen in the queue of `key`, whose lock this pool holds.
    pub(crate) fn contended(&self, key: &str) {
        (self.on_contended)(key);
        if let Some(notifier) = self.notifier.get() {
            notifier.contended(key);
        }
    }

    /// Registers `owners` whose first claim enters the queue, until the returned value is dropped. The pool knows a
    /// token only after the answer to its claim. The message that grants the lock may arrive before the answer is
    /// handled.
    pub(crate) fn expect(&self, owners: Vec<Owner>) -> PendingClaims<'_> {
        if !owners.is_empty() {
            self.pending_claims().extend(owners.iter().map(|owner| (*owner, false)));
        }
        PendingClaims { handler: self, owners }
    }

    fn pending_claims(&self) -> MutexGuard<'_, HashMap<Owner, bool>> {
        self.pending_claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_message(&self, notifier: &Notifier, payload: &[u8], scope: &MessageScope) {
        let Some(ChannelMessage { event, owner, key }) = ChannelMessage::parse(payload) else {
            return;
        };
        if !scope.contains(key) {
            return;
        }
        match event {
            ChannelEvent::HeadOfQueue(available_in) => {
                let is_known = notifier.head_of_queue(key, &owner, available_in);
                if !is_known && available_in.is_zero() {
                    match self.pending_claims().get_mut(&owner) {
                        Some(is_head) => *is_head = true,
                        None => {
                            let grant = UnclaimedGrant { key: key.to_owned(), owner };
                            let _ = self.unclaimed.send(grant);
                        }
                    }
                }
            }
            ChannelEvent::Contended => self.contended(key),
            ChannelEvent::Probe => {}
        }
    }
}

impl PushSink for PushHandler {
    fn on_push(&self, push: &PushInfo, scope: &MessageScope) {
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
                self.on_message(notifier, payload, scope);
            }
            _ => {}
        }
    }

    fn resync(&self) {
        if let Some(notifier) = self.notifier.get() {
            notifier.resync();
        }
    }

    fn disconnected(&self, error: &BackendError) {
        if let Some(notifier) = self.notifier.get() {
            notifier.disconnected(error);
        }
    }
}

/// The registration of owners whose first claim is unanswered. Dropping it ends the registration.
pub(crate) struct PendingClaims<'a> {
    handler: &'a PushHandler,
    owners: Vec<Owner>,
}

impl PendingClaims<'_> {
    /// Whether `owner` has become the head of the queue meanwhile.
    pub(crate) fn reached_head(&self, owner: &Owner) -> bool {
        !self.owners.is_empty() && self.handler.pending_claims().get(owner) == Some(&true)
    }
}

impl Drop for PendingClaims<'_> {
    fn drop(&mut self) {
        if !self.owners.is_empty() {
            let mut pending = self.handler.pending_claims();
            for owner in &self.owners {
                pending.remove(owner);
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
