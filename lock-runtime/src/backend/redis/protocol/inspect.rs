//! Reads a lock and its wait queue on one server with scripts.

use redis::Value;

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::script::{By, INSPECT};
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer};
use crate::backend::redis::protocol::value::{duration, unexpected};
use crate::backend::redis::protocol::wait_queue::{owner_in, owner_info, owner_tag};
use crate::backend::{BackendError, Inspection, LockHolder, WaitingOwner};
use crate::base::key::Key;

/// What one server has at the key of a lock.
#[derive(Debug)]
pub(crate) struct StoredLock {
    /// Empty for a key of another type.
    pub(crate) value: Vec<u8>,
    /// Milliseconds. Negative if the key does not expire.
    pub(crate) left: i64,
}

impl ScriptedServer {
    pub(crate) async fn inspect(
        &self,
        hint: RouteHint,
        keys: &[Key],
    ) -> Vec<Result<Inspection, BackendError>> {
        // While a slot moves, a lock and its queue may be at two servers.
        let has_queue = hint == RouteHint::Direct && self.keeps_wait_queues();
        let command = |at: usize, by, out: &mut CommandWriter<'_>| {
            let key = &keys[at];
            command(by, key, has_queue.then(|| self.keyspace.wait_queue(key)), out);
        };
        let replies = self.run_named(Path::Background, hint, false, keys.len(), &command).await;
        replies.into_iter().map(|reply| inspection(&reply?)).collect()
    }
}

/// The call that reads `key`, and its wait queue if there is one.
pub(crate) fn command(by: By, key: &Key, queue: Option<String>, out: &mut CommandWriter<'_>) {
    let call = INSPECT.call(out, by, 1 + usize::from(queue.is_some()));
    call.arg(key.as_str()).arg(queue).arg(Inspection::MAX_WAITERS);
}

/// What the reply to [`command`] says about the lock, and the rest of the reply. `None` for a free lock.
pub(crate) fn stored_lock(reply: &Value) -> Result<(Option<StoredLock>, &[Value]), BackendError> {
    let Value::Array(parts) = reply else { return Err(unexpected(reply)) };
    let [Value::BulkString(value), Value::Int(left), rest @ ..] = parts.as_slice() else {
        return Err(unexpected(reply));
    };
    let lock = (*left != -2).then(|| StoredLock { value: value.clone(), left: *left });
    Ok((lock, rest))
}

fn inspection(reply: &Value) -> Result<Inspection, BackendError> {
    let (lock, queue) = stored_lock(reply)?;
    let holder = |lock: StoredLock| {
        LockHolder::new(owner_tag(&lock.value))
            .with_token(owner_in(&lock.value))
            .with_expiry(duration(lock.left))
            .with_info(owner_info(&lock.value))
    };
    let inspection = Inspection::new(lock.map(holder));
    let [Value::Int(queued), tokens @ ..] = queue else { return Err(unexpected(reply)) };
    let Ok(queued) = usize::try_from(*queued) else { return Ok(inspection) };
    let waiters = tokens.iter().filter_map(|token| match token {
        Value::BulkString(token) => Some(WaitingOwner::new(owner_tag(token))),
        _ => None,
    });
    Ok(inspection.with_queue(waiters, queued))
}
