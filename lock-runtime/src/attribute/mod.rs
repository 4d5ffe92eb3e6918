//! What `#[distributed_lock]` expands to.

pub(crate) mod call;
pub(crate) mod key_template;
pub(crate) mod return_type;
