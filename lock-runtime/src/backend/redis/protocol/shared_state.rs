//! What all connections of a pool share.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::backend::queue_events::UnclaimedGrant;
use crate::backend::redis::channel::Channel;
use crate::backend::redis::conn::push::PushHandler;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::protocol::contended_keys::ContendedKeys;
use crate::backend::{BackendConfig, Limits};
use crate::base::clock::Clock;
use crate::base::error::LockError;

/// Shared by all connections of a pool; a clone refers to the same key names, push handler and contended keys.
#[derive(Clone)]
pub(crate) struct SharedState {
    pub(crate) keyspace: Keyspace,
    pub(crate) push_handler: Arc<PushHandler>,
    pub(crate) contended: Arc<ContendedKeys>,
    pub(crate) channel: Channel,
    pub(crate) clock: Clock,
    pub(crate) request_timeout: Duration,
    pub(crate) limits: Limits,
}

impl SharedState {
    /// Also returns the receiver of unclaimed grants, for
    /// [`release_unclaimed`](crate::backend::unclaimed_grants::release_unclaimed).
    pub(crate) fn new(
        keyspace: Keyspace,
        config: BackendConfig<'_>,
    ) -> Result<(Self, mpsc::UnboundedReceiver<UnclaimedGrant>), LockError> {
        let BackendConfig { clock, request_timeout, .. } = config;
        let limits = config.limits();
        let (found, unclaimed) = mpsc::unbounded_channel();
        let contended = Arc::new(ContendedKeys::new(clock));
        let noted = contended.clone();
        let push_handler = PushHandler::new(found, move |key| noted.note(key));
        let channel = Channel::random()?;
        Ok((
            Self { keyspace, push_handler, contended, channel, clock, request_timeout, limits },
            unclaimed,
        ))
    }
}
