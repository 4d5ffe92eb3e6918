//! Connections that are kept up, and what the server pushes on them.

pub(crate) mod backoff;
pub(crate) mod connection;
pub(crate) mod dedicated;
pub(crate) mod push;
pub(crate) mod shard_channel;
