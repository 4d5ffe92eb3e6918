//! Blocks of ballot numbers, from which the fencing tokens of a quorum come.

use std::time::Duration;

use crate::backend::{BackendError, FailureKind};
use crate::base::clock;
use crate::base::fence::Fence;

/// The ballot numbers `first..=last`. A majority accepts all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FenceBlock {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// How far a ballot number may be ahead of the clock of this machine, and of the clock of a node (`ballot.lua`).
pub(crate) const MAX_AHEAD: Duration = Duration::from_secs(60);

/// Remedy for a clock difference that prevents fencing tokens.
pub(crate) const SYNCHRONISE: &str = "synchronise the clocks of the nodes and of all machines that take locks; without fences (`fencing(false)`) their difference does not matter";

/// The most numbers of a block after its first one. They are microseconds: about a millisecond of them.
const MOST_FURTHER: u32 = 1023;

impl FenceBlock {
    /// Covers a block of another process, of which the first number is known.
    ///
    /// A release of the block may count numbers of a newer owner as released. That needs a grant to the newer owner within a
    /// millisecond of the first number. A node that has lost the vote of the newer owner does not restore it then; the others
    /// do. A narrower block could leave the released owner a node at which its extension is still accepted.
    pub(crate) const fn from_another_process(first: Fence) -> Self {
        Self { first: first.get(), last: first.get() + MOST_FURTHER as u64 }
    }

    /// The next number above `promised` and `further` more, as far as a block has them. They are microseconds of this machine's
    /// clock, unless `promised` is greater. Synchronised clocks matter only for a node that has lost its data: numbers after
    /// a loss are then above those before.
    ///
    /// # Errors
    ///
    /// If the numbers would be more than [`MAX_AHEAD`] ahead of this machine's clock.
    pub(crate) fn above(promised: u64, further: u32) -> Result<Self, BackendError> {
        // Read for every proposal, so that a corrected clock takes effect.
        let now = clock::wall_micros();
        let first = now.max(promised + 1);
        let last = first + u64::from(further.min(MOST_FURTHER));
        let ahead = Duration::from_micros(last.saturating_sub(now));
        if ahead <= MAX_AHEAD {
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
    fn a_block_is_above_the_promised_number() {
        for (further, granted) in [(0, 0), (3, 3), (1_000, 1_000), (1_000_000, 1_023)] {
            let block = FenceBlock::above(0, further).unwrap();
            assert_eq!(block.last - block.first, granted);
            let whole = FenceBlock::from_another_process(Fence::new(block.first));
            assert!(whole.last >= block.last, "{whole:?} covers {block:?}");
            let next = FenceBlock::above(block.last + 500, further).unwrap();
            assert!(next.first > block.last + 500, "{next:?} after {block:?}");
        }
    }

    #[test]
    fn numbers_far_ahead_of_the_clock_are_not_proposed() {
        let error = FenceBlock::above(clock::wall_micros() + 3_600_000_000, 0).unwrap_err();
        assert!(error.message().contains("ahead of this machine's clock"), "{error}");
    }
}
