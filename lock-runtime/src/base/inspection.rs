//! The holder of a lock and its waiters, as a store knows them.

use std::time::Duration;

use crate::base::fence::Fence;
use crate::base::owner::Owner;
use crate::base::owner_info::OwnerInfo;
use crate::base::owner_tag::OwnerTag;

/// The state of one key in the store: its holder, and the owners in its wait queue.
///
/// It is as old as its answer: the holder may have released the lock since. With the feature `serde` it can be serialized,
/// with times in milliseconds (`expires_in_ms`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The owner that other owners have to wait for. `None` if the key is free.
    pub holder: Option<LockHolder>,
    /// The owners in the store's wait queue, in its order, at most [`MAX_WAITERS`](Self::MAX_WAITERS). Each is a process:
    /// its tasks wait behind it.
    pub waiters: Vec<WaitingOwner>,
    /// How many owners are in the store's wait queue. `None` if the store has none, or does not show it.
    pub waiting: Option<usize>,
}

/// The holder of a lock, as the store knows it.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LockHolder {
    /// The first digits of its owner token. `None` for a value of another form: a client of another library.
    pub owner: Option<OwnerTag>,
    /// When the store forgets the grant, if it is not renewed. `None` if the store does not tell, or the key has no end.
    pub expires_in: Option<Duration>,
    /// The fencing token of the grant, where the store keeps it. A task that the lock was handed off to within its process
    /// has a greater one.
    pub fence: Option<Fence>,
    /// The process that holds it, and the annotated function that it acquired the lock for. `None` where the store does not
    /// keep this, or the holder's pool does not provide it ([`PoolBuilder::owner_info`](crate::PoolBuilder::owner_info)).
    pub info: Option<OwnerInfo>,
    /// The token with which a release by force names the owner. Neither shown nor serialized.
    token: Option<Owner>,
}

/// An owner in the store's wait queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitingOwner {
    /// The first digits of its owner token. `None` for a client of another library.
    pub owner: Option<OwnerTag>,
}

impl Inspection {
    /// The maximum number of listed waiters.
    pub const MAX_WAITERS: usize = 100;

    /// A key with this holder, or a free one, in a store that shows no wait queue.
    #[must_use]
    pub const fn new(holder: Option<LockHolder>) -> Self {
        Self { holder, waiters: Vec::new(), waiting: None }
    }

    /// The same with a wait queue of `waiting` owners. `waiters` are the first of them; others beyond
    /// [`MAX_WAITERS`](Self::MAX_WAITERS) are left out.
    #[must_use]
    pub fn with_queue(
        mut self,
        waiters: impl IntoIterator<Item = WaitingOwner>,
        waiting: usize,
    ) -> Self {
        self.waiters = waiters.into_iter().take(Self::MAX_WAITERS).collect();
        self.waiting = Some(waiting.max(self.waiters.len()));
        self
    }

    /// Whether no owner holds the key.
    #[must_use]
    pub const fn is_free(&self) -> bool {
        self.holder.is_none()
    }
}

impl LockHolder {
    /// A holder with this owner token. `None` for a client of another library.
    #[must_use]
    pub const fn new(owner: Option<OwnerTag>) -> Self {
        Self { owner, expires_in: None, fence: None, info: None, token: None }
    }

    /// The same holder with its whole owner token, by which [`LockPool::force_release`](crate::LockPool::force_release) names it to
    /// the store. It is neither shown nor serialized. `None`, the default, for a holder that cannot be released by force.
    #[must_use]
    pub const fn with_token(mut self, token: Option<Owner>) -> Self {
        self.token = token;
        self
    }

    /// The whole owner token, if the store has told it.
    pub(crate) const fn token(&self) -> Option<Owner> {
        self.token
    }

    /// The same holder, with a grant that ends after this time if it is not renewed.
    #[must_use]
    pub const fn with_expiry(mut self, expires_in: Option<Duration>) -> Self {
        self.expires_in = expires_in;
        self
    }

    /// The same holder with the fencing token of its grant.
    #[must_use]
    pub const fn with_fence(mut self, fence: Option<Fence>) -> Self {
        self.fence = fence;
        self
    }

    /// The same holder with information about its process.
    #[must_use]
    pub fn with_info(mut self, info: Option<OwnerInfo>) -> Self {
        self.info = info;
        self
    }
}

/// Compares only what is shown.
impl PartialEq for LockHolder {
    fn eq(&self, other: &Self) -> bool {
        let shown = |it: &Self| (it.owner, it.expires_in, it.fence);
        shown(self) == shown(other) && self.info == other.info
    }
}

impl Eq for LockHolder {}

impl WaitingOwner {
    /// A waiter with this owner token. `None` for a client of another library.
    #[must_use]
    pub const fn new(owner: Option<OwnerTag>) -> Self {
        Self { owner }
    }
}

#[cfg(feature = "serde")]
mod serialized {
    use super::{Inspection, LockHolder, WaitingOwner};
    use crate::base::serialized_fields::serialized_fields;
    use crate::base::text::millis;

    serialized_fields!(Inspection, it => {
        holder: it.holder,
        waiters: it.waiters,
        waiting: it.waiting,
    });

    serialized_fields!(LockHolder, it => {
        owner: it.owner,
        expires_in_ms: it.expires_in.map(millis),
        fence: it.fence,
        info: it.info,
    });

    serialized_fields!(WaitingOwner, it => {
        owner: it.owner,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_queue_is_counted_and_listed_in_part() {
        let queue = (0..250).map(|_| WaitingOwner::default());
        let inspection = Inspection::new(None).with_queue(queue, 250);
        assert_eq!(inspection.waiters.len(), Inspection::MAX_WAITERS);
        assert_eq!(inspection.waiting, Some(250));
        let short = Inspection::new(None).with_queue([WaitingOwner::default()], 0);
        assert_eq!(short.waiting, Some(1), "a queue is as long as its list");
    }
}
