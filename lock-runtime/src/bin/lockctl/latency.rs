//! The times of many requests.

use std::time::Duration;

use serde_json::{Value, json};

/// Middle and slow end of many times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latency {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
}

impl Latency {
    /// Zero for no times.
    pub(crate) fn of(mut spans: Vec<Duration>) -> Self {
        spans.sort_unstable();
        let at = |percent: usize| {
            let rank = (spans.len() * percent).div_ceil(100).max(1);
            spans.get(rank - 1).copied().unwrap_or_default()
        };
        Self { p50: at(50), p99: at(99) }
    }

    /// In microseconds.
    pub(crate) fn json(self) -> Value {
        let micros = |span: Duration| u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        json!({ "p50_us": micros(self.p50), "p99_us": micros(self.p99) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_occurred() {
        let millis = |count: u64| (1..=count).rev().map(Duration::from_millis).collect();
        let latency = Latency::of(millis(100));
        assert_eq!(
            (latency.p50, latency.p99),
            (Duration::from_millis(50), Duration::from_millis(99))
        );
        let one = Latency::of(millis(1));
        assert_eq!((one.p50, one.p99), (Duration::from_millis(1), Duration::from_millis(1)));
        assert_eq!(Latency::of(Vec::new()).p99, Duration::ZERO);
    }
}
