//! Acquire requests.
//!
//! ```text
//! none ── create, list ──> first: granted
//!                    └───> behind others: queued, watches its predecessor ── list ──> granted
//!                    └───> behind others, not to be queued: deleted again
//! ```
//!
//! The creation and the list travel together. A list behind the own creation has all nodes that come before it.

use std::time::Duration;

use crate::backend::zookeeper::claims::{ClaimTurn, LockNode, Slot, Standing};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes};
use crate::backend::zookeeper::node_path;
use crate::backend::zookeeper::protocol::answer::{Answered, OperationAnswer};
use crate::backend::zookeeper::protocol::operation::{NodeMode, NodeOperation};
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{expired, failure, malformed};
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, FailureKind, Owner, WaitMode};
use crate::base::fence::Fence;
use crate::base::jitter;
use crate::base::key::Key;

/// How often a request looks again that finds other nodes than the answer before said.
const MOST_ROUNDS: usize = 20;

/// How long a queued owner waits for a notification before it requests the key again.
const RECHECK: Duration = Duration::from_secs(5);

/// How long the node of a queued owner stays without a further request.
const QUEUED_FOR: Duration = Duration::from_secs(15);

/// How many fences there are between two transactions.
const FENCES: u64 = 256;

/// What a round has found.
enum Round {
    Over(AcquireOutcome),
    /// Other nodes than expected: a container was missing, or a node is gone.
    Again,
}

impl LockNodes {
    pub(crate) async fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> Result<AcquireOutcome, BackendError> {
        let turn = self.claims.begin(request.owner, request.kept_for()).await;
        let session = self.session_for(&request.owner, request.kept_for()).await?;
        for round in 0..MOST_ROUNDS {
            if let Round::Over(outcome) = self.round(&session, &turn, request, round).await? {
                return Ok(outcome);
            }
        }
        let message = "ZooKeeper has had other nodes at each look";
        Err(BackendError::new(FailureKind::NotApplied, message)
            .remedy("look for clients that delete the containers of the locks"))
    }

    async fn round(
        &self,
        session: &LiveSession,
        turn: &ClaimTurn,
        request: &AcquireRequest,
        round: usize,
    ) -> Result<Round, BackendError> {
        let owner = turn.owner();
        let is_repeated = request.attempt > 0 && round == 0;
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
        if !missing.is_empty()
            && !request.enqueue
            && self.has_others(session, owner, &missing).await?
        {
            return Ok(Round::Over(AcquireOutcome::contended(None)));
        }
        let Some(listings) = self.create_and_list(session, owner, &request.keys, &missing).await?
        else {
            self.make_containers(session, &missing).await?;
            return Ok(Round::Again);
        };
        self.claims.expect_strays(owner, &in_doubt);
        self.judge(session, request, &listings, &missing).await
    }

    /// Looks for nodes of `owner` that earlier requests have left. Returns the keys of those whose answer was lost and that have
    /// left none so far.
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

