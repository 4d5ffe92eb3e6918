//! Values and small mechanisms without I/O, which everything else is built on.

pub(crate) mod backend_error;
pub(crate) mod call_site;
pub(crate) mod clock;
pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod fence_gate;
pub(crate) mod jitter;
pub(crate) mod key;
pub(crate) mod key_rules;
pub(crate) mod lock_name;
pub(crate) mod lock_spec;
pub(crate) mod loss;
pub(crate) mod measurement;
#[cfg(feature = "metrics")]
pub(crate) mod metric_handles;
pub(crate) mod metrics;
pub(crate) mod options;
pub(crate) mod outcome;
pub(crate) mod owner;
pub(crate) mod problem;
pub(crate) mod process;
#[cfg(feature = "metrics")]
pub(crate) mod recorder;
pub(crate) mod span_slot;
pub(crate) mod sync;
pub(crate) mod text;
