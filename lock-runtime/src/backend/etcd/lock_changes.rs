//! Reports changes of locks, by a watch of all their keys.

use crate::backend::etcd::grpc::CallFailure;
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::protocol::watch::{self, WatchMessage, WatchedKeys};
use crate::backend::etcd::server_error::CallStatus;
use crate::backend::{BackendError, KeyPattern};

impl EtcdLocks {
    /// Calls `changed` like [`Backend::watch`](crate::backend::Backend::watch), over a stream of its own.
    pub(crate) async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        let member = self.link.member().await?;
        let failed = |failure| member.failed(failure);
        let (mut sender, mut reader) =
            member.grpc.stream("/etcdserverpb.Watch/Watch").await.map_err(failed)?;
        let names = &self.keys.names;
        let (from, to) = names.starting_with(&pattern.start());
        sender.send(&watch::create(1, &WatchedKeys::Range { from, to }, 0)).map_err(failed)?;
        let mut has_begun = false;
        loop {
            let message = tokio::select! {
                message = reader.message() => message.map_err(failed)?,
                error = member.ended() => return Err(error),
            };
            let message =
                WatchMessage::read(&message).map_err(|_| failed(CallFailure::Malformed))?;
            if message.is_cancelled {
                let status = CallStatus { code: 0, message: message.reason };
                // Without the right to the keys.
                return if status.ends_connection() {
                    Err(failed(CallFailure::Refused(status)))
                } else {
                    Ok(())
                };
            }
            let is_matched = |name: &[u8]| {
                names.lock_of(name).is_some_and(|lock| pattern.key_of(lock.as_str()).is_some())
            };
            // The first message says that the watch has begun.
            if !has_begun || message.events.iter().any(|event| is_matched(&event.key.key)) {
                has_begun = true;
                changed();
            }
        }
    }
}
