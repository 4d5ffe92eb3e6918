//! What a grant is worth: its validity, its renewals, and which of its requests are still in flight.

pub(crate) mod grant;
pub(crate) mod held_lease;
#[expect(clippy::module_inception, reason = "one noun per file")]
pub(crate) mod lease;
pub(crate) mod lease_state;
pub(crate) mod listener;
mod listeners;
mod offer;
mod phase;
pub(crate) mod renewal;
pub(crate) mod renewal_action;
pub(crate) mod tracker;
