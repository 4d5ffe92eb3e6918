//! Grants: the lease of each key lasts long enough, and its owner has a fence.

use crate::backend::etcd::acquiring::{Acquiring, FreeKeys, RoundEnd};
use crate::backend::etcd::fence::{MOST_FURTHER, of_revision};
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::owned_key::{KeyPlace, OwnerKey, leases_of};
use crate::backend::{AcquireOutcome, BackendError};
use crate::base::key::Key;

impl EtcdLocks {
    /// Grants the keys, unless they vanish meanwhile.
    pub(crate) async fn grant(
        &self,
        it: &Acquiring<'_>,
        free: FreeKeys,
    ) -> Result<RoundEnd, BackendError> {
        let FreeKeys { mut keys, is_contended, fenced, answer, mut sign } = free;
        let owner = it.owner();
        if !self.lengthen(it, &mut keys).await? {
            return Ok(RoundEnd::Again);
        }
        for lease in leases_of(keys.iter().map(|(_, own)| own)) {
            let sign = if lease.id == it.lease.id { sign.take() } else { None };
            let known = self.outlasts(&lease, it.until, answer, sign).await;
            if !lease.takes_signs() {
                return Ok(RoundEnd::Again);
            }
            known?;
        }
        let mut fence = None;
        if it.request.fencing {
            fence = self.fence(it, &keys, fenced).await?;
            if fence.is_none() {
                return Ok(RoundEnd::Again);
            }
        }
        let was_granted = keys.iter().any(|(_, own)| own.is_granted());
        for (key, own) in keys {
            // A watch of the predecessor is no longer needed; a watch of the queue continues.
            let watch = own.watch.filter(|_| own.is_granted());
            let fence = fence.or(own.fence);
            let is_written = fence.is_some_and(|fence| fence != own.created);
            let has_fence_key = own.has_fence_key || is_written;
            let place = KeyPlace::Granted;
            let own = OwnerKey { place, fence, has_fence_key, watch, ..own };
            if !self.keys.set(owner, &key, own) {
                return Ok(RoundEnd::Again);
            }
        }
        let until = self.now() + it.request.kept_for();
        // The deadline of a waiter is later.
        if was_granted {
            self.keys.owners.keep_until(owner, until);
        } else {
            self.keys.owners.end_at(owner, until, false);
        }
        let further = it.request.extra_fences.min(MOST_FURTHER);
        let fence = fence.and_then(of_revision);
        let granted = AcquireOutcome::acquired(fence)
            .with_reserved_fences(if fence.is_some() { further } else { 0 })
            .with_contended(is_contended);
        Ok(RoundEnd::Over(granted))
    }

    /// Puts keys of shorter or denied leases under the lease of the request. `false` if a key is gone.
    async fn lengthen(
        &self,
        it: &Acquiring<'_>,
        keys: &mut [(Key, OwnerKey)],
    ) -> Result<bool, BackendError> {
        let is_short = |own: &OwnerKey| !own.lease.lasts_like(&it.lease);
        let short = keys.iter().filter(|(_, own)| is_short(own));
        let short: Vec<_> = short.map(|(key, own)| (key.clone(), own.created)).collect();
        if short.is_empty() {
            return Ok(true);
        }
        if !self.move_keys(&it.member, it.owner(), &short, &it.lease).await? {
            return Ok(false);
        }
        for (_, own) in keys.iter_mut().filter(|(_, own)| is_short(own)) {
            own.lease = it.lease.clone();
        }
        Ok(true)
    }
}