    async fn has_others(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<bool, BackendError> {
        let operations = keys.iter().map(|key| self.children(key)).collect();
        let answers = session.send(operations).get().await.map_err(BackendError::before_sending)?;
        for answer in answers {
            if KeyListing::read(answer)?.nodes.has_others(owner) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Creates nodes in `missing`, and lists all `keys`. `None` if a container is missing.
    async fn create_and_list(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
        missing: &[Key],
    ) -> Result<Option<Vec<KeyListing>>, BackendError> {
        let create = |key: &Key| {
            let path = node_path::new_node(&self.container(key), owner);
            self.create(path, NodeMode::EphemeralSequential)
        };
        let mut operations = vec![match missing {
            [] => self.sync(),
            [key] => create(key),
            keys => NodeOperation::Transaction(keys.iter().map(create).collect()),
        }];
        operations.extend(keys.iter().map(|key| self.children(key)));
        for key in missing {
            if !self.claims.set(owner, key, Slot::Unanswered(session.clone())) {
                return Err(expired());
            }
        }
        let sent = session.send(operations).get().await;
        let mut answers =
            sent.inspect_err(|error| self.forget_unsent(owner, missing, error))?.into_iter();
        let created = match answers.next().ok_or_else(malformed)? {
            Ok(created) => created,
            Err(code) => {
                let error = failure(code);
                if code == ServerCode::NO_NODE {
                    self.forget(owner, missing);
                    return Ok(None);
                }
                self.forget_unsent(owner, missing, &error);
                return Err(error);
            }
        };
        self.record_created(session, owner, missing, created)?;
        answers.map(KeyListing::read).collect::<Result<_, _>>().map(Some)
    }

    fn record_created(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
        created: OperationAnswer,
    ) -> Result<(), BackendError> {
        let answers = match (keys, created) {
            ([], _) => return Ok(()),
            ([_], created) => vec![created],
            (_, OperationAnswer::Transaction(answers)) => answers,
            _ => return Err(malformed()),
        };
        if answers.len() != keys.len() {
            return Err(malformed());
        }
        for (key, answer) in keys.iter().zip(answers) {
            let OperationAnswer::Created { path, stat } = answer else { return Err(malformed()) };
            let node = LockNode {
                path,
                session: session.clone(),
                created: Some(stat.created),
                standing: Standing::New,
                fence: None,
                has_strays: false,
            };
            if !self.claims.set(owner, key, Slot::Node(node)) {
                return Err(expired());
            }
        }
        Ok(())
    }

    /// The request that makes nodes had no effect, so nothing has to be looked for.
    fn forget_unsent(&self, owner: &Owner, keys: &[Key], error: &BackendError) {
        if error.kind() != FailureKind::MaybeApplied {
            self.forget(owner, keys);
        }
    }

    fn forget(&self, owner: &Owner, keys: &[Key]) {
        for key in keys {
            self.claims.remove(owner, key);
        }
    }

    /// Decides by the queues of all keys.
    async fn judge(
        &self,
        session: &LiveSession,
        request: &AcquireRequest,
        listings: &[KeyListing],
        created: &[Key],
    ) -> Result<Round, BackendError> {
        let owner = &request.owner;
        let (mut nodes, mut predecessor) = (Vec::new(), None);
        for (key, listing) in request.keys.iter().zip(listings) {
            let Some(Slot::Node(node)) = self.claims.slot(owner, key) else {
                return Ok(Round::Again);
            };
            let Some(contender) = listing.nodes.find(node.name()) else {
                self.claims.lose(owner, key);
                return Ok(Round::Again);
            };
            self.delete_strays(session, owner, key, listing, node.name()).await?;
            if let Some(before) = listing.nodes.predecessor(contender, owner) {
                predecessor = Some(format!("{}/{}", self.container(key), before.name));
            }
            nodes.push(node);
        }
        let Some(predecessor) = predecessor else {
            return self.grant(session, request, listings, nodes).await;
        };
        if let ([key], [node], true) = (&*request.keys, &*nodes, request.enqueue) {
            let waits = self.wait_behind(session, owner, key, node, predecessor).await?;
            return Ok(waits.map_or(Round::Again, Round::Over));
        }
        // Also what an earlier attempt has created and could not delete.
        let is_leaving = |key: &Key| matches!(self.claims.slot(owner, key), Some(Slot::Node(node)) if node.is_leaving());
        let ending: Vec<_> = request
            .keys
            .iter()
            .filter(|key| created.contains(key) || is_leaving(key))
            .cloned()
            .collect();
        self.delete_created(session, owner, &ending).await?;
        Ok(Round::Over(AcquireOutcome::contended(None)))
    }

    /// Deletes what a lost connection has created late.
    async fn delete_strays(
        &self,
        session: &LiveSession,
        owner: &Owner,
        key: &Key,
        listing: &KeyListing,
        own: &str,
    ) -> Result<(), BackendError> {
        let strays: Vec<_> = listing
            .nodes
            .strays(owner, own)
            .map(|stray| format!("{}/{}", self.container(key), stray.name))
            .map(|path| NodeOperation::Delete { path })
            .collect();
        if strays.is_empty() {
            return Ok(());
        }
        session.send(strays).get().await.map(drop)
    }

    async fn delete_created(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<(), BackendError> {
        let mut deletes = Vec::new();
        for key in keys {
            if let Some(Slot::Node(node)) = self.claims.slot(owner, key) {
                deletes.push(NodeOperation::Delete { path: node.path.clone() });
                self.claims.set(owner, key, Slot::Node(node.leaving()));
            }
        }
        for answer in session.send(deletes).get().await? {
            match answer {
                Ok(_) | Err(ServerCode::NO_NODE) => {}
                Err(code) => return Err(failure(code)),
            }
        }
        self.forget(owner, keys);
        Ok(())
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
        // Before the watch is set: its notification may come right behind the answer.
        let standing = Standing::Queued { predecessor: predecessor.clone() };
        let queued = LockNode { standing, ..node.clone() };
        if !self.claims.set(owner, key, Slot::Node(queued)) {
            return Err(expired());
        }
        self.claims.keep_until(owner, self.claims.clock.now() + QUEUED_FOR);
        let [answer] = session.run([NodeOperation::Watch { path: predecessor }]).await?;
        match answer {
            Ok(_) => {
                let retry_after = jitter::below(RECHECK);
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
        mut nodes: Vec<LockNode>,
    ) -> Result<Round, BackendError> {
        let owner = &request.owner;
        let mut fence = None;
        if request.fencing {
            let Some(number) = self.fence(session, &nodes, listings).await? else {
                return Ok(Round::Again);
            };
            nodes.iter_mut().for_each(|node| node.fence = Some(number));
            fence = Fence::try_from(number.saturating_mul(FENCES)).ok();
        }
        let was_queued = nodes.iter().any(|node| matches!(node.standing, Standing::Queued { .. }));
        for (key, node) in request.keys.iter().zip(&nodes) {
            if !self.mark_granted(owner, key, node) {
                return Err(expired());
            }
        }
        let until = self.claims.clock.now() + request.kept_for();
        if was_queued {
            self.claims.end_at(owner, until, false);
        } else {
            self.claims.keep_until(owner, until);
        }
        let contended = listings.iter().any(|listing| listing.nodes.has_others(owner));
        let further = if request.fencing { request.extra_fences.min(FENCES as u32 - 1) } else { 0 };
        let granted = AcquireOutcome::acquired(fence).with_reserved_fences(further);
        Ok(Round::Over(granted.with_contended(contended)))
    }

    /// The number of a transaction behind those of all former grants of the keys, and before those of all later ones. `None` if a
    /// node is gone.
    ///
    /// It is that of the node's creation, which later owners' creations exceed. Several keys that were taken one by one
    /// have no such number. Then one is written to the containers, under the condition that the nodes are there; later owners see it and
    /// write a greater one if their own creation was before.
    async fn fence(
        &self,
        session: &LiveSession,
        nodes: &[LockNode],
        listings: &[KeyListing],
    ) -> Result<Option<u64>, BackendError> {
        let first = nodes.first().ok_or_else(malformed)?;
        if first.fence.is_some() && nodes.iter().all(|node| node.fence == first.fence) {
            return Ok(first.fence);
        }
        if let Some(created) = first.created
            && nodes.iter().all(|node| node.created == Some(created))
            && listings.iter().all(|listing| listing.written < created)
        {
            return Ok(u64::try_from(created).ok());
        }
        let paths = || nodes.iter().map(|node| node.path.clone());
        let containers = paths().map(|path| node_path::parent(&path).to_owned());
        let checks = paths().map(|path| NodeOperation::Check { path });
        let writes = containers.map(|path| NodeOperation::Touch { path });
        let transaction = NodeOperation::Transaction(checks.chain(writes).collect());
        let [answer] = session.run([transaction]).await?;
        written(answer)
    }
}

/// The number of the transaction that has written. `None` if it was refused because a node is gone.
fn written(answer: Answered) -> Result<Option<u64>, BackendError> {
    let answers = match answer {
        Ok(OperationAnswer::Transaction(answers)) => answers,
        Ok(_) => return Err(malformed()),
        Err(ServerCode::NO_NODE) => return Ok(None),
        Err(code) => return Err(failure(code)),
    };
    match answers.last() {
        Some(OperationAnswer::Node(stat)) => {
            u64::try_from(stat.written).map(Some).map_err(|_| malformed())
        }
        _ => Err(malformed()),
    }
}
