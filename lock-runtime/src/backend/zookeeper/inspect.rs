//! Reads of the queue of a key.

use crate::backend::zookeeper::fence::of_transaction;
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes, confirmed};
use crate::backend::zookeeper::node_path::Contender;
use crate::backend::zookeeper::protocol::answer::OperationAnswer;
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::{BackendError, Inspection, LockHolder, OwnerTag, WaitingOwner};
use crate::base::fence::Fence;
use crate::base::key::Key;

impl LockNodes {
    /// Reads the queue of `key`, without a watch. When the session of the holder ends is known to the servers alone.
    pub(crate) async fn inspect(&self, key: &Key) -> Result<Inspection, BackendError> {
        let session = self.classes.first().await?;
        let list = NodeOperation::List { path: self.container(key) };
        let [synced, listed] = session.run([self.sync(), list]).await?;
        confirmed(&synced)?;
        let listing = KeyListing::read(listed)?;
        let mut owners = listing.nodes.owners_in_order().into_iter();
        let Some(first) = owners.next() else {
            return Ok(Inspection::new(None).with_queue([], 0));
        };
        let fence = self.fence_of(&session, key, &listing, &first).await?;
        let holder = LockHolder::new(tag(&first)).with_fence(fence);
        let waiting = owners.len();
        let waiters = owners.map(|it| WaitingOwner::new(tag(&it)));
        Ok(Inspection::new(Some(holder)).with_queue(waiters, waiting))
    }

    /// The number of the node's creation, if that is the fence of its owner: see `fence`. A node that was moved has another
    /// one, and so has the owner of several keys behind a later write to the container.
    async fn fence_of(
        &self,
        session: &LiveSession,
        key: &Key,
        listing: &KeyListing,
        holder: &Contender,
    ) -> Result<Option<Fence>, BackendError> {
        if holder.owner().is_none() || holder.is_moved() {
            return Ok(None);
        }
        let path = format!("{}/{}", self.container(key), holder.name);
        let created = match session.run([NodeOperation::Exists { path }]).await? {
            [Ok(OperationAnswer::Node(stat))] => stat.created,
            // Gone by now.
            [_] => return Ok(None),
        };
        let is_fence = listing.written <= created;
        Ok(u64::try_from(created).ok().and_then(of_transaction).filter(|_| is_fence))
    }
}

fn tag(contender: &Contender) -> Option<OwnerTag> {
    contender.owner().and_then(|owner| OwnerTag::parse(owner.as_bytes()))
}
