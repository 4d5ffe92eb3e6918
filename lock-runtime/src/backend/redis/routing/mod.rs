//! Where a command goes.

pub(crate) mod slots;
