//! What an owner has below the container of a key.

use crate::backend::zookeeper::session::LiveSession;

/// What an owner has below the container of a key.
#[derive(Clone)]
pub(crate) enum Slot {
    /// A request of this session that makes a node has no answer.
    Unanswered(UnansweredNode),
    Node(LockNode),
}

/// A node that may exist.
#[derive(Clone)]
pub(crate) struct UnansweredNode {
    pub(crate) session: LiveSession,
    /// The number of the grant, if the request moves a node that has one.
    pub(crate) fence: Option<u64>,
}

impl Slot {
    pub(crate) const fn unanswered(session: LiveSession) -> Self {
        Self::Unanswered(UnansweredNode { session, fence: None })
    }

    /// The number of the grant, if it has one.
    pub(crate) const fn fence(&self) -> Option<u64> {
        match self {
            Self::Unanswered(unanswered) => unanswered.fence,
            Self::Node(node) => node.fence,
        }
    }

    /// Whether the owner knows of the node by an answer: it is queued, or was granted the key.
    pub(crate) const fn is_answered(&self) -> bool {
        match self {
            Self::Unanswered(_) => false,
            Self::Node(node) => {
                matches!(node.standing, Standing::Queued { .. } | Standing::Granted { .. })
            }
        }
    }

    pub(crate) fn session(&self) -> &LiveSession {
        match self {
            Self::Unanswered(unanswered) => &unanswered.session,
            Self::Node(node) => &node.session,
        }
    }
}

/// A node of this process.
#[derive(Clone)]
pub(crate) struct LockNode {
    pub(crate) path: String,
    pub(crate) session: LiveSession,
    /// The transaction that created it. `None` after a move: others may have queued before.
    pub(crate) created: Option<i64>,
    pub(crate) standing: Standing,
    /// The number of the grant, once it has one.
    pub(crate) fence: Option<u64>,
    /// An earlier request of this owner may have made another node. A release looks for it.
    pub(crate) has_strays: bool,
}

impl LockNode {
    /// A node of which nothing else is known yet.
    pub(crate) fn new(path: String, session: LiveSession, created: Option<i64>) -> Self {
        let (standing, fence) = (Standing::New, None);
        Self { path, session, created, standing, fence, has_strays: false }
    }

    /// The same node, to be deleted.
    pub(crate) fn leaving(self) -> Self {
        let was_granted = self.was_granted();
        Self { standing: Standing::Leaving { was_granted }, ..self }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.standing, Standing::Leaving { .. })
    }

    /// Whether it is known to have been the first node.
    pub(crate) fn was_granted(&self) -> bool {
        matches!(self.standing, Standing::Granted { .. } | Standing::Leaving { was_granted: true })
    }

    /// Whether it is held, and nothing reports its deletion.
    pub(crate) fn is_unwatched(&self) -> bool {
        matches!(self.standing, Standing::Granted { watched: WatchScope::None })
    }

    pub(crate) fn name(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(_, name)| name)
    }
}

/// The position of a node in the queue of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    New,
    /// Behind the node at this path, which is watched.
    Queued {
        predecessor: String,
    },
    /// First, so that its owner holds the key.
    Granted {
        watched: WatchScope,
    },
    /// To be deleted. A repeated release has to say whether the node was first.
    Leaving {
        was_granted: bool,
    },
}

/// What reports a change around a held key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchScope {
    None,
    /// The container: another owner queues, or the node is deleted.
    Container,
    /// The node: it is deleted. Other owners are known to wait.
    Node,
}
