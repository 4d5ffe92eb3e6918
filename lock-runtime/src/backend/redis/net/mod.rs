//! Bytes and the greeting: sockets, TLS, log-in, and the task that moves bytes.

pub(crate) mod handshake;
pub(crate) mod io_task;
#[cfg(feature = "rediss")]
pub(crate) mod tls;
pub(crate) mod transport;
