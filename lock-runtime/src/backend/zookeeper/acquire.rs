//! Acquire requests.
//!
//! ```text
//! none ── create, list ──> first: granted
//!                    └───> behind others: queued, watches its predecessor ── list ──> granted
//!                    └───> behind others, not to be queued: deleted again
//! ```
//!
//! The creation and the list travel together. A list after the creation has all nodes that come before the new one.

use std::time::Duration;

use crate::backend::zookeeper::claims::ClaimTurn;
use crate::backend::zookeeper::create::Creation;
use crate::backend::zookeeper::fence::{MOST_FURTHER, of_transaction};
use crate::backend::zookeeper::listed_nodes::ListedNodes;
use crate::backend::zookeeper::lock_node::{LockNode, Slot, Standing};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{expired, failure, malformed};
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, FailureKind, Owner, WaitMode};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::base::key::Key;

/// How many times a request looks again when it finds other nodes than the previous answer said.
const MOST_ROUNDS: usize = 20;

/// A queued owner waits this long for a notification, and up to twice as long, before it requests the key again.
const RECHECK: Duration = Duration::from_secs(5);

/// How long the node of a queued owner stays without a further request.
const QUEUED_FOR: Duration = Duration::from_secs(15);

/// What a round has found.
enum Round {
    Over(AcquireOutcome),
    /// Other nodes than expected.
    Again,
    /// These keys have no container.
    WithoutContainers(Vec<Key>),
}

impl LockNodes {
    pub(crate) async fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> Result<AcquireOutcome, BackendError> {
        let began = self.claims.now();
        let turn = self.claims.owners.begin(request.owner, request.kept_for()).await;
        let session = self.session_for(&request.owner, request.kept_for()).await?;
        let slot = |key: &Key| self.claims.slot(&request.owner, key);
        let is_answered = |key: &Key| slot(key).is_some_and(|slot| slot.is_answered());
        let answered: Vec<_> = request.keys.iter().map(is_answered).collect();
        let outcome = self.rounds(&session, &turn, request, began).await;
        outcome.map_err(|error| {
            // A node that was made meanwhile, or may have been, takes part in the queue.
            let mut keys = request.keys.iter().zip(answered);
            let is_left = keys.any(|(key, was_answered)| !was_answered && slot(key).is_some());
            if is_left { error.after_a_part() } else { error }
        })
    }

    async fn rounds(
        &self,
        session: &LiveSession,
        turn: &ClaimTurn,
        request: &AcquireRequest,
        began: Instant,
    ) -> Result<AcquireOutcome, BackendError> {
        let mut absent = Vec::new();
        for round in 0..MOST_ROUNDS {
            let is_repeated = request.attempt > 0 && round == 0;
            let round_began = self.claims.now();
            absent = match self.round(session, turn, request, is_repeated, &absent).await? {
                // Each round ends with a request that proves that the session lives.
                Round::Over(outcome) => {
                    return Ok(outcome.with_prepared_in(round_began.since(began)));
                }
                Round::Again => Vec::new(),
                Round::WithoutContainers(keys) => keys,
            };
        }
        let message = "ZooKeeper had different nodes at each look";
        Err(BackendError::new(FailureKind::NotApplied, message)
            .remedy("look for clients that delete the containers of the locks"))
    }

    async fn round(
        &self,
        session: &LiveSession,
        turn: &ClaimTurn,
        request: &AcquireRequest,
        is_repeated: bool,
        absent: &[Key],
    ) -> Result<Round, BackendError> {
        let owner = turn.owner();
        let in_doubt = self.find_known(session, owner, &request.keys, is_repeated).await?;
        let mut missing = Vec::new();
        for key in request.keys.iter() {
            match self.claims.slot(owner, key) {
                Some(Slot::Node(node)) if !node.session.is(session) => {
                    if self.move_node(session, owner, key, &node.path, node.fence).await?.is_none()
                    {
                        self.claims.remove(owner, key);
                        return Ok(Round::Again);
                    }
                }
                Some(Slot::Node(_)) => {}
                Some(Slot::Unanswered(_)) | None => missing.push(key.clone()),
            }
        }
        if let Some(outcome) = self.wait_again(session, request).await? {
            return Ok(Round::Over(outcome));
        }
        if !missing.is_empty()
            && !request.enqueue
            && self.has_others(session, owner, &missing).await?
        {
            return Ok(Round::Over(AcquireOutcome::contended(None)));
        }
        let (listings, listed) =
            match self.create_and_list(session, request, &missing, absent).await? {
                Creation::Listed { listings, listed } => (listings, listed),
                Creation::WithoutContainers(keys) => return Ok(Round::WithoutContainers(keys)),
            };
        self.claims.expect_strays(owner, &in_doubt);
        self.judge(session, request, &listings, &listed).await
    }

    /// Looks for nodes of `owner` that earlier requests have left. Returns the keys of requests with a lost answer
    /// that have left no node so far.
    async fn find_known(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
        is_repeated: bool,
    ) -> Result<Vec<Key>, BackendError> {
        let is_unknown = |key: &&Key| match self.claims.slot(owner, key) {
            Some(Slot::Node(_)) => false,
            Some(Slot::Unanswered(_)) => true,
            None => is_repeated,
        };
        let unknown: Vec<_> = keys.iter().filter(is_unknown).cloned().collect();
        if unknown.is_empty() {
            return Ok(Vec::new());
        }
        let listings = self.listings_of(session, owner, &unknown).await?;
        let mut in_doubt = Vec::new();
        for (key, listing) in unknown.iter().zip(&listings) {
            if let Some(contender) = listing.nodes.first_of(owner) {
                self.adopt(session, owner, key, contender).await?;
            } else if self.claims.slot(owner, key).is_some() {
                in_doubt.push(key.clone());
            }
        }
        Ok(in_doubt)
    }

