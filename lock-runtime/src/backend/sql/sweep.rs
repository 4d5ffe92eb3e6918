//! When rows that are no longer needed are deleted, and from which key on.

use std::time::Duration;

use crate::base::clock::Instant;
use crate::base::jitter;

/// Between two walks through the table.
const INTERVAL: Duration = Duration::from_secs(20 * 60);

/// Between two parts of one walk.
const PAUSE: Duration = Duration::from_millis(200);

/// How many rows one statement reads.
pub(crate) const SWEPT_ROWS: u16 = 500;

/// Walks through the keys in their order.
pub(crate) struct RowSweep {
    pub(crate) forget_after: Duration,
    /// The last key that was read; empty at the beginning.
    pub(crate) last: Vec<u8>,
    due: Instant,
}

impl RowSweep {
    pub(crate) fn new(forget_after: Duration, now: Instant) -> Self {
        let due = now + jitter::below(INTERVAL.min(forget_after));
        Self { forget_after, last: Vec::new(), due }
    }

    /// When the next part is due.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// Records the last key of a part; `None` at the end of the table.
    pub(crate) fn swept_to(&mut self, last: Option<Vec<u8>>, now: Instant) {
        let pause = match &last {
            Some(_) => PAUSE,
            None => jitter::below(INTERVAL.min(self.forget_after)),
        };
        self.last = last.unwrap_or_default();
        self.due = now + pause;
    }
}
