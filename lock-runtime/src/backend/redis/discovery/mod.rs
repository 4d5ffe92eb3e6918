//! Finding the master: at a fixed address, or by sentinels.

pub(crate) mod sentinel;
pub(crate) mod sentinel_url;
pub(crate) mod target;
