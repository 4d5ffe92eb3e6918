//! What one acquire asks for.

use std::sync::Arc;

use crate::base::call_location::CallLocation;
use crate::base::call_site::LockLabel;
use crate::base::key::Key;
use crate::base::metrics::LockMetrics;
use crate::base::owner_info::OwnerLabel;
use crate::base::shared_policy::SharedPolicy;
use crate::base::span_slot::SpanSlot;

/// The keys and the policy of one acquire. Constant from the call to the release.
#[derive(Debug)]
pub(crate) struct LockSpec {
    pub(crate) label: LockLabel,
    /// The keys as the program names them, sorted and distinct. At least one.
    pub(crate) keys: Arc<[Key]>,
    /// The same keys with the pool's prefix, as the store knows them.
    pub(crate) store_keys: Arc<[Key]>,
    pub(crate) policy: SharedPolicy,
    /// Of the call, for its events. Empty at first, like `metrics`.
    pub(crate) span: SpanSlot,
    pub(crate) metrics: LockMetrics,
}

impl LockSpec {
    pub(crate) fn new(
        label: LockLabel,
        keys: Arc<[Key]>,
        policy: impl Into<SharedPolicy>,
        key_prefix: &str,
    ) -> Self {
        let store_keys = if key_prefix.is_empty() {
            keys.clone()
        } else {
            keys.iter().map(|key| key.prefixed(key_prefix)).collect()
        };
        let (span, metrics) = (SpanSlot::default(), LockMetrics::default());
        Self { label, keys, store_keys, policy: policy.into(), span, metrics }
    }

    /// What requests for it say about their owner.
    pub(crate) fn owner_label(&self) -> OwnerLabel {
        if !self.policy.owner_info {
            return OwnerLabel::default();
        }
        OwnerLabel::of_process(Some(CallLocation::of(&self.label)))
    }

    /// The key, if there is only one.
    pub(crate) fn single_key(&self) -> Option<&Key> {
        match &*self.store_keys {
            [key] => Some(key),
            _ => None,
        }
    }
}
