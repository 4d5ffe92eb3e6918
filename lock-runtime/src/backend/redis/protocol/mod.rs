//! How a lock is kept.

pub(crate) mod replicas;
pub(crate) mod script;
pub(crate) mod scripted;
pub(crate) mod scriptless;
pub(crate) mod wait_queue;
pub(crate) mod watch_transaction;
