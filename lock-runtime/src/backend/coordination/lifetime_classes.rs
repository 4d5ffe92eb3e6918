//! Leases and sessions of few lengths, so that locks with similar ttls share one.

use std::time::Duration;

/// The first of `classes`, sorted numbers of seconds, that is at least `needed`. Beyond the last one, a power of two.
pub(crate) fn class_of(classes: &[u64], needed: Duration) -> Duration {
    let mut classes = classes.iter().map(|seconds| Duration::from_secs(*seconds));
    classes.find(|class| *class >= needed).unwrap_or_else(|| {
        let seconds = needed.as_secs().saturating_add(1).checked_next_power_of_two();
        Duration::from_secs(seconds.unwrap_or(u64::MAX))
    })
}
