//! The lock engine: connects queues, leases and the store.

pub(crate) mod acquire;
mod admission;
pub(crate) mod core;
mod dispatch;
mod final_release;
mod grant;
pub(crate) mod hold;
mod linger;
mod linger_expiry;
mod outgoing;
mod release;
pub(crate) mod shutdown;
pub(crate) mod snapshot;
mod store_status;
mod undo;
mod undo_queue;
mod waiter;
mod wakeups;
