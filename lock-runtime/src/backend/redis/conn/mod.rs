//! Connections that are re-established, dedicated connections, and the pushes of a server.

pub(crate) mod answer_sign;
pub(crate) mod broadcast;
pub(crate) mod connection;
pub(crate) mod dedicated;
mod end_reason;
mod foreground;
mod history;
mod link_io;
mod opening_foreground;
pub(crate) mod path;
pub(crate) mod prelude;
pub(crate) mod push;