    /// Queues again while the predecessor is still there, by a read that the server of this session answers alone. All other requests
    /// need a majority.
    async fn wait_again(
        &self,
        session: &LiveSession,
        request: &AcquireRequest,
    ) -> Result<Option<AcquireOutcome>, BackendError> {
        let AcquireRequest { owner, keys, enqueue: true, .. } = request else { return Ok(None) };
        let [key] = &**keys else { return Ok(None) };
        match self.claims.queued(owner, key) {
            Some((node, predecessor)) if node.session.is(session) => {
                self.wait_behind(session, owner, key, &node, predecessor).await
            }
            Some(_) | None => Ok(None),
        }
    }

    async fn has_others(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<bool, BackendError> {
        // A release that was answered elsewhere is seen, even if this server is behind.
        let list = |key| NodeOperation::List { path: self.container(key) };
        let operations = std::iter::once(self.sync()).chain(keys.iter().map(list)).collect();
        let answers = session.send(operations).get().await.map_err(BackendError::before_sending)?;
        let mut answers = answers.into_iter();
        answers.next().ok_or_else(malformed)?.map_err(failure)?;
        for answer in answers {
            if KeyListing::read(answer)?.nodes.has_others(owner) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Decides by the queues of all keys.
    async fn judge(
        &self,
        session: &LiveSession,
        request: &AcquireRequest,
        listings: &[KeyListing],
        listed: &ListedNodes,
    ) -> Result<Round, BackendError> {
        let owner = &request.owner;
        let (mut nodes, mut predecessor) = (Vec::new(), None);
        for (key, listing) in request.keys.iter().zip(listings) {
            let Some(Slot::Node(node)) = self.claims.slot(owner, key) else {
                return Ok(Round::Again);
            };
            let Some(contender) = listing.nodes.find(node.name()) else {
                self.claims.lose(owner, key, &node.path);
                return Ok(Round::Again);
            };
            self.delete_strays(session, owner, key, listing, node.name()).await?;
            if let Some(before) = listing.nodes.predecessor(contender, owner) {
                predecessor = Some(format!("{}/{}", self.container(key), before.name));
            }
            nodes.push(node);
        }
        let Some(predecessor) = predecessor else {
            return self.grant(session, request, listings, listed, nodes).await;
        };
        if let ([key], [node], true) = (&*request.keys, &*nodes, request.enqueue) {
            let waits = self.wait_behind(session, owner, key, node, predecessor).await?;
            return Ok(waits.map_or(Round::Again, Round::Over));
        }
        // This includes what an earlier attempt or round has created.
        let is_leaving = |key: &Key| matches!(self.claims.slot(owner, key), Some(Slot::Node(node)) if node.is_leaving());
        let is_ending = |key: &Key| {
            request.keys.len() == 1 || self.claims.is_tried(owner, key) || is_leaving(key)
        };
        let ending: Vec<_> = request.keys.iter().filter(|key| is_ending(key)).cloned().collect();
        self.delete_created(session, owner, &ending).await?;
        Ok(Round::Over(AcquireOutcome::contended(None)))
    }

    /// Watches the predecessor of a queued node. `None` if it is gone.
    pub(crate) async fn wait_behind(
        &self,
        session: &LiveSession,
        owner: &Owner,
        key: &Key,
        node: &LockNode,
        predecessor: String,
    ) -> Result<Option<AcquireOutcome>, BackendError> {
        // Before the watch is set: its notification may come right after the answer.
        let standing = Standing::Queued { predecessor: predecessor.clone() };
        let queued = LockNode { standing, ..node.clone() };
        if !self.claims.set(owner, key, Slot::Node(queued)) {
            return Err(expired());
        }
        self.claims.owners.keep_until(owner, self.claims.now() + QUEUED_FOR);
        let [answer] = session.run([NodeOperation::Watch { path: predecessor }]).await?;
        match answer {
            Ok(_) => {
                let retry_after = RECHECK + jitter::below(RECHECK);
                let wait_mode = WaitMode::Queued { retry_after };
                Ok(Some(AcquireOutcome::contended_until(None, wait_mode)))
            }
            Err(ServerCode::NO_NODE) => Ok(None),
            Err(code) => Err(failure(code)),
        }
    }

    async fn grant(
        &self,
        session: &LiveSession,
        request: &AcquireRequest,
        listings: &[KeyListing],
        listed: &ListedNodes,
        mut nodes: Vec<LockNode>,
    ) -> Result<Round, BackendError> {
        let owner = &request.owner;
        let mut fence = None;
        if request.fencing {
            let Some(number) = self.fence(session, &nodes, listings).await? else {
                return Ok(Round::Again);
            };
            nodes.iter_mut().for_each(|node| node.fence = Some(number));
            fence = of_transaction(number);
        }
        let was_queued = nodes.iter().any(|node| matches!(node.standing, Standing::Queued { .. }));
        for (key, node) in request.keys.iter().zip(&nodes) {
            if !self.claims.mark_granted(owner, key, node, listed) {
                return Err(expired());
            }
        }
        let until = self.claims.now() + request.kept_for();
        if was_queued {
            self.claims.owners.end_at(owner, until, false);
        } else {
            self.claims.owners.keep_until(owner, until);
        }
        let contended = listings.iter().any(|listing| listing.nodes.has_others(owner));
        let further = if request.fencing { request.extra_fences.min(MOST_FURTHER) } else { 0 };
        let granted = AcquireOutcome::acquired(fence).with_reserved_fences(further);
        Ok(Round::Over(granted.with_contended(contended)))
    }
}
