//! Fencing tokens.

use std::fmt;
use std::num::TryFromIntError;

/// A fencing token: a number that grows with every grant of a key, across restarts of the store and the process.
///
/// Send it with every write that the lock protects, and let the receiver reject a number below the highest it has
/// seen. This excludes a holder that was paused past the end of its lease and has not noticed (Kleppmann, "How to do
/// distributed locking"; Chubby's sequencer).
///
/// ```sql
/// UPDATE orders SET state = 'paid', fence = :fence WHERE id = :id AND fence <= :fence
/// ```
///
/// SQL libraries bind [`as_i64`](Self::as_i64), for a column of type `BIGINT`. With the feature `serde` it is serialized as a
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// The greatest number: that of a signed `BIGINT`.
    pub const MAX: Self = Self(i64::MAX.unsigned_abs());

    /// A fencing token from the number that a store has assigned.
    ///
    /// # Panics
    /// If the number is greater than [`MAX`](Self::MAX).
    #[must_use]
    #[track_caller]
    pub const fn new(number: u64) -> Self {
        assert!(number <= Self::MAX.0, "a fencing token is at most 2^63 - 1");
        Self(number)
    }

    /// The number, below 2^53 for Redis and memory.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number in the type that SQL uses.
    ///
    /// ```
    /// use lock_runtime::Fence;
    ///
    /// let fence = Fence::new(42);
    /// assert_eq!(fence.as_i64(), 42);
    /// assert_eq!(Fence::try_from(fence.as_i64()), Ok(fence));
    /// ```
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.0.cast_signed()
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

impl From<Fence> for i64 {
    fn from(fence: Fence) -> Self {
        fence.as_i64()
    }
}

/// Fails for a negative number.
impl TryFrom<i64> for Fence {
    type Error = TryFromIntError;

    fn try_from(number: i64) -> Result<Self, TryFromIntError> {
        u64::try_from(number).map(Self)
    }
}

/// Fails for a number greater than [`Fence::MAX`].
impl TryFrom<u64> for Fence {
    type Error = TryFromIntError;

    fn try_from(number: u64) -> Result<Self, TryFromIntError> {
        i64::try_from(number).map(|_| Self(number))
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Fence {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Fence {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = u64::deserialize(deserializer)?;
        Self::try_from(number).map_err(|_| {
            let unexpected = serde::de::Unexpected::Unsigned(number);
            serde::de::Error::invalid_value(unexpected, &"a number up to 2^63 - 1")
        })
    }
}

/// The fencing tokens that a process may assign under one grant of the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fences {
    next: Fence,
    left: u32,
    taken: u32,
}

impl Fences {
    /// `first` and the `reserved` numbers after it. `None` if no fence was requested.
    pub(crate) fn new(first: Option<Fence>, reserved: u32) -> Option<Self> {
        first.map(|next| Self { next, left: reserved.saturating_add(1), taken: 0 })
    }

    pub(crate) fn take(&mut self) -> Option<Fence> {
        self.left = self.left.checked_sub(1)?;
        self.taken += 1;
        let fence = self.next;
        self.next = Fence(fence.0 + 1);
        Some(fence)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.left == 0
    }

    /// How many holders the next grant is expected to have. It is the number for this grant, or at least twice as many if
    /// its numbers are used up.
    pub(crate) fn expected_holders(self) -> ExpectedHolders {
        if self.is_empty() {
            ExpectedHolders::AtLeast(self.taken.saturating_mul(2))
        } else {
            ExpectedHolders::Exactly(self.taken)
        }
    }
}

/// How many holders a grant is expected to have, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedHolders {
    Exactly(u32),
    AtLeast(u32),
}

impl ExpectedHolders {
    /// How many follow the first one, if `waiting` wait for the lock.
    pub(crate) fn successors(self, waiting: usize) -> usize {
        let holders = match self {
            Self::Exactly(holders) => holders as usize,
            Self::AtLeast(holders) => waiting.max(holders as usize),
        };
        holders.saturating_sub(1)
    }
}

/// Nothing is known.
impl Default for ExpectedHolders {
    fn default() -> Self {
        Self::AtLeast(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_each_other_until_the_reserved_ones_are_used_up() {
        let mut fences = Fences::new(Some(Fence::new(7)), 2).unwrap();
        let mut seen = Vec::new();
        while let Some(fence) = fences.take() {
            seen.push((fence.get(), fences.is_empty(), fences.expected_holders()));
        }
        use ExpectedHolders::{AtLeast, Exactly};
        let all = [(7, false, Exactly(1)), (8, false, Exactly(2)), (9, true, AtLeast(6))];
        assert_eq!(seen, all);
        assert!(Fences::new(None, 2).is_none());
    }

    #[test]
    fn a_fence_is_its_number_in_both_types() {
        let fence = Fence::new(42);
        assert_eq!((u64::from(fence), i64::from(fence), fence.as_i64()), (42, 42, 42));
    }
}
