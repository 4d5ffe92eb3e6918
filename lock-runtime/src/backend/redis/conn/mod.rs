//! Connections that are re-established, dedicated connections, and the pushes of a server.

pub(crate) mod connection;
pub(crate) mod dedicated;
pub(crate) mod push;
