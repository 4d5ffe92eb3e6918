//! A session with the ensemble: what this process holds ends with it.
//!
//! The server executes the requests of a session in the order in which they were sent, even after a change of the
//! connection. It refuses what a former connection of the session has left at another server. So an answer to a later
//! request tells the outcome of all earlier ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::backend::BackendError;
use crate::backend::zookeeper::exchange::{GroupAnswers, GroupReply};
use crate::backend::zookeeper::protocol::answer::{Answered, NodeEvent};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::backend::zookeeper::server_error::{closed, malformed};

/// What a session is told to do.
pub(crate) enum SessionRequest {
    /// Send these one after another, in this incarnation of the session.
    Group { incarnation: u64, operations: Vec<NodeOperation>, reply: GroupReply },
    /// End the connection after all requests that were sent before.
    Close(SessionEnd),
}

/// What ends at the servers with the last connection of a session.
#[derive(Clone)]
pub(crate) enum SessionEnd {
    /// All of it.
    Session,
    /// These deletions. The session continues until its timeout.
    Nodes(Vec<NodeOperation>),
}

/// Whether requests can be sent.
#[derive(Clone, Debug)]
pub(crate) enum SessionState {
    /// The first connection attempt is under way.
    Opening,
    Open(OpenSession),
    Down(BackendError),
}

/// A session as the servers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenSession {
    pub(crate) id: i64,
    /// Counts the sessions that follow each other in one [`SessionClient`].
    pub(crate) incarnation: u64,
    /// How long the servers keep it after a sign of life.
    pub(crate) timeout: Duration,
    /// The server of the connection.
    pub(crate) server: usize,
}

/// Receives what happens to sessions. Methods run between the answers of a session, and never block.
pub(crate) trait SessionSink: Send + Sync {
    fn node_changed(&self, event: &NodeEvent);
    /// The connection has ended, and its watches with it.
    fn disconnected(&self, session: u64, error: &BackendError);
    /// A session has a connection again.
    fn resumed(&self);
    /// The session and its nodes are gone.
    fn expired(&self, session: u64, incarnation: u64);
}

/// The sending side of a session. Dropping it ends the connection; the servers end the session after its timeout. After
/// [`begin_close`](Self::begin_close) the task ends the session first.
pub(crate) struct SessionClient {
    /// Distinguishes the sessions of a pool.
    pub(crate) number: u64,
    requests: mpsc::UnboundedSender<SessionRequest>,
    state: watch::Receiver<SessionState>,
    incarnation: Arc<AtomicU64>,
}

impl SessionClient {
    pub(crate) fn new(
        number: u64,
        requests: mpsc::UnboundedSender<SessionRequest>,
        state: watch::Receiver<SessionState>,
        incarnation: Arc<AtomicU64>,
    ) -> Arc<Self> {
        Arc::new(Self { number, requests, state, incarnation })
    }

    /// The session, as soon as the first connection attempt is over.
    ///
    /// # Errors
    /// The error of the last connection, while there is none.
    pub(crate) async fn opened(self: &Arc<Self>) -> Result<LiveSession, BackendError> {
        let mut state = self.state.clone();
        let known = state.wait_for(|state| !matches!(state, SessionState::Opening)).await;
        match known.as_deref() {
            Ok(SessionState::Open(open)) => Ok(LiveSession { client: self.clone(), open: *open }),
            Ok(SessionState::Down(error)) => Err(error.clone().before_sending()),
            Ok(SessionState::Opening) | Err(_) => Err(closed()),
        }
    }

    /// The session, if it is open.
    pub(crate) fn open(&self) -> Option<OpenSession> {
        match &*self.state.borrow() {
            SessionState::Open(open) => Some(*open),
            SessionState::Opening | SessionState::Down(_) => None,
        }
    }

    /// The timeout that the servers have agreed to, if it is known.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.open().map(|open| open.timeout)
    }

    /// Tells the task to end the connection after all requests that were sent before.
    pub(crate) fn begin_close(&self, end: SessionEnd) {
        let _ = self.requests.send(SessionRequest::Close(end));
    }

    /// Whether the task has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.requests.is_closed()
    }

    /// Waits until the task has ended.
    pub(crate) async fn closed(&self) {
        self.requests.closed().await;
    }
}

/// One incarnation of a session. Requests are refused when it has expired.
#[derive(Clone)]
pub(crate) struct LiveSession {
    client: Arc<SessionClient>,
    open: OpenSession,
}

impl LiveSession {
    pub(crate) fn number(&self) -> u64 {
        self.client.number
    }

    pub(crate) const fn id(&self) -> i64 {
        self.open.id
    }

    pub(crate) const fn incarnation(&self) -> u64 {
        self.open.incarnation
    }

    pub(crate) const fn timeout(&self) -> Duration {
        self.open.timeout
    }

    /// Whether it is the same incarnation of the same session.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.number() == other.number() && self.incarnation() == other.incarnation()
    }

    /// Whether the session has not expired, as far as is known here.
    pub(crate) fn is_current(&self) -> bool {
        self.client.incarnation.load(Ordering::SeqCst) == self.open.incarnation
    }

    /// Ends the session after all requests that were sent before. From then on it is not [current](Self::is_current). Returns
    /// `false` if it has ended before.
    pub(crate) fn end(&self) -> bool {
        let (open, next) = (self.open.incarnation, self.open.incarnation + 1);
        let incarnation = &self.client.incarnation;
        let ends =
            incarnation.compare_exchange(open, next, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if ends {
            self.client.begin_close(SessionEnd::Session);
        }
        ends
    }

    /// Sends `operations` one after another, before this method returns.
    pub(crate) fn send(&self, operations: Vec<NodeOperation>) -> AwaitedGroup {
        let (reply, answers) = oneshot::channel();
        let request =
            SessionRequest::Group { incarnation: self.open.incarnation, operations, reply };
        // An answer that nothing sends counts as `closed`.
        let _ = self.client.requests.send(request);
        AwaitedGroup(answers)
    }

    /// Sends `operations`, and waits for one answer each.
    pub(crate) async fn run<const N: usize>(
        &self,
        operations: [NodeOperation; N],
    ) -> Result<[Answered; N], BackendError> {
        let answers = self.send(operations.into()).get().await?;
        answers.try_into().map_err(|_| malformed())
    }
}

/// The answers to a group of operations. Dropping it gives up a group that was not sent yet.
pub(crate) struct AwaitedGroup(oneshot::Receiver<GroupAnswers>);

impl AwaitedGroup {
    pub(crate) async fn get(self) -> GroupAnswers {
        self.0.await.unwrap_or_else(|_| Err(closed()))
    }
}
