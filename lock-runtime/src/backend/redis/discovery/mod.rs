//! Which server is the master.

pub(crate) mod sentinel;
pub(crate) mod sentinel_url;
pub(crate) mod target;
