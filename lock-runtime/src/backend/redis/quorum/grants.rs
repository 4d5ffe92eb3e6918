//! The grants that this pool has received from majorities.

use std::time::Duration;

use foldhash::HashMap;

use crate::backend::redis::quorum::fence_block::FenceBlock;
use crate::backend::redis::quorum::message::VoteToken;
use crate::backend::{AcquireOutcome, LeaseRef, Owner};
use crate::base::clock::Instant;
use crate::base::fence::Fence;
use crate::base::mutex::{Mutex, MutexGuard};

/// Grants by owner. An entry lives from the grant until its release is answered.
#[derive(Debug, Default)]
pub(crate) struct Grants(Mutex<GrantTable>);

#[derive(Debug, Default)]
struct GrantTable {
    by_owner: HashMap<Owner, MajorityGrant>,
    /// At this size, entries are removed if their release was sent and their lease has expired.
    sweep_at: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct MajorityGrant {
    pub(crate) token: VoteToken,
    pub(crate) ttl: Duration,
    pub(crate) block: Option<FenceBlock>,
    /// `Some` once a release was sent: when the lease expires on the nodes without an answer.
    pub(crate) releasing_until: Option<Instant>,
}

impl Grants {
    pub(crate) fn get(&self, owner: &Owner) -> Option<MajorityGrant> {
        self.table().by_owner.get(owner).copied()
    }

    /// The grant of `lease`. Without an entry, it matches any attempt of the owner.
    pub(crate) fn of(&self, lease: &LeaseRef) -> MajorityGrant {
        let (token, ttl) = (VoteToken::of_any_attempt(lease.owner), lease.ttl);
        let unknown = MajorityGrant { token, ttl, block: None, releasing_until: None };
        self.get(&lease.owner).unwrap_or(unknown)
    }

    pub(crate) fn insert(&self, owner: Owner, grant: MajorityGrant, now: Instant) {
        let mut table = self.table();
        if table.by_owner.len() >= table.sweep_at {
            table.by_owner.retain(|_, known| known.releasing_until.is_none_or(|until| until > now));
            table.sweep_at = (2 * table.by_owner.len()).max(1024);
        }
        table.by_owner.insert(owner, grant);
    }

    pub(crate) fn remove(&self, owner: &Owner) {
        self.table().by_owner.remove(owner);
    }

    fn table(&self) -> MutexGuard<'_, GrantTable> {
        self.0.lock()
    }
}

/// The outcome of a grant: the first number of `block` is its fencing token, the others are reserved.
pub(crate) fn acquired(block: Option<FenceBlock>) -> AcquireOutcome {
    let reserved = block.map_or(0, |block| block.last - block.first);
    AcquireOutcome::acquired(block.and_then(|block| Fence::try_from(block.first).ok()))
        .with_reserved_fences(u32::try_from(reserved).unwrap_or_default())
}
