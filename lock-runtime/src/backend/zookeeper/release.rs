//! Release requests.

use std::time::Duration;

use crate::backend::zookeeper::claims::ClaimTurn;
use crate::backend::zookeeper::lock_node::{LockNode, Slot, Standing};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes};
use crate::backend::zookeeper::node_path;
use crate::backend::zookeeper::protocol::answer::OperationAnswer;
use crate::backend::zookeeper::protocol::operation::{NodeMode, NodeOperation};
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{failure, malformed};
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::{
    AcquireOutcome, BackendError, FailureKind, Owner, ReleaseOutcome, ReleaseRequest, Successor,
    WaitMode,
};
use crate::base::clock::Instant;
use crate::base::key::Key;

/// When a deletion without an answer is repeated.
pub(crate) const DELETE_AGAIN: Duration = Duration::from_secs(1);

/// A node that will be deleted.
struct EndingNode {
    key: Key,
    path: String,
    is_granted: bool,
}

/// A claim before its nodes were marked as about to be deleted.
struct FormerClaim {
    nodes: Vec<(Key, LockNode)>,
    deadline: Option<Instant>,
}

impl LockNodes {
    pub(crate) async fn release(
        &self,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome, BackendError> {
        let lease = &request.lease;
        let turn = self.claims.owners.begin(lease.owner, DELETE_AGAIN).await;
        let session = self.any_session_of(&lease.owner).await?;
        if !request.free_after.is_zero() {
            return self.keep(&session, &turn, request).await;
        }
        if let Some((node, successor)) = self.for_successor(request) {
            let passed = self.pass_on(&node, &lease.keys[0], &lease.owner, successor).await?;
            if passed != ReleaseOutcome::NotHeld {
                return Ok(passed);
            }
            // A retry over another connection may have moved the node, or the successor's was refused.
        }
        let is_held = self.free(&session, &turn, &lease.keys, false).await?;
        Ok(if is_held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
    }

    /// A session that knows what this process has sent for `owner`.
    pub(crate) async fn any_session_of(&self, owner: &Owner) -> Result<LiveSession, BackendError> {
        let slots = self.claims.slots(owner);
        let mut sessions = slots.iter().map(|(_, slot)| slot.session());
        match sessions.find(|session| session.is_current()) {
            Some(session) => Ok(session.clone()),
            None => self.classes.first().await,
        }
    }

    /// Deletes all nodes of the owner below the containers of `keys`. Returns whether it held all keys. A node that is not found
    /// is forgotten if `is_last`; before that, it may still appear.
    pub(crate) async fn free(
        &self,
        session: &LiveSession,
        turn: &ClaimTurn,
        keys: &[Key],
        is_last: bool,
    ) -> Result<bool, BackendError> {
        let owner = turn.owner();
        let ending = self.ending_nodes(session, owner, keys).await?;
        let is_granted = |key: &Key| ending.iter().any(|node| node.key == *key && node.is_granted);
        let mut is_held = keys.iter().all(is_granted);
        if is_last && !self.claims.owners.is_over(owner) {
            // A renewal has come meanwhile.
            return Ok(is_held);
        }
        let before = self.mark_leaving(owner, ending.iter().map(|node| &node.key));
        if !ending.is_empty() {
            let deleted = self.delete_ending(session, &ending).await;
            let gone = deleted.inspect_err(|error| {
                // A refused node of an overdue claim ends with its session.
                if !is_last || error.kind() != FailureKind::Rejected {
                    self.restore_unsent(owner, before, error);
                }
            })?;
            if !gone.is_empty() && is_last {
                // An overdue claim ends only what this process has made.
                is_held = false;
            } else if !gone.is_empty() {
                // A retry over another connection has a node of its own, and has deleted this one.
                let deleted = self.free_others(session, owner, &gone).await;
                is_held &= deleted.map_err(BackendError::after_a_part)?;
            }
        }
        for key in keys {
            let is_found = ending.iter().any(|node| node.key == *key);
            let is_known = matches!(self.claims.slot(owner, key), Some(Slot::Node(_)));
            if is_found || is_known || is_last {
                self.claims.remove(owner, key);
            }
        }
        Ok(is_held)
    }

    /// Deletes `ending`. Returns the granted keys without any node left.
    async fn delete_ending(
        &self,
        session: &LiveSession,
        ending: &[EndingNode],
    ) -> Result<Vec<Key>, BackendError> {
        let deletes = ending.iter().map(|node| NodeOperation::Delete { path: node.path.clone() });
        let answers = session.send(deletes.collect()).get().await?;
        let (mut gone, mut deleted, mut failed) = (Vec::new(), Vec::new(), None);
        for (node, answer) in ending.iter().zip(answers) {
            match answer {
                Ok(_) => deleted.push(&node.key),
                Err(ServerCode::NO_NODE) if node.is_granted => gone.push(node.key.clone()),
                Err(ServerCode::NO_NODE) => {}
                Err(code) => failed = failed.or(Some(failure(code))),
            }
        }
        match failed {
            Some(error) if deleted.is_empty() => return Err(error),
            Some(error) => return Err(error.after_a_part()),
            None => {}
        }
        // Of several nodes for a key, one may have ended meanwhile.
        gone.retain(|key| !deleted.contains(&key));
        Ok(gone)
    }

    /// Deletes the nodes of the owner that this process does not know. Returns whether they held all of `keys`.
    async fn free_others(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<bool, BackendError> {
        let ending = self.listed_nodes_of(session, owner, keys).await?;
        if ending.is_empty() {
            return Ok(false);
        }
        let gone = self.delete_ending(session, &ending).await?;
        let is_freed = |key: &Key| {
            !gone.contains(key) && ending.iter().any(|node| node.key == *key && node.is_granted)
        };
        Ok(keys.iter().all(is_freed))
    }

    /// Marks the nodes of these keys as about to be deleted, even if no answer comes. Returns what they were.
    fn mark_leaving<'a>(&self, owner: &Owner, keys: impl Iterator<Item = &'a Key>) -> FormerClaim {
        let deadline = self.claims.owners.deadline(owner);
        let (mut nodes, mut ends) = (Vec::new(), false);
        for key in keys {
            ends = true;
            if let Some(Slot::Node(node)) = self.claims.slot(owner, key) {
                self.claims.set(owner, key, Slot::Node(node.clone().leaving()));
                // Only once, even if an owner has several nodes for one key.
                if nodes.iter().all(|(of, _)| of != key) {
                    nodes.push((key.clone(), node));
                }
            }
        }
        if ends {
            self.claims.owners.end_at(owner, self.claims.now() + DELETE_AGAIN, false);
        }
        FormerClaim { nodes, deadline }
    }

    /// A request that was not sent has changed nothing: the release that repeats it finds the claim as it was.
    fn restore_unsent(&self, owner: &Owner, before: FormerClaim, error: &BackendError) {
        if error.kind() == FailureKind::MaybeApplied {
            return;
        }
        for (key, node) in before.nodes {
            self.claims.set(owner, &key, Slot::Node(node));
        }
        if let Some(deadline) = before.deadline {
            self.claims.owners.end_at(owner, deadline, false);
        }
    }

    async fn ending_nodes(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<Vec<EndingNode>, BackendError> {
        let (mut ending, mut unknown) = (Vec::new(), Vec::new());
        for key in keys {
            match self.claims.slot(owner, key) {
                Some(Slot::Node(node)) if !node.has_strays => {
                    let is_granted = node.was_granted();
                    ending.push(EndingNode { key: key.clone(), path: node.path, is_granted });
                }
                _ => unknown.push(key.clone()),
            }
        }
        if !unknown.is_empty() {
            ending.extend(self.listed_nodes_of(session, owner, &unknown).await?);
        }
        Ok(ending)
    }

    /// All nodes of `owner` below the containers of `keys`.
    async fn listed_nodes_of(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<Vec<EndingNode>, BackendError> {
        let listings = self.listings_of(session, owner, keys).await?;
        let mut ending = Vec::new();
        for (key, listing) in keys.iter().zip(&listings) {
            let container = self.container(key);
            let is_granted = listing.is_first(owner);
            let own =
                listing.nodes.strays(owner, "").map(|node| format!("{container}/{}", node.name));
            ending.extend(own.map(|path| EndingNode { key: key.clone(), path, is_granted }));
        }
        Ok(ending)
    }

    /// Keeps the keys locked for the time that the request says, even if the process ends.
    async fn keep(
        &self,
        session: &LiveSession,
        turn: &ClaimTurn,
        request: &ReleaseRequest,
    ) -> Result<ReleaseOutcome, BackendError> {
        let (owner, keys) = (turn.owner(), &request.lease.keys);
        let listed = self.list(keys);
        let listings = self.listings_of(session, owner, keys).await?;
        let long_enough = match self.classes.holding(request.free_after).await {
            Ok(session) => Some(session),
            // Where no session is long enough, the keys stay locked while the process lives.
            Err(error) if error.kind() == FailureKind::Rejected => None,
            Err(error) => return Err(error),
        };
        let (mut not_held, mut is_held) = (Vec::new(), true);
        for (key, listing) in keys.iter().zip(&listings) {
            let Some(contender) = listing.nodes.first_of(owner) else {
                is_held = false;
                continue;
            };
            if !listing.is_first(owner) {
                is_held = false;
                not_held.push(key.clone());
                continue;
            }
            let known = match self.claims.slot(owner, key) {
                Some(Slot::Node(node)) if node.name() == contender.name => Some(node),
                _ => self.adopt(session, owner, key, contender).await?,
            };
            let needed = self.classes.timeout_for(request.free_after);
            let kept = match (known, &long_enough) {
                (Some(node), Some(longer)) if node.session.timeout() < needed => {
                    self.move_node(longer, owner, key, &node.path, node.fence).await?
                }
                (known, _) => known,
            };
            match kept {
                Some(node) => is_held &= self.claims.mark_granted(owner, key, &node, &listed),
                None => is_held = false,
            }
        }
        if !not_held.is_empty() {
            self.free(session, turn, &not_held, false).await?;
        }
        self.claims.owners.end_at(owner, self.claims.now() + request.free_after, true);
        Ok(if is_held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld })
    }

    /// The node of the request's one key, and the successor, if the node's session is also long enough for the successor.
    fn for_successor<'a>(&self, request: &'a ReleaseRequest) -> Option<(LockNode, &'a Successor)> {
        let successor = request.successor.as_ref()?;
        let [key] = &*request.lease.keys else { return None };
        let Some(Slot::Node(node)) = self.claims.slot(&request.lease.owner, key) else {
            return None;
        };
        let serves = matches!(node.standing, Standing::Granted { .. })
            && !node.has_strays
            && node.session.is_current()
            && node.session.timeout() >= self.classes.timeout_for(successor.ttl);
        serves.then_some((node, successor))
    }

    /// Deletes the node and makes one for the successor, in one transaction.
    async fn pass_on(
        &self,
        node: &LockNode,
        key: &Key,
        owner: &Owner,
        successor: &Successor,
    ) -> Result<ReleaseOutcome, BackendError> {
        let next = self.claims.owners.begin(successor.owner, successor.ttl).await;
        let (next, session) = (next.owner(), &node.session);
        let path = node_path::new_node(&self.container(key), next);
        let label = successor.label.to_string().into_bytes();
        let transaction = NodeOperation::Transaction(vec![
            self.create_with(label, path, NodeMode::EphemeralSequential),
            NodeOperation::Delete { path: node.path.clone() },
        ]);
        let before = self.mark_leaving(owner, std::iter::once(key));
        self.claims.set(next, key, Slot::unanswered(session.clone()));
        let listed = self.list(std::slice::from_ref(key));
        let on_failure = |before, error: &BackendError| {
            if error.kind() != FailureKind::MaybeApplied {
                self.claims.remove(next, key);
            }
            self.restore_unsent(owner, before, error);
        };
        let [passed, listing] = match session.run([transaction, self.children(key)]).await {
            Ok(answers) => answers,
            Err(error) => {
                on_failure(before, &error);
                return Err(error);
            }
        };
        let created = match passed {
            Ok(OperationAnswer::Transaction(answers)) => answers.into_iter().next(),
            Ok(_) => return Err(malformed()),
            Err(ServerCode::NO_NODE) => {
                self.claims.remove(owner, key);
                self.claims.remove(next, key);
                return Ok(ReleaseOutcome::NotHeld);
            }
            Err(code) => {
                let error = failure(code);
                on_failure(before, &error);
                // Nothing of the transaction was applied. The release itself needs no new node.
                return match error.kind() {
                    FailureKind::MaybeApplied => Err(error),
                    FailureKind::NotApplied | FailureKind::Rejected => Ok(ReleaseOutcome::NotHeld),
                };
            }
        };
        let Some(OperationAnswer::Created { path, stat }) = created else {
            return Err(malformed());
        };
        self.claims.remove(owner, key);
        let queued = LockNode::new(path, session.clone(), Some(stat.created));
        if !self.claims.set(next, key, Slot::Node(queued.clone())) {
            return Ok(ReleaseOutcome::Freed);
        }
        // The successor looks on its own.
        let Ok(listing) = KeyListing::read(listing) else {
            return Ok(ReleaseOutcome::successor_queued(Duration::ZERO));
        };
        let own = listing.nodes.find(queued.name());
        let Some(before) = own.and_then(|own| listing.nodes.predecessor(own, next)) else {
            self.claims.mark_granted(next, key, &queued, &listed);
            return Ok(ReleaseOutcome::SuccessorGranted);
        };
        let predecessor = format!("{}/{}", self.container(key), before.name);
        let waiting = self.wait_behind(session, next, key, &queued, predecessor).await;
        Ok(ReleaseOutcome::successor_queued(match waiting {
            Ok(Some(AcquireOutcome::Contended {
                wait_mode: WaitMode::Queued { retry_after },
                ..
            })) => retry_after,
            // The successor looks on its own.
            Ok(_) | Err(_) => Duration::ZERO,
        }))
    }
}
