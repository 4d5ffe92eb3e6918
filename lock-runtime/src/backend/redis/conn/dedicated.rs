//! A connection that only one task uses, for `WATCH`.

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::time::timeout;

use crate::backend::BackendError;
use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::net::handshake::log_in_minimal;
use crate::backend::redis::net::io_task::IoTask;
use crate::backend::redis::net::progress::ConnectProgress;
use crate::base::clock::Instant;

/// A connection without pushes, which is not re-established. Dropping it closes it and ends its `WATCH`es.
pub(crate) struct DedicatedConnection {
    requests: MultiplexedConnection,
    _io: IoTask,
    /// When the main connection, beside which this one was opened, had been opened. `None` if it was down.
    generation: Option<Instant>,
}

impl Connection {
    /// Opens another connection to the same server, for commands that cannot share one.
    pub(crate) async fn open_dedicated(&self) -> Result<DedicatedConnection, BackendError> {
        let generation = self.generation();
        let (dialer, limit) = self.dialer()?;
        let progress = ConnectProgress::default();
        let opened = timeout(limit, log_in_minimal(&dialer, &progress)).await;
        let (requests, io) =
            opened.unwrap_or_else(|_| Err(progress.too_slow(&self.server(), limit)))?;
        Ok(DedicatedConnection { requests, _io: io, generation })
    }

    /// Whether `dedicated` was opened beside the current connection, and not beside one that has ended. Another server
    /// may have become the master since then, and the former master may still answer.
    pub(crate) fn is_beside(&self, dedicated: &DedicatedConnection) -> bool {
        dedicated.generation.is_some() && dedicated.generation == self.generation()
    }
}

impl DedicatedConnection {
    pub(crate) async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        self.requests.req_packed_command(command).await?.extract_error()
    }

    /// Sends several commands in one write. One answer per command, in order.
    pub(crate) async fn send_all(
        &mut self,
        commands: &Pipeline,
    ) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
        let count = commands.len();
        let values = self.requests.req_packed_commands(commands, 0, count).await?;
        Ok(values.into_iter().map(Value::extract_error).collect())
    }
}
