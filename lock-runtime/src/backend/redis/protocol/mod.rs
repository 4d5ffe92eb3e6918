//! How a lock is kept: by scripts with a wait queue, or by plain commands.

pub(crate) mod acquire;
pub(crate) mod cas_commands;
pub(crate) mod contended_keys;
pub(crate) mod counter_clock;
pub(crate) mod diagnosis;
pub(crate) mod fence_transaction;
pub(crate) mod free;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod lock_changes;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod replicas;
pub(crate) mod script;
pub(crate) mod scripted;
pub(crate) mod scripted_server;
pub(crate) mod scriptless;
pub(crate) mod shared_state;
pub(crate) mod value;
pub(crate) mod wait_queue;
pub(crate) mod watch_transaction;
pub(crate) mod write_batches;
