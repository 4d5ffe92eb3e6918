//! Fencing tokens.

use std::fmt;

/// A fencing token: a number that grows with every grant of a key, across restarts of the store.
///
/// Send it with every write that the lock protects, and let the receiver reject a number below the highest it has
/// seen. This excludes a holder that was paused past the end of its lease and has not noticed (Kleppmann, "How to do
/// distributed locking"; Chubby's sequencer).
///
/// ```sql
/// UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence < :fence
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// A fencing token from the number that a store has assigned.
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

/// The fencing tokens that a process may assign under one grant of the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fences {
    next: Fence,
    left: u32,
}

impl Fences {
    /// `first` and the `reserved` numbers after it. `None` if no fence was requested.
    pub(crate) fn new(first: Option<Fence>, reserved: u32) -> Option<Self> {
        first.map(|next| Self { next, left: reserved.saturating_add(1) })
    }

    pub(crate) fn take(&mut self) -> Option<Fence> {
        self.left = self.left.checked_sub(1)?;
        let fence = self.next;
        self.next = Fence(fence.0 + 1);
        Some(fence)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.left == 0
    }
}
