//! Latencies that are short because of a notification, measured on a busy machine.

use std::time::Duration;

/// Rounds for each required short span.
const ROUNDS_PER_SPAN: usize = 3;

/// Repeats a measurement until enough spans were short.
///
/// A client that polls at intervals of 300 ms meets a limit of 60 ms in one round of five. A client that is notified
/// meets it in most rounds, on a busy machine in fewer. A third of all rounds distinguishes the two.
#[derive(Debug)]
pub struct Latency {
    limit: Duration,
    wanted: usize,
    spans: Vec<Duration>,
}

impl Latency {
    /// Wants `wanted` spans below `limit`, in at most three times as many rounds.
    pub const fn below(limit: Duration, wanted: usize) -> Self {
        Self { limit, wanted, spans: Vec::new() }
    }

    /// Whether another round is needed.
    ///
    /// # Panics
    ///
    /// With all spans, when too few of them were short.
    #[track_caller]
    pub fn wants_more(&self) -> bool {
        let short = self.spans.iter().filter(|span| **span < self.limit).count();
        let rounds = ROUNDS_PER_SPAN * self.wanted;
        let shown = short >= self.wanted;
        assert!(shown || self.spans.len() < rounds, "{short} below {:?}: {self}", self.limit);
        !shown
    }

    /// Adds the span of a round.
    pub fn push(&mut self, span: Duration) {
        self.spans.push(span);
    }
}

impl std::fmt::Display for Latency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut spans = self.spans.clone();
        spans.sort();
        write!(f, "median {:?} of {spans:?}", spans.get(spans.len() / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(60);

    #[test]
    fn it_ends_with_enough_short_spans() {
        let mut latency = Latency::below(LIMIT, 2);
        for (span, more) in [(70, true), (10, true), (500, true), (20, false)] {
            assert!(latency.wants_more());
            latency.push(Duration::from_millis(span));
            assert_eq!(latency.wants_more(), more, "{latency}");
        }
    }

    #[test]
    #[should_panic = "1 below 60ms: median Some(70ms)"]
    fn too_few_of_them_fail() {
        let mut latency = Latency::below(LIMIT, 2);
        for span in [10, 60, 70, 80, 70, 70] {
            assert!(latency.wants_more());
            latency.push(Duration::from_millis(span));
        }
        latency.wants_more();
    }
}
