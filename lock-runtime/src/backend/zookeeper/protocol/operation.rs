//! Requests as frames.

use crate::backend::zookeeper::protocol::jute::JuteWriter;

/// What a request does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NodeOperation {
    Create {
        path: String,
        data: Vec<u8>,
        mode: NodeMode,
        access: NodeAccess,
    },
    Delete {
        path: String,
    },
    /// Reads the node's properties.
    Exists {
        path: String,
    },
    /// Reads the node.
    Read {
        path: String,
    },
    /// Reads the node and watches it.
    Watch {
        path: String,
    },
    /// Reads the names of the children, and watches for changes of the list.
    Children {
        path: String,
    },
    /// Reads the names of the children.
    List {
        path: String,
    },
    /// Writes empty data, so that the node's last change has a new number.
    Touch {
        path: String,
    },
    /// Fails unless the node exists. Only in a transaction.
    Check {
        path: String,
    },
    /// Answered by the leader after all writes before it. The server of the connection has them by then.
    Sync {
        path: String,
    },
    ReadAccess {
        path: String,
    },
    /// All or none of these.
    Transaction(Vec<Self>),
    CloseSession,
}

/// What ends a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeMode {
    Persistent,
    /// The session that made it.
    Ephemeral,
    /// The same. The server appends a number to the name.
    EphemeralSequential,
    /// The server, some time after the last child.
    Container,
}

/// Which clients have access to a new node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum NodeAccess {
    /// All.
    #[default]
    Open,
    /// Those with the login of the client that makes it.
    Creator,
}

/// The kind of an operation's answer: the operation's number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    Empty,
    /// A path and the node's properties.
    Created,
    /// A path.
    Path,
    Node,
    /// Data and the node's properties.
    Data,
    Children,
    Access,
    Transaction,
}

const CREATE: i32 = 1;
const DELETE: i32 = 2;
const EXISTS: i32 = 3;
const READ: i32 = 4;
const WRITE: i32 = 5;
const READ_ACCESS: i32 = 6;
const SYNC: i32 = 9;
const CHILDREN: i32 = 12;
const CHECK: i32 = 13;
const TRANSACTION: i32 = 14;
const CREATE_WITH_STAT: i32 = 15;
const CREATE_CONTAINER: i32 = 19;
const AUTH: i32 = 100;
const CLOSE: i32 = -11;

/// The number of a login, in place of the request's own.
pub(crate) const AUTH_XID: i32 = -4;
/// The number of a notification.
pub(crate) const EVENT_XID: i32 = -1;

const ANY_VERSION: i32 = -1;
const ALL_RIGHTS: i32 = 31;

impl NodeOperation {
    /// The frame of this request, with the number `xid`.
    pub(crate) fn frame(&self, xid: i32) -> Vec<u8> {
        let mut writer = JuteWriter::new();
        writer.int(xid).int(self.number());
        self.write(&mut writer);
        writer.finish()
    }

    const fn number(&self) -> i32 {
        match self {
            Self::Create { mode: NodeMode::Container, .. } => CREATE_CONTAINER,
            Self::Create { mode: NodeMode::Persistent, .. } => CREATE,
            Self::Create { .. } => CREATE_WITH_STAT,
            Self::Delete { .. } => DELETE,
            Self::Exists { .. } => EXISTS,
            Self::Read { .. } | Self::Watch { .. } => READ,
            Self::Children { .. } | Self::List { .. } => CHILDREN,
            Self::Touch { .. } => WRITE,
            Self::Check { .. } => CHECK,
            Self::Sync { .. } => SYNC,
            Self::ReadAccess { .. } => READ_ACCESS,
            Self::Transaction(_) => TRANSACTION,
            Self::CloseSession => CLOSE,
        }
    }

    pub(crate) const fn answer_kind(&self) -> AnswerKind {
        match self {
            Self::Create { mode: NodeMode::Persistent, .. } | Self::Sync { .. } => AnswerKind::Path,
            Self::Create { .. } => AnswerKind::Created,
            Self::Delete { .. } | Self::Check { .. } | Self::CloseSession => AnswerKind::Empty,
            Self::Exists { .. } | Self::Touch { .. } => AnswerKind::Node,
            Self::Read { .. } | Self::Watch { .. } => AnswerKind::Data,
            Self::Children { .. } | Self::List { .. } => AnswerKind::Children,
            Self::ReadAccess { .. } => AnswerKind::Access,
            Self::Transaction(_) => AnswerKind::Transaction,
        }
    }

    /// Whether the leader takes part in the answer. All other operations are answered by the server of the connection alone.
    pub(crate) const fn needs_leader(&self) -> bool {
        match self {
            Self::Create { .. }
            | Self::Delete { .. }
            | Self::Touch { .. }
            | Self::Sync { .. }
            | Self::Transaction(_)
            | Self::CloseSession => true,
            Self::Exists { .. }
            | Self::Read { .. }
            | Self::Watch { .. }
            | Self::Children { .. }
            | Self::List { .. }
            | Self::Check { .. }
            | Self::ReadAccess { .. } => false,
        }
    }

    fn write(&self, writer: &mut JuteWriter) {
        match self {
            Self::Create { path, data, mode, access } => {
                writer.text(path).buffer(data);
                access.write(writer);
                writer.int(mode.flags());
            }
            Self::Delete { path } | Self::Check { path } => {
                writer.text(path).int(ANY_VERSION);
            }
            Self::Exists { path } | Self::List { path } | Self::Read { path } => {
                writer.text(path).boolean(false);
            }
            Self::Watch { path } | Self::Children { path } => {
                writer.text(path).boolean(true);
            }
            Self::Touch { path } => {
                writer.text(path).buffer(&[]).int(ANY_VERSION);
            }
            Self::Sync { path } | Self::ReadAccess { path } => {
                writer.text(path);
            }
            Self::Transaction(operations) => {
                for operation in operations {
                    writer.int(operation.number()).boolean(false).int(-1);
                    operation.write(writer);
                }
                writer.int(-1).boolean(true).int(-1);
            }
            Self::CloseSession => {}
        }
    }
}

impl NodeMode {
    const fn flags(self) -> i32 {
        match self {
            Self::Persistent => 0,
            Self::Ephemeral => 1,
            Self::EphemeralSequential => 3,
            Self::Container => 4,
        }
    }
}

impl NodeAccess {
    fn write(self, writer: &mut JuteWriter) {
        let (scheme, id) = match self {
            Self::Open => ("world", "anyone"),
            Self::Creator => ("auth", ""),
        };
        writer.int(1).int(ALL_RIGHTS).text(scheme).text(id);
    }
}

/// A login by user and password.
pub(crate) fn login(user_and_password: &str) -> Vec<u8> {
    let mut writer = JuteWriter::new();
    writer.int(AUTH_XID).int(AUTH).int(0).text("digest").text(user_and_password);
    writer.finish()
}
