//! What acquires, renewals and releases have in common: the nodes of an owner, read and moved.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::zookeeper::claims::ClaimTable;
use crate::backend::zookeeper::listed_nodes::ListedNodes;
use crate::backend::zookeeper::lock_node::{LockNode, Slot, UnansweredNode};
use crate::backend::zookeeper::node_path::{self, Contender, KeyQueueNodes};
use crate::backend::zookeeper::protocol::answer::{Answered, OperationAnswer};
use crate::backend::zookeeper::protocol::operation::{NodeAccess, NodeMode, NodeOperation};
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{failure, malformed, unanswered};
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::zookeeper::ttl_classes::TtlClasses;
use crate::backend::{BackendError, Owner};
use crate::base::key::Key;

/// The nodes of the locks of one pool.
pub(crate) struct LockNodes {
    /// The path below which the containers are.
    pub(crate) root: String,
    pub(crate) access: NodeAccess,
    pub(crate) claims: Arc<ClaimTable>,
    pub(crate) classes: TtlClasses,
    /// How long each of several requests of one call may take: [`within_part`](Self::within_part).
    pub(crate) part_limit: Duration,
}

/// The queue of a key, as the server of a session knows it.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyListing {
    pub(crate) nodes: KeyQueueNodes,
    /// The last fence that was written to the container.
    pub(crate) written: i64,
}

impl KeyListing {
    /// A missing container has an empty queue.
    pub(crate) fn read(answer: Answered) -> Result<Self, BackendError> {
        match answer {
            Ok(OperationAnswer::Children { names, stat }) => {
                Ok(Self { nodes: KeyQueueNodes::parse(&names), written: stat.written })
            }
            Ok(_) => Err(malformed()),
            Err(ServerCode::NO_NODE) => Ok(Self::default()),
            Err(code) => Err(failure(code)),
        }
    }

    /// Whether `owner` has the first node.
    pub(crate) fn is_first(&self, owner: &Owner) -> bool {
        let own = self.nodes.first_of(owner);
        own.is_some_and(|own| self.nodes.predecessor(own, owner).is_none())
    }
}

impl LockNodes {
    pub(crate) fn container(&self, key: &Key) -> String {
        node_path::container(&self.root, key.as_str())
    }

    /// The path of any node that is always there.
    pub(crate) fn root_path(&self) -> String {
        if self.root.is_empty() { "/".to_owned() } else { self.root.clone() }
    }

    /// A read after it sees all changes that were made before. Only the leader answers, even one that is deposed.
    pub(crate) fn sync(&self) -> NodeOperation {
        NodeOperation::Sync { path: self.root_path() }
    }

    /// A transaction without a change. Its answer says that a majority has taken it, and that the session lived by then.
    pub(crate) fn confirm(&self) -> NodeOperation {
        NodeOperation::Transaction(vec![NodeOperation::Check { path: self.root_path() }])
    }

    /// Records lists of `keys`, before they are sent.
    pub(crate) fn list(&self, keys: &[Key]) -> ListedNodes {
        self.claims.list(keys.iter().map(|key| self.container(key)))
    }

    pub(crate) fn children(&self, key: &Key) -> NodeOperation {
        NodeOperation::Children { path: self.container(key) }
    }

    pub(crate) fn create(&self, path: String, mode: NodeMode) -> NodeOperation {
        self.create_with(Vec::new(), path, mode)
    }

    /// A new node with data, which no other request reads.
    pub(crate) fn create_with(&self, data: Vec<u8>, path: String, mode: NodeMode) -> NodeOperation {
        NodeOperation::Create { path, data, mode, access: self.access }
    }

    /// Makes the missing nodes above the containers.
    pub(crate) async fn make_root(&self, session: &LiveSession) -> Result<(), BackendError> {
        let ends = self.root.match_indices('/').skip(1).map(|(at, _)| at);
        let paths = ends.chain([self.root.len()]).map(|end| self.root[..end].to_owned());
        let operations: Vec<_> = paths
            .filter(|path| !path.is_empty())
            .map(|path| self.create(path, NodeMode::Persistent))
            .collect();
        let exists = NodeOperation::Exists { path: self.root_path() };
        if operations.is_empty() || matches!(session.run([exists]).await?, [Ok(_)]) {
            return Ok(());
        }
        // A user without rights on the upper nodes may have them on the last one.
        let mut last = Ok(());
        for answer in session.send(operations).get().await? {
            last = match answer {
                Ok(_) | Err(ServerCode::NODE_EXISTS) => Ok(()),
                Err(code) => Err(failure(code)),
            };
        }
        last
    }

    /// Requests for the queues of `keys`, after one that confirms the session.
    pub(crate) fn confirmed_reads(&self, keys: &[Key]) -> Vec<NodeOperation> {
        let reads = keys.iter().map(|key| self.children(key));
        std::iter::once(self.confirm()).chain(reads).collect()
    }

    /// The queues of `keys`. Not older than this call, and of a session that lives.
    pub(crate) async fn listings(
        &self,
        session: &LiveSession,
        keys: &[Key],
    ) -> Result<Vec<KeyListing>, BackendError> {
        self.each_listing(session, keys).await?.into_iter().collect()
    }

    /// Like [`listings`](Self::listings), with the error of each queue that is refused.
    pub(crate) async fn each_listing(
        &self,
        session: &LiveSession,
        keys: &[Key],
    ) -> Result<Vec<Result<KeyListing, BackendError>>, BackendError> {
        let mut answers = session.send(self.confirmed_reads(keys)).get().await?.into_iter();
        confirmed(&answers.next().ok_or_else(malformed)?)?;
        Ok(answers.map(KeyListing::read).collect())
    }

