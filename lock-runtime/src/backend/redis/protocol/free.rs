//! Frees single locks without their wait queues.

use std::time::Duration;

use redis::Value;

use crate::backend::redis::conn::path::Path;
use crate::backend::redis::net::command::CommandWriter;
use crate::backend::redis::protocol::script::FREE;
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer};
use crate::backend::redis::protocol::value::{millis, unexpected};
use crate::backend::{BackendError, Owner};
use crate::base::key::Key;

/// One lock of a release.
#[derive(Clone)]
pub(crate) struct LockToFree {
    pub(crate) key: Key,
    pub(crate) owner: Owner,
    /// Keep the lock for this much longer.
    pub(crate) free_after: Duration,
}

impl ScriptedServer {
    /// Frees each of `locks` by a command of its own. Whether its owner held it.
    pub(crate) async fn free(
        &self,
        hint: RouteHint,
        locks: &[LockToFree],
    ) -> Vec<Result<bool, BackendError>> {
        let command = |at: usize, by, out: &mut CommandWriter<'_>| {
            let LockToFree { key, owner, free_after } = &locks[at];
            let call = FREE.call(out, by, 1);
            call.arg(key.as_str()).arg(owner.as_bytes()).arg(millis(*free_after));
        };
        let answers = self.run(Path::Background, hint, false, locks.len(), &command).await;
        let was_held = |answer| match answer {
            Value::Int(held @ 0..=1) => Ok(held == 1),
            other => Err(unexpected(&other)),
        };
        answers.into_iter().map(|answer| was_held(answer?)).collect()
    }
}
