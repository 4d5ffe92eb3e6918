//! Values and small mechanisms without I/O, which everything else is built on.

pub(crate) mod backend_error;
pub(crate) mod call_site;
pub(crate) mod clock;
pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod fence_gate;
pub(crate) mod inspection;
pub(crate) mod jitter;
pub(crate) mod key;
pub(crate) mod key_rules;
pub(crate) mod lock_spec;
pub(crate) mod options;
pub(crate) mod owner;
pub(crate) mod owner_info;
pub(crate) mod owner_tag;
pub(crate) mod problem;
pub(crate) mod process;
pub(crate) mod sync;
pub(crate) mod text;
