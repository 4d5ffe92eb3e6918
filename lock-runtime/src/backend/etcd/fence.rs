//! Fences of grants: revisions of the cluster.
//!
//! A fence is the revision that has made the holder's key: keys of later holders are made later. An owner of several keys that
//! has waited for each in its own queue has no such revision. It writes to a key beside each queue, and the revision of this
//! write is its fence. Owners that had queued before see that, and write there too.

use crate::backend::BackendError;
use crate::backend::etcd::acquiring::Acquiring;
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::owned_key::OwnerKey;
use crate::backend::etcd::protocol::transaction::{KeyCondition, KeyOperation, Transaction};
use crate::base::fence::Fence;
use crate::base::key::Key;

/// How many fences there are between two revisions.
const FENCES: u64 = 1 << 10;

/// The greatest number of fences after the first one of a revision.
pub(crate) const MOST_FURTHER: u32 = FENCES as u32 - 1;

/// The first fence of a revision.
pub(crate) fn of_revision(revision: i64) -> Option<Fence> {
    let revision = u64::try_from(revision).ok()?;
    Fence::try_from(revision.saturating_mul(FENCES)).ok()
}

impl EtcdLocks {
    /// A revision after all fences that were given out for the keys, and before all later ones. `None` if a key is gone. `fenced`
    /// is the last write beside the queues.
    pub(crate) async fn fence(
        &self,
        it: &Acquiring<'_>,
        keys: &[(Key, OwnerKey)],
        fenced: i64,
    ) -> Result<Option<i64>, BackendError> {
        let Some((_, first)) = keys.first() else { return Ok(None) };
        if first.fence.is_some() && keys.iter().all(|(_, own)| own.fence == first.fence) {
            return Ok(first.fence);
        }
        if fenced < first.created && keys.iter().all(|(_, own)| own.created == first.created) {
            return Ok(Some(first.created));
        }
        let names = &self.keys.names;
        let created = |(key, own): &(Key, OwnerKey)| KeyCondition::Created {
            key: names.of_owner(key, it.owner()),
            revision: own.created,
        };
        let write = |(key, _): &(Key, OwnerKey)| KeyOperation::Put {
            key: names.of_fence(key),
            value: Vec::new(),
            lease: 0,
        };
        let writing = Transaction {
            // A late write of a former connection could only make the fences of later owners greater than necessary.
            conditions: keys.iter().map(created).collect(),
            success: keys.iter().map(write).collect(),
            failure: Vec::new(),
        };
        let (answer, _) = self.transact(&it.member, &writing).await?;
        Ok(answer.is_met.then_some(answer.origin.revision))
    }
}
