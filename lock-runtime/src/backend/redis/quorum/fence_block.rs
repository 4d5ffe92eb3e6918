//! The numbers that fences of a quorum come from.

use std::time::Duration;

use crate::backend::redis::quorum::message::SYNCHRONISE;
use crate::backend::{BackendError, FailureKind};
use crate::base::clock;

/// Numbers `first..=last`, all of them accepted by a majority at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// How far numbers may run ahead of this machine's clock, and of a node's (`ballot.lua`).
pub(crate) const AHEAD: Duration = Duration::from_secs(60);

impl Block {
    /// The next `count` numbers above `promised`: microseconds of this machine's clock, if they are. That clocks
    /// agree matters only where a node has lost its data: the numbers after a loss are then above those before.
    pub(crate) fn above(promised: u64, count: u32) -> Result<Self, BackendError> {
        // Read anew for every proposal.
        let now = clock::wall_micros();
        let first = now.max(promised + 1);
        let last = first + u64::from(count.max(1)) - 1;
        let ahead = Duration::from_micros(last.saturating_sub(now));
        if ahead <= AHEAD {
            return Ok(Self { first, last });
        }
        let text =
            format!("a node has seen a fence that is {ahead:?} ahead of this machine's clock");
        Err(BackendError::new(FailureKind::NotApplied, text).remedy(SYNCHRONISE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_above_what_was_promised() {
        for count in [1, 3, 1000] {
            let block = Block::above(0, count).unwrap();
            assert_eq!(block.last - block.first + 1, u64::from(count));
            let next = Block::above(block.last + 500, count).unwrap();
            assert!(next.first > block.last + 500, "{next:?} after {block:?}");
        }
    }

    #[test]
    fn numbers_far_ahead_of_the_clock_are_not_proposed() {
        let error = Block::above(clock::wall_micros() + 3_600_000_000, 1).unwrap_err();
        assert!(error.message().contains("ahead of this machine's clock"), "{error}");
    }
}
