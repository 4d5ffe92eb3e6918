//! The numbers that fences of a quorum come from.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::{BackendError, Failure};
use crate::clock;

/// Numbers `first..=last`, all of them accepted by a majority at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) first: u64,
    pub(super) last: u64,
}

/// Proposes numbers: microseconds of this machine's clock, and more than was ever seen. That clocks agree
/// matters only where a node has lost its data: those that come after a loss are then above those before.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    greatest_seen: AtomicU64,
}

/// How far numbers may run ahead of this machine's clock.
const AHEAD: Duration = Duration::from_secs(60);

impl Numbers {
    /// The next `count` numbers.
    pub(super) fn propose(&self, count: u32) -> Result<Block, BackendError> {
        // Read anew for every proposal.
        let now = clock::wall_micros();
        let count = u64::from(count.max(1));
        let next = |seen: u64| now.max(seen + 1) + count - 1;
        let seen = self
            .greatest_seen
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |seen| Some(next(seen)))
            .unwrap_or_default();
        let last = next(seen);
        let ahead = Duration::from_micros(last.saturating_sub(now));
        if ahead > AHEAD {
            return Err(BackendError::new(
                Failure::NotNow,
                format!("the nodes have accepted a fence that is {ahead:?} ahead of this machine's clock"),
            )
            .remedy("synchronise the clocks of all machines that take locks; without fences (`fencing(false)`) their difference does not matter"));
        }
        Ok(Block { first: last + 1 - count, last })
    }

    /// Some node has accepted `number`.
    pub(super) fn see(&self, number: u64) {
        // A double counts exactly up to here; what is above is no number of ours.
        const MOST: u64 = 1 << 53;
        if number < MOST {
            self.greatest_seen.fetch_max(number, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposals_grow_and_stay_above_what_was_seen() {
        let numbers = Numbers::default();
        let mut last = 0;
        for count in [1, 3, 1, 1000, 1] {
            let block = numbers.propose(count).unwrap();
            assert!(block.first > last, "{block:?} after {last}");
            assert_eq!(block.last - block.first + 1, u64::from(count));
            last = block.last;
        }
        numbers.see(last + 500);
        assert!(numbers.propose(1).unwrap().first > last + 500);
    }

    #[test]
    fn numbers_far_ahead_of_the_clock_are_not_proposed() {
        let numbers = Numbers::default();
        numbers.see(clock::wall_micros() + 3_600_000_000);
        let error = numbers.propose(1).unwrap_err();
        assert!(error.message().contains("ahead of this machine's clock"), "{error}");
        // No number of ours, and not to be believed.
        let numbers = Numbers::default();
        numbers.see(u64::MAX);
        numbers.propose(1).unwrap();
    }
}
