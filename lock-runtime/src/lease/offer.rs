//! Whether a caller has picked up its grant.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether the caller has picked up its grant. One exchange decides between the pick-up and the end of the offer.
#[derive(Debug, Default)]
pub(super) struct Offer(AtomicU8);

impl Offer {
    const OPEN: u8 = 0;
    pub(super) const PICKED_UP: u8 = 1;
    pub(super) const EXPIRED: u8 = 2;

    pub(super) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OPEN
    }

    pub(super) fn is_picked_up(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::PICKED_UP
    }

    pub(super) fn end(&self, how: u8) -> bool {
        self.0.compare_exchange(Self::OPEN, how, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
