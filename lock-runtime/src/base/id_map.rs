//! Maps whose keys are numbers that the pool has counted.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Values by numbers of the pool's own. No client of the program chooses them, so that a hash without a secret suffices.
pub(crate) type IdMap<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// Fibonacci hashing: neighbours are spread over all bits.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u64(&mut self, id: u64) {
        /// 2^64 divided by the golden ratio.
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        self.0 = (self.0 ^ id).wrapping_mul(FACTOR).rotate_left(32);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
