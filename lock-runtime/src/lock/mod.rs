//! The lock engine: connects queue, lease and store.

pub(crate) mod acquire;
pub(crate) mod admission;
pub(crate) mod core;
pub(crate) mod hold;
pub(crate) mod release;
pub(crate) mod undo;
mod wakeups;
