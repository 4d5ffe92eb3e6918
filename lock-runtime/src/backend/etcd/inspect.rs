//! Reads of the queue of a lock.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::etcd::fence::of_revision;
use crate::backend::etcd::grpc::CallFailure;
use crate::backend::etcd::locks::EtcdLocks;
use crate::backend::etcd::member::Member;
use crate::backend::etcd::protocol::key_value::KeyValue;
use crate::backend::etcd::protocol::lease::{self, LeaseAnswer};
use crate::backend::etcd::protocol::transaction::{KeyOperation, SearchOrder, Transaction};
use crate::backend::{BackendError, Inspection, LockHolder, Owner, OwnerInfo, WaitingOwner};
use crate::base::key::Key;

/// The holder and the waiters that are listed.
const READ: i64 = Inspection::MAX_WAITERS as i64 + 1;

impl EtcdLocks {
    /// Reads the queue of `lock`, confirmed by a majority.
    pub(crate) async fn inspect(&self, lock: &Key) -> Result<Inspection, BackendError> {
        let member = self.link.member().await?;
        let names = &self.keys.names;
        let reads = vec![
            KeyOperation::Find(names.search(lock, SearchOrder::OldestFirst, READ)),
            KeyOperation::Get { key: names.of_fence(lock) },
        ];
        let (answer, _) = self.transact(&member, &Transaction::of(reads)).await?;
        let queue = answer.step(0)?;
        let count = usize::try_from(queue.count()?).unwrap_or_default();
        let fenced = answer.found(1)?.first().map_or(0, |fence| fence.modified);
        let prefix = names.queue(lock).len();
        let token = |it: &KeyValue| it.key.get(prefix..).and_then(Owner::from_bytes);
        let tag = |it: &KeyValue| token(it).map(|owner| owner.tag());
        let Some((first, waiters)) = queue.found()?.split_first() else {
            return Ok(Inspection::new(None).with_queue([], 0));
        };
        let owner = tag(first);
        let has_fence = owner.is_some() && fenced < first.created;
        let fence = of_revision(first.created).filter(|_| has_fence);
        let expires_in = self.time_left(&member, first.lease).await?;
        let info = owner.and_then(|_| OwnerInfo::parse(&first.value));
        let holder = LockHolder::new(owner).with_token(token(first)).with_info(info);
        let holder = holder.with_expiry(expires_in).with_fence(fence);
        let waiters = waiters.iter().map(|it| WaitingOwner::new(tag(it)));
        Ok(Inspection::new(Some(holder)).with_queue(waiters, count.saturating_sub(1)))
    }

    /// How long a lease lasts without a further sign of life. `None` without a lease, and if this user may not read it.
    async fn time_left(
        &self,
        member: &Arc<Member>,
        lease: i64,
    ) -> Result<Option<Duration>, BackendError> {
        if lease == 0 {
            return Ok(None);
        }
        let asked = lease::of_lease(lease);
        match member.try_call("/etcdserverpb.Lease/LeaseTimeToLive", &asked).await {
            Ok(answer) => {
                // Less than zero for a lease that is gone by now.
                let left = u64::try_from(LeaseAnswer::read(&answer)?.seconds).unwrap_or_default();
                Ok(Some(Duration::from_secs(left)))
            }
            // The user lacks a right. Other refusals may pass.
            Err(CallFailure::Refused(status)) if status.is_denied() => Ok(None),
            Err(failure) => Err(member.failed(failure)),
        }
    }
}
