//! A connection that one task uses alone, for `WATCH`.

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, Value};

use crate::backend::redis::net::io_task::IoTask;
use crate::base::clock::Instant;

/// A connection without pushes, which is not re-established. Dropping it closes it and ends its `WATCH`es.
pub(crate) struct DedicatedConnection {
    requests: MultiplexedConnection,
    _io: IoTask,
    /// When the connection beside which this one was opened had been opened. `None` if it was down.
    pub(super) generation: Option<Instant>,
}

impl DedicatedConnection {
    pub(super) fn new(
        requests: MultiplexedConnection,
        io: IoTask,
        generation: Option<Instant>,
    ) -> Self {
        Self { requests, _io: io, generation }
    }

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
