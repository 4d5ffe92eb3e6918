//! Where a command goes.

pub(crate) mod cluster;
pub(crate) mod slots;
