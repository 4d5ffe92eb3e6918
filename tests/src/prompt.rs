//! Spans that are short because an effect is notified, measured on a machine with other work.

use std::time::Duration;

/// Rounds for each short span that is wanted.
const PATIENCE: usize = 3;

/// Repeats a measurement until it was short often enough.
///
/// A client that asks at intervals of 300 ms meets a limit of 60 ms in one round of five. A client that is notified
/// meets it in most rounds, on a busy machine in fewer. A third of all rounds tells the two apart.
#[derive(Debug)]
pub struct Prompt {
    limit: Duration,
    wanted: usize,
    spans: Vec<Duration>,
}

impl Prompt {
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
        let rounds = PATIENCE * self.wanted;
        let shown = short >= self.wanted;
        assert!(shown || self.spans.len() < rounds, "{short} below {:?}: {self}", self.limit);
        !shown
    }

    /// Adds the span of a round.
    pub fn push(&mut self, span: Duration) {
        self.spans.push(span);
    }
}

impl std::fmt::Display for Prompt {
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
        let mut prompt = Prompt::below(LIMIT, 2);
        for (span, more) in [(70, true), (10, true), (500, true), (20, false)] {
            assert!(prompt.wants_more());
            prompt.push(Duration::from_millis(span));
            assert_eq!(prompt.wants_more(), more, "{prompt}");
        }
    }

    #[test]
    #[should_panic = "1 below 60ms: median Some(70ms)"]
    fn too_few_of_them_fail() {
        let mut prompt = Prompt::below(LIMIT, 2);
        for span in [10, 60, 70, 80, 70, 70] {
            assert!(prompt.wants_more());
            prompt.push(Duration::from_millis(span));
        }
        prompt.wants_more();
    }
}
