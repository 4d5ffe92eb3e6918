//! Whether a task has a lease.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether a task has the lease. One exchange decides between the pick-up and the end of the offer.
#[derive(Debug)]
pub(super) struct Offer(AtomicU8);

#[derive(Clone, Copy)]
#[repr(u8)]
enum OfferState {
    /// A task will get it.
    Open,
    PickedUp,
    /// No task will get it any more.
    Withdrawn,
    /// The lease is for no task: the lock lingers.
    ToNoTask,
}

impl Offer {
    /// To the task that has requested the lock.
    pub(super) const fn to_task() -> Self {
        Self(AtomicU8::new(OfferState::Open as u8))
    }

    pub(super) const fn to_no_task() -> Self {
        Self(AtomicU8::new(OfferState::ToNoTask as u8))
    }

    fn is(&self, state: OfferState) -> bool {
        self.0.load(Ordering::Acquire) == state as u8
    }

    pub(super) fn is_open(&self) -> bool {
        self.is(OfferState::Open)
    }

    pub(super) fn is_picked_up(&self) -> bool {
        self.is(OfferState::PickedUp)
    }

    pub(super) fn is_to_no_task(&self) -> bool {
        self.is(OfferState::ToNoTask)
    }

    /// The caller takes the grant. `false` if the offer is not open.
    pub(super) fn pick_up(&self) -> bool {
        self.end(OfferState::PickedUp)
    }

    /// Withdraws the grant. `false` if the offer is not open.
    pub(super) fn withdraw(&self) -> bool {
        self.end(OfferState::Withdrawn)
    }

    fn end(&self, how: OfferState) -> bool {
        let (open, ended) = (OfferState::Open as u8, how as u8);
        self.0.compare_exchange(open, ended, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
