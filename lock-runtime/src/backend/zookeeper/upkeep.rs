//! What happens without a request: claims that are over are deleted, and changes around held keys are read.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::backend::zookeeper::claims::ChangedHold;
use crate::backend::zookeeper::listed_nodes::ListedNodes;
use crate::backend::zookeeper::lock_node::{LockNode, Slot, Standing, WatchScope};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::release::DELETE_AGAIN;
use crate::backend::zookeeper::server_error::failure;
use crate::backend::zookeeper::session::SessionSink;
use crate::backend::{BackendError, FailureKind, Owner};

/// Runs until the pool is dropped. Dropping the future ends what it has started.
pub(crate) async fn run(nodes: Arc<LockNodes>, mut changes: mpsc::UnboundedReceiver<ChangedHold>) {
    let (claims, mut work) = (nodes.claims.clone(), JoinSet::new());
    loop {
        let first = claims.owners.first_deadline();
        tokio::select! {
            () = claims.owners.clock.sleep_until_due(first) => {
                for owner in claims.owners.take_due(claims.now()) {
                    let nodes = nodes.clone();
                    work.spawn(async move { nodes.end(owner).await });
                }
            }
            changed = changes.recv() => match changed {
                Some(changed) => {
                    let nodes = nodes.clone();
                    // A failure is that of the connection: the next renewal reads again.
                    work.spawn(async move { drop(nodes.look_around(&changed).await) });
                }
                None => return,
            },
            () = claims.owners.earlier.notified() => {}
            _ = work.join_next(), if !work.is_empty() => {}
        }
    }
}

impl LockNodes {
    /// Deletes what a claim that is over has left.
    async fn end(&self, owner: Owner) {
        let turn = self.claims.owners.turn(owner, DELETE_AGAIN).await;
        if !self.claims.owners.is_over(&owner) {
            return;
        }
        let keys: Vec<_> = self.claims.slots(&owner).into_iter().map(|(key, _)| key).collect();
        let ended = match self.any_session_of(&owner).await {
            Ok(session) => self.free(&session, &turn, &keys, true).await,
            Err(error) => Err(error),
        };
        let Err(error) = ended else { return };
        if error.kind() == FailureKind::Rejected {
            self.end_with_sessions(&owner);
        }
        self.claims.owners.end_at(&owner, self.claims.now() + DELETE_AGAIN, false);
    }

    /// Nodes of `owner` may not be deleted. The server deletes them with their sessions, without a check of rights: these get no
    /// further locks, and each ends once only such nodes are left in it.
    fn end_with_sessions(&self, owner: &Owner) {
        for (_, slot) in self.claims.slots(owner) {
            let session = slot.session();
            self.classes.retire(session);
            if self.claims.end_if_unused(session) {
                self.claims.expired(session.number(), session.incarnation());
            }
        }
    }

    /// Reads whether a held key is still held, and whether other owners wait.
    async fn look_around(&self, changed: &ChangedHold) -> Result<(), BackendError> {
        let ChangedHold { owner, key } = changed;
        let Some(Slot::Node(node)) = self.claims.slot(owner, key) else { return Ok(()) };
        if !matches!(node.standing, Standing::Granted { .. }) {
            return Ok(());
        }
        let listed = self.list(std::slice::from_ref(key));
        let [synced, listing] = node.session.run([self.sync(), self.children(key)]).await?;
        synced.map_err(failure)?;
        let listing = KeyListing::read(listing)?;
        if listing.nodes.find(node.name()).is_none() {
            // Released meanwhile, or deleted by another client.
            self.claims.lose(owner, key, &node.path);
            return Ok(());
        }
        if !listing.nodes.has_others(owner) {
            self.record_watch(changed, &node, WatchScope::Container, &listed);
            return Ok(());
        }
        self.claims.events.contended(key.as_str());
        // From here on only the holder's own node matters, and no owner that queues.
        let listed = self.claims.list([node.path.clone()]);
        let [watch] = node.session.run([NodeOperation::Watch { path: node.path.clone() }]).await?;
        match watch {
            Ok(_) => self.record_watch(changed, &node, WatchScope::Node, &listed),
            Err(ServerCode::NO_NODE) => self.claims.lose(owner, key, &node.path),
            Err(code) => return Err(failure(code)),
        }
        Ok(())
    }

    fn record_watch(
        &self,
        changed: &ChangedHold,
        node: &LockNode,
        scope: WatchScope,
        listed: &ListedNodes,
    ) {
        let ChangedHold { owner, key } = changed;
        if !self.claims.set_watched(owner, key, &node.path, scope, listed) {
            self.claims.look_again(ChangedHold { owner: *owner, key: key.clone() });
        }
    }
}
