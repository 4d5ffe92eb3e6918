//! Waiting inside one process: a FIFO queue per key, and the permit to act for a key.

pub(crate) mod key_queue;
pub(crate) mod last_answer;
mod lingers;
mod notifications;
pub(crate) mod permit;
pub(crate) mod permit_state;
pub(crate) mod permits_wait;
pub(crate) mod wait_params;
pub(crate) mod wait_queue;
pub(crate) mod waiting;
pub(crate) mod waiting_keys;
pub(crate) mod wake_signal;
