//! Fencing tokens.

use std::fmt;

/// A number that grows with every grant of a key, also across restarts of the store.
///
/// Send it along with every write that the lock protects and let the receiver refuse a number below
/// the highest it has seen: this is what keeps a holder out that was frozen past its lease and does not
/// know yet (Kleppmann, "How to do distributed locking"; Chubby's sequencer).
///
/// ```sql
/// UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence < :fence
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// A fence from the number that a store has given.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number, below 2^53 for Redis and memory.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> Self {
        fence.0
    }
}
