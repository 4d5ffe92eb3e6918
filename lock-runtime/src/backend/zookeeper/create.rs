//! New nodes of an owner, and the deletion of nodes that do not stay.

use crate::backend::zookeeper::listed_nodes::ListedNodes;
use crate::backend::zookeeper::lock_node::{LockNode, Slot};
use crate::backend::zookeeper::lock_nodes::{KeyListing, LockNodes, confirmed};
use crate::backend::zookeeper::node_path;
use crate::backend::zookeeper::protocol::answer::{Answered, OperationAnswer};
use crate::backend::zookeeper::protocol::operation::{NodeMode, NodeOperation};
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{expired, failure, malformed};
use crate::backend::zookeeper::session::LiveSession;
use crate::backend::{AcquireRequest, BackendError, FailureKind, Owner};
use crate::base::key::Key;

/// The effect of a request that creates nodes and lists the queues of all keys.
pub(crate) enum Creation {
    Listed {
        listings: Vec<KeyListing>,
        listed: ListedNodes,
    },
    /// These keys have no container; if there are none, a container that was to be created is there. Nothing was created.
    WithoutContainers(Vec<Key>),
}

impl LockNodes {
    /// Creates nodes in `missing`, and containers in `absent` with them, and lists the queues of all keys.
    ///
    /// A container is created together with its first node: the servers delete only containers that had one.
    pub(crate) async fn create_and_list(
        &self,
        session: &LiveSession,
        request: &AcquireRequest,
        missing: &[Key],
        absent: &[Key],
    ) -> Result<Creation, BackendError> {
        let (owner, keys) = (&request.owner, &request.keys);
        let label = request.label.to_string().into_bytes();
        let create = |key: &Key| {
            let path = node_path::new_node(&self.container(key), owner);
            self.create_with(label.clone(), path, NodeMode::EphemeralSequential)
        };
        let containers = absent
            .iter()
            .filter(|key| missing.contains(key))
            .map(|key| self.create(self.container(key), NodeMode::Container));
        let mut steps: Vec<_> = containers.chain(missing.iter().map(create)).collect();
        let first = match steps.len() {
            0 => self.confirm(),
            1 => steps.remove(0),
            _ => NodeOperation::Transaction(steps),
        };
        let lists = keys.iter().map(|key| self.children(key));
        let operations = std::iter::once(first).chain(lists).collect();
        for key in missing {
            if !self.claims.set(owner, key, Slot::unanswered(session.clone())) {
                return Err(expired());
            }
        }
        if !request.enqueue {
            self.claims.record_try(owner, missing);
        }
        let listed = self.list(keys);
        let sent = session.send(operations).get().await;
        let answers = sent.inspect_err(|error| self.forget_unsent(owner, missing, error))?;
        let mut answers = answers.into_iter();
        let created = answers.next().ok_or_else(malformed)?;
        if missing.is_empty() {
            confirmed(&created)?;
        } else {
            match created {
                Ok(created) => self.record_created(session, owner, missing, created)?,
                Err(code) => {
                    self.forget_unsent(owner, missing, &failure(code));
                    if code == ServerCode::NO_NODE && !absent.is_empty() {
                        self.make_root(session).await.map_err(BackendError::before_sending)?;
                    }
                    return refused(request, code, answers);
                }
            }
        }
        let listings = answers.map(KeyListing::read).collect::<Result<_, _>>()?;
        Ok(Creation::Listed { listings, listed })
    }

    fn record_created(
        &self,
        session: &LiveSession,
        owner: &Owner,
        keys: &[Key],
        created: OperationAnswer,
    ) -> Result<(), BackendError> {
        let answers = match created {
            OperationAnswer::Transaction(answers) => answers,
            created => vec![created],
        };
        // The nodes come last, after their containers.
        let others = answers.len().checked_sub(keys.len()).ok_or_else(malformed)?;
        for (key, answer) in keys.iter().zip(answers.into_iter().skip(others)) {
            let OperationAnswer::Created { path, stat } = answer else { return Err(malformed()) };
            let node = LockNode::new(path, session.clone(), Some(stat.created));
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

    /// Deletes what a lost connection has created late.
    pub(crate) async fn delete_strays(
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

    pub(crate) async fn delete_created(
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
}

/// What a creation that was refused with `code` has found.
fn refused(
    request: &AcquireRequest,
    code: ServerCode,
    lists: impl Iterator<Item = Answered>,
) -> Result<Creation, BackendError> {
    match code {
        ServerCode::NO_NODE => {
            let keys = request.keys.iter().zip(lists);
            let absent = keys.filter(|(_, answer)| *answer == Err(ServerCode::NO_NODE));
            Ok(Creation::WithoutContainers(absent.map(|(key, _)| key.clone()).collect()))
        }
        ServerCode::NODE_EXISTS => Ok(Creation::WithoutContainers(Vec::new())),
        _ => Err(failure(code)),
    }
}
