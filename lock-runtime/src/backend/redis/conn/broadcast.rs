//! A connection on which a server reports the changes of all keys with a prefix.

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, PushInfo, Value};
use tokio::time::timeout;

use crate::backend::BackendError;
use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::net::handshake::{lacks_hello, open};
use crate::backend::redis::net::io_task::IoTask;
use crate::backend::redis::net::progress::ConnectProgress;
use crate::backend::redis::server_error;

/// A connection that is not re-established. Dropping it closes it.
pub(crate) struct BroadcastConnection {
    _requests: MultiplexedConnection,
    io: IoTask,
}

impl BroadcastConnection {
    /// Opens one to the server of `beside`. `on_push` receives its pushes. `None` if the server or the user has no client
    /// tracking.
    pub(crate) async fn open(
        beside: &Connection,
        prefix: &str,
        on_push: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> Result<Option<Self>, BackendError> {
        let (dialer, limit) = beside.dialer()?;
        let progress = ConnectProgress::default();
        let opening = async {
            let login = dialer.login(&progress).await?;
            let (mut requests, io) = match open(&dialer, &login, Some(on_push), &progress).await? {
                Ok(opened) => opened,
                Err(error) if lacks_hello(&error) => return Ok(None),
                Err(error) => return Err(beside.failure(error)),
            };
            let answer = requests.req_packed_command(&track(prefix)).await;
            match answer.and_then(Value::extract_error) {
                Ok(_) => Ok(Some(Self { _requests: requests, io })),
                // An error answer: the user has no right to it, or the command does not exist.
                Err(error) if error.code().is_some() && !server_error::is_transient(&error) => {
                    Ok(None)
                }
                Err(error) => Err(beside.failure(error)),
            }
        };
        let opened = timeout(limit, opening).await;
        opened.unwrap_or_else(|_| Err(progress.too_slow(&beside.server(), limit)))
    }

    /// Returns when the connection has ended.
    pub(crate) async fn ended(&mut self) {
        self.io.ended().await;
    }
}

fn track(prefix: &str) -> Cmd {
    let mut track = redis::cmd("CLIENT");
    track.arg("TRACKING").arg("ON").arg("BCAST");
    // Without a prefix, all keys are reported.
    if !prefix.is_empty() {
        track.arg("PREFIX").arg(prefix);
    }
    track
}
