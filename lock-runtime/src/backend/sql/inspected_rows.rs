//! The rows of a key and its wait queue.

use crate::backend::sql::stored_info::info_of;
use crate::backend::sql::tables::duration;
use crate::backend::{Inspection, LockHolder, Owner, WaitingOwner};
use crate::base::fence::Fence;

/// What the rows of one key say.
#[derive(Default)]
pub(crate) struct InspectedRows {
    holder: Option<LockHolder>,
    waiters: Vec<WaitingOwner>,
    /// How many owners are queued, including those beyond `waiters`.
    waiting: i64,
}

impl InspectedRows {
    /// The row of a lease that ends in `expires_in` microseconds, with the value of its column `info` if it has one.
    pub(crate) fn add_holder(
        &mut self,
        owner: &[u8],
        expires_in: i64,
        fence: i64,
        info: Option<&[u8]>,
    ) {
        let owner = Owner::from_bytes(owner);
        let tag = owner.map(|owner| owner.tag());
        let info = tag.zip(info).and_then(|(tag, info)| info_of(tag, info));
        let holder = LockHolder::new(tag).with_token(owner).with_info(info);
        let holder = holder.with_expiry(Some(duration(expires_in)));
        self.holder = Some(holder.with_fence(Fence::try_from(fence).ok()));
    }

    /// A row of a queue with `waiting` rows.
    pub(crate) fn add_waiter(&mut self, owner: &[u8], waiting: i64) {
        self.waiters.push(WaitingOwner::new(Owner::from_bytes(owner).map(|owner| owner.tag())));
        self.waiting = waiting;
    }

    pub(crate) fn into_inspection(self) -> Inspection {
        let waiting = usize::try_from(self.waiting).unwrap_or_default();
        Inspection::new(self.holder).with_queue(self.waiters, waiting)
    }
}
