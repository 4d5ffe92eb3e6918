//! Byte streams to servers, and the handshake of a new connection.

pub(crate) mod command;
pub(crate) mod direct;
pub(crate) mod handshake;
pub(crate) mod io_task;
pub(crate) mod progress;
mod reply;
pub(crate) mod role;
pub(crate) mod shard_channel;
pub(crate) mod shard_stream;
#[cfg(feature = "rediss")]
pub(crate) mod tls;
pub(crate) mod transport;
