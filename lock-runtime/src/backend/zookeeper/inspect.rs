//! Reads of the queue of a key, and of all keys.

use crate::backend::zookeeper::fence::of_transaction;
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes, confirmed};
use crate::backend::zookeeper::node_path::{Contender, key_of};
use crate::backend::zookeeper::protocol::answer::OperationAnswer;
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{failure, malformed};
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::{
    BackendError, Inspection, KeyList, KeyPattern, LockHolder, Owner, OwnerInfo, OwnerTag,
    WaitingOwner,
};
use crate::base::key::Key;

impl LockNodes {
    /// Reads the queue of `key`, without a watch. Only the servers know when the session of the holder ends.
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
        let holder = self.holder(&session, key, &listing, &first).await?;
        let waiting = owners.len();
        let waiters = owners.map(|it| WaitingOwner::new(tag(&it)));
        Ok(Inspection::new(Some(holder)).with_queue(waiters, waiting))
    }

    /// The keys that match and have a queue, `limit` at most. A queue that the login may not read counts: its lock may be held.
    pub(crate) async fn list_keys(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<KeyList, BackendError> {
        /// How many queues one write reads.
        const TOGETHER: usize = 200;
        let session = self.classes.first().await?;
        let list = NodeOperation::List { path: self.root_path() };
        let [synced, listed] = session.run([self.sync(), list]).await?;
        confirmed(&synced)?;
        let names = match listed {
            Ok(OperationAnswer::Children { names, .. }) => names,
            Ok(_) => return Err(malformed()),
            Err(ServerCode::NO_NODE) => Vec::new(),
            Err(code) => return Err(failure(code)),
        };
        let keys = names.iter().filter_map(|name| key_of(name));
        let mut keys: Vec<_> = keys.filter(|key| pattern.key_of(key).is_some()).collect();
        keys.sort_unstable();
        let mut held = Vec::new();
        for keys in keys.chunks(TOGETHER) {
            let keys: Vec<_> = keys.iter().map(Key::from).collect();
            let lists = keys.iter().map(|key| NodeOperation::List { path: self.container(key) });
            let answers = session.send(lists.collect()).get().await?;
            for (key, answer) in keys.into_iter().zip(answers) {
                let is_hidden = matches!(answer, Err(ServerCode::NO_AUTH));
                if is_hidden || !KeyListing::read(answer)?.nodes.owners_in_order().is_empty() {
                    held.push(key);
                }
            }
            // One more than requested says that there are more.
            if held.len() > limit {
                break;
            }
        }
        Ok(KeyList::new(held, true, limit))
    }

    /// The owner of the first node. Its fence is the number of the node's creation, see `fence`. A node that was moved has
    /// another fence, and so has the owner of several keys after a later write to the container.
    async fn holder(
        &self,
        session: &LiveSession,
        key: &Key,
        listing: &KeyListing,
        first: &Contender,
    ) -> Result<LockHolder, BackendError> {
        let holder = LockHolder::new(tag(first)).with_token(token(first));
        if holder.owner.is_none() {
            return Ok(holder);
        }
        let path = format!("{}/{}", self.container(key), first.name);
        let exists = NodeOperation::Exists { path: path.clone() };
        let [stat, data] = session.run([exists, NodeOperation::Read { path }]).await?;
        let fence = match stat {
            Ok(OperationAnswer::Node(stat)) => {
                let is_fence = !first.is_moved() && listing.written <= stat.created;
                u64::try_from(stat.created).ok().and_then(of_transaction).filter(|_| is_fence)
            }
            // Gone by now.
            _ => None,
        };
        let info = match data {
            Ok(OperationAnswer::Data(data)) => OwnerInfo::parse(&data),
            // Gone by now, or this user may not read it.
            _ => None,
        };
        Ok(holder.with_fence(fence).with_info(info))
    }
}

fn tag(contender: &Contender) -> Option<OwnerTag> {
    token(contender).map(|owner| owner.tag())
}

/// An identifier of Curator has dashes, and names no owner token.
fn token(contender: &Contender) -> Option<Owner> {
    contender.owner().and_then(|owner| Owner::from_bytes(owner.as_bytes()))
}
