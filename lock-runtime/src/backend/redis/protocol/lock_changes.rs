//! Reports changes of locks on one server, by client tracking of all keys with a prefix.

use std::sync::Arc;

use redis::{PushInfo, PushKind, Value};
use tokio::sync::Notify;

use crate::backend::redis::conn::broadcast::BroadcastConnection;
use crate::backend::redis::conn::connection::Connection;
use crate::backend::{BackendError, FailureKind, KeyPattern};
use crate::base::key_rules::RESERVED;

/// Calls `changed` as [`Backend::watch`](crate::backend::Backend::watch), on a connection of its own. Ends immediately if
/// the server or the user has no tracking.
pub(crate) async fn watch_locks(
    connection: &Connection,
    pattern: &KeyPattern,
    changed: &(dyn Fn() + Send + Sync),
) -> Result<(), BackendError> {
    let pushed = Arc::new(Notify::new());
    let (on_push, pattern_of_pushes) = (pushed.clone(), pattern.clone());
    let on_push = move |push| {
        if is_of_locks(&push, &pattern_of_pushes) {
            on_push.notify_one();
        }
    };
    let opened = BroadcastConnection::open(connection, &pattern.start(), on_push).await?;
    let Some(mut broadcast) = opened else { return Ok(()) };
    changed();
    loop {
        tokio::select! {
            () = pushed.notified() => changed(),
            () = broadcast.ended() => return Err(ended()),
        }
    }
}

/// Whether a push reports a change to a lock with a matching key, or a change to all keys.
fn is_of_locks(push: &PushInfo, pattern: &KeyPattern) -> bool {
    match (&push.kind, push.data.as_slice()) {
        (PushKind::Invalidate, [Value::Array(keys)]) => keys.iter().any(|key| match key {
            Value::BulkString(key) => {
                std::str::from_utf8(key).is_ok_and(|key| pattern.key_of(lock_of(key)).is_some())
            }
            _ => false,
        }),
        (PushKind::Invalidate, _) => true,
        _ => false,
    }
}

/// The lock that a stored key belongs to: its own, or that of its wait queue.
fn lock_of(key: &str) -> &str {
    key.split_once(RESERVED).map_or(key, |(lock, _)| lock.strip_suffix(':').unwrap_or(lock))
}

#[cold]
fn ended() -> BackendError {
    BackendError::new(FailureKind::NotApplied, "the connection that reports changes has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_locks_and_their_queues_count() {
        let pattern = KeyPattern::new("app:", "order:*");
        let pushed = |keys: &[&str]| {
            let keys = keys.iter().map(|key| Value::BulkString(key.as_bytes().to_vec()));
            let data = vec![Value::Array(keys.collect())];
            is_of_locks(&PushInfo { kind: PushKind::Invalidate, data }, &pattern)
        };
        assert!(pushed(&["app:order:1"]) && pushed(&["app:stock:1", "app:order:1"]));
        assert!(pushed(&["app:order:1:lock_runtime:line"]));
        assert!(!pushed(&["app:stock:1", "order:1", "app:lock_runtime:fence"]) && !pushed(&[]));
        let all = PushInfo { kind: PushKind::Invalidate, data: vec![Value::Nil] };
        assert!(is_of_locks(&all, &pattern));
        let other = PushInfo { kind: PushKind::Message, data: Vec::new() };
        assert!(!is_of_locks(&other, &pattern));
    }
}