    /// Reads the queue of each of `keys`. Where a request of the owner was not answered, the read goes to the session of that
    /// request, which executes it afterwards. Otherwise `session` is used.
    pub(crate) async fn listings_of(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
    ) -> Result<Vec<KeyListing>, BackendError> {
        let session_of = |key: &Key| match self.claims.slot(owner, key) {
            Some(Slot::Unanswered(of)) if of.session.is_current() => of.session,
            _ => session.clone(),
        };
        let sessions: Vec<_> = keys.iter().map(session_of).collect();
        match sessions.first() {
            Some(first) if sessions.iter().all(|it| it.is(first)) => {
                self.listings(first, keys).await
            }
            _ => {
                let mut listings = Vec::with_capacity(keys.len());
                for (key, session) in keys.iter().zip(&sessions) {
                    listings.extend(self.listings(session, std::slice::from_ref(key)).await?);
                }
                Ok(listings)
            }
        }
    }

    /// The outcome of one of several requests of a call. Without one in time it fails here: at the end of the call, the answers of
    /// the others would be lost, too.
    pub(crate) async fn within_part<T>(
        &self,
        request: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        timeout(self.part_limit, request).await.unwrap_or_else(|_| Err(unanswered()))
    }

    /// The session for `owner`: that of its nodes if it is long enough.
    pub(crate) async fn session_for(
        &self,
        owner: &Owner,
        kept_for: Duration,
    ) -> Result<LiveSession, BackendError> {
        let slots = self.claims.slots(owner);
        let sessions = slots.iter().map(|(_, slot)| slot.session());
        let needed = self.classes.timeout_for(kept_for);
        let mut long_enough = sessions.filter(|it| it.is_current() && it.timeout() >= needed);
        match long_enough.next() {
            Some(session) => Ok(session.clone()),
            None => self.classes.holding(kept_for).await,
        }
    }

    /// Takes over `contender`, a node of `owner`: the answer to its creation was lost, or another session has made it. `None` if
    /// it is gone.
    pub(crate) async fn adopt(
        &self,
        session: &LiveSession,
        owner: &Owner,
        key: &Key,
        contender: &Contender,
    ) -> Result<Option<LockNode>, BackendError> {
        let path = format!("{}/{}", self.container(key), contender.name);
        let fence = self.claims.slot(owner, key).and_then(|slot| slot.fence());
        let [answer] = session.run([NodeOperation::Exists { path: path.clone() }]).await?;
        let stat = match answer {
            Ok(OperationAnswer::Node(stat)) => stat,
            Ok(_) => return Err(malformed()),
            Err(ServerCode::NO_NODE) => return Ok(None),
            Err(code) => return Err(failure(code)),
        };
        if stat.session != session.id() {
            return self.move_node(session, owner, key, &path, fence).await;
        }
        // A node with the number of a session in its name was moved: others may have queued before.
        let created = (!contender.is_moved()).then_some(stat.created);
        let node = LockNode::new(path, session.clone(), created);
        let node = LockNode { fence, has_strays: true, ..node };
        Ok(self.claims.set(owner, key, Slot::Node(node.clone())).then_some(node))
    }

    /// Moves the node at `path` into `session`: it is deleted and made again in one transaction, in the same position. `None` if
    /// it is gone.
    pub(crate) async fn move_node(
        &self,
        session: &LiveSession,
        owner: &Owner,
        key: &Key,
        path: &str,
        fence: Option<u64>,
    ) -> Result<Option<LockNode>, BackendError> {
        let name = path.rsplit_once('/').map_or("", |(_, name)| name);
        let Some(contender) = Contender::parse(name) else { return Ok(None) };
        let moved = node_path::moved_node(&self.container(key), owner, session.id(), &contender);
        let read = NodeOperation::Read { path: path.to_owned() };
        let read = session.run([self.sync(), read]).await.map_err(BackendError::before_sending)?;
        let data = match read {
            [_, Ok(OperationAnswer::Data(data))] => data,
            // This user may not read it, or it is gone: the transaction shows which.
            _ => Vec::new(),
        };
        let transaction = NodeOperation::Transaction(vec![
            NodeOperation::Delete { path: path.to_owned() },
            self.create_with(data, moved.clone(), NodeMode::Ephemeral),
        ]);
        // The session has not expired, or no request of it is sent.
        let unanswered = UnansweredNode { session: session.clone(), fence };
        self.claims.set(owner, key, Slot::Unanswered(unanswered));
        let [answer] = session.run([transaction]).await?;
        match answer {
            Ok(_) => {}
            Err(ServerCode::NO_NODE) => return Ok(None),
            Err(code) => return Err(failure(code)),
        }
        let node = LockNode::new(moved, session.clone(), None);
        let node = LockNode { fence, has_strays: true, ..node };
        Ok(self.claims.set(owner, key, Slot::Node(node.clone())).then_some(node))
    }
}

/// Whether the answer to [`LockNodes::confirm`] came through a majority. A refusal of the check does too.
pub(crate) fn confirmed(answer: &Answered) -> Result<(), BackendError> {
    match answer {
        Ok(_) | Err(ServerCode::NO_NODE | ServerCode::NO_AUTH) => Ok(()),
        Err(code) => Err(failure(*code)),
    }
}
