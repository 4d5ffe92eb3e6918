//! A connection beside the one that all requests share. It is told nothing, and nobody keeps it up.

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, Value};

use crate::backend::redis::net::io_task::Mover;

/// Closed when dropped, and with it what it watches.
pub(crate) struct Spare {
    requests: MultiplexedConnection,
    _mover: Mover,
}

impl Spare {
    pub(crate) fn new(requests: MultiplexedConnection, mover: Mover) -> Self {
        Self { requests, _mover: mover }
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
