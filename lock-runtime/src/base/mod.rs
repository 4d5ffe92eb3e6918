//! Values and small mechanisms without I/O, which everything else is built on.

pub(crate) mod backend_error;
pub(crate) mod call_site;
pub(crate) mod clock;
pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod fence_gate;
pub(crate) mod finding;
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) mod hex;
pub(crate) mod inspection;
pub(crate) mod jitter;
pub(crate) mod key;
pub(crate) mod key_pattern;
pub(crate) mod key_rules;
pub(crate) mod lock_name;
pub(crate) mod lock_order;
pub(crate) mod lock_spec;
pub(crate) mod loss;
pub(crate) mod measurement;
#[cfg(feature = "metrics")]
pub(crate) mod metric_handles;
pub(crate) mod metrics;
pub(crate) mod mutex;
pub(crate) mod options;
pub(crate) mod order_graph;
pub(crate) mod outcome;
pub(crate) mod owner;
pub(crate) mod owner_info;
pub(crate) mod owner_tag;
pub(crate) mod policy;
pub(crate) mod pool_settings;
pub(crate) mod problem;
pub(crate) mod process;
#[cfg(feature = "metrics")]
pub(crate) mod recorder;
pub(crate) mod sequencer;
pub(crate) mod shared_policy;
pub(crate) mod span_slot;
pub(crate) mod sql_dialect;
pub(crate) mod sql_fence_gate;
pub(crate) mod sync;
pub(crate) mod template_shape;
pub(crate) mod text;
pub(crate) mod ttl;
#[cfg(any(feature = "axum", feature = "actix"))]
pub(crate) mod unprintable;
