//! Bounds how often a condition is reported.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::base::clock::Instant;

/// Lets one report per second through, with the number of reports since the last one.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    /// Not reported yet.
    count: AtomicU64,
    /// From this moment on, in nanoseconds of the clock, the next report is let through.
    next: AtomicU64,
}

impl Throttle {
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Counts one at `now`. `Some` with the total number if it should be reported.
    pub(crate) fn report(&self, now: Instant) -> Option<u64> {
        self.count.fetch_add(1, Ordering::Relaxed);
        let next = self.next.load(Ordering::Relaxed);
        let later = (now + Self::INTERVAL).as_nanos();
        let is_first = now.as_nanos() >= next
            && self
                .next
                .compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        is_first.then(|| self.count.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_report_in_a_second_has_all_before_it() {
        let at = |millis: u64| Instant::from_nanos(millis * 1_000_000);
        let throttle = Throttle::default();
        assert_eq!(throttle.report(at(5_000)), Some(1));
        assert_eq!(throttle.report(at(5_001)), None);
        assert_eq!(throttle.report(at(5_999)), None);
        assert_eq!(throttle.report(at(6_000)), Some(3));
        assert_eq!(throttle.report(at(6_001)), None);
    }
}
