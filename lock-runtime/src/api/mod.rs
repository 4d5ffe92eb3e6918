//! What programs call.

pub(crate) mod call_keys;
pub(crate) mod call_record;
pub(crate) mod call_sites;
pub(crate) mod diagnosis;
pub(crate) mod enter;
pub(crate) mod entered;
pub(crate) mod forced_release;
pub(crate) mod guard;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod lock_changes;
pub(crate) mod lock_order;
pub(crate) mod locked_future;
pub(crate) mod named_pools;
pub(crate) mod pool;
#[cfg(feature = "testing")]
pub(crate) mod pool_override;
pub(crate) mod reentrancy;
pub(crate) mod request;
pub(crate) mod serve;
pub(crate) mod settings;
