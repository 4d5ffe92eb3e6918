//! Whether a caller has picked up its grant.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether the caller has picked up its grant. One exchange decides between the pick-up and the end of the offer.
#[derive(Debug, Default)]
pub(super) struct Offer(AtomicU8);

/// How an offer ended.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum OfferEnd {
    PickedUp = 1,
    Withdrawn = 2,
}

impl Offer {
    const OPEN: u8 = 0;

    pub(super) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OPEN
    }

    pub(super) fn is_picked_up(&self) -> bool {
        self.0.load(Ordering::Acquire) == OfferEnd::PickedUp as u8
    }

    /// The caller takes the grant. `false` if the offer had ended.
    pub(super) fn pick_up(&self) -> bool {
        self.end(OfferEnd::PickedUp)
    }

    /// Withdraws the grant. `false` if the offer had ended.
    pub(super) fn withdraw(&self) -> bool {
        self.end(OfferEnd::Withdrawn)
    }

    fn end(&self, how: OfferEnd) -> bool {
        let exchange =
            self.0.compare_exchange(Self::OPEN, how as u8, Ordering::AcqRel, Ordering::Acquire);
        exchange.is_ok()
    }
}
