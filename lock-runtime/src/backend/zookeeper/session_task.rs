//! The task of a session: keeps it connected, sends requests and signs of life, and reads answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::sleep;

use crate::backend::BackendError;
use crate::backend::backoff::Backoff;
use crate::backend::coordination::addresses::ServerStream;
use crate::backend::coordination::first_server::first_to_serve;
use crate::backend::zookeeper::open_exchange::{OpenExchange, SignsOfLife};
use crate::backend::zookeeper::protocol::answer::{AnswerHeader, NodeEvent};
use crate::backend::zookeeper::protocol::handshake::{SessionIdentity, SessionOffer};
use crate::backend::zookeeper::protocol::jute::{JuteReader, MalformedRecord};
use crate::backend::zookeeper::protocol::operation::{AUTH_XID, EVENT_XID, NodeOperation};
use crate::backend::zookeeper::protocol::server_code::ServerCode;
use crate::backend::zookeeper::server_error::{
    closed, connection_lost, expired, failure, malformed, session_shortened,
};
use crate::backend::zookeeper::session::{
    OpenSession, SessionClient, SessionEnd, SessionRequest, SessionSink, SessionState,
};
use crate::backend::zookeeper::transport::{EnsembleDialer, take_frames, why};
use crate::base::clock::{Clock, Instant};

/// The most requests that are taken over together.
const BATCH: usize = 256;

/// No more requests are taken over while this many bytes wait for the network.
const MOST_UNSENT: usize = 1 << 20;

/// How many bytes one read has room for, at least.
const READ_SIZE: usize = 16 << 10;

pub(crate) struct SessionTask {
    dialer: Arc<EnsembleDialer>,
    clock: Clock,
    sink: Arc<dyn SessionSink>,
    number: u64,
    /// The timeout that is asked for.
    asked: Duration,
    /// The timeout of the open session.
    timeout: Duration,
    identity: SessionIdentity,
    incarnation: Arc<AtomicU64>,
    requests: mpsc::UnboundedReceiver<SessionRequest>,
    state: watch::Sender<SessionState>,
    /// The server of the last connection.
    server: usize,
    /// How long the last connection took to open.
    took: Duration,
    /// Set when the pool is closed.
    ending: Option<SessionEnding>,
}

/// What is left to send. It is sent once more on the next connection if one ends without the answer.
struct SessionEnding {
    end: SessionEnd,
    until: Instant,
}

/// How a connection has ended.
enum ConnectionEnd {
    Closed,
    Lost { error: BackendError, answered: Instant },
}

/// What an offer of a server has led to.
enum TakenUp {
    Open,
    Expired,
    /// The session would end earlier than was agreed, even for locks that are held.
    Shortened(BackendError),
}

impl SessionTask {
    /// Starts a session that asks for `timeout`, first at `server`.
    pub(crate) fn start(
        dialer: Arc<EnsembleDialer>,
        clock: Clock,
        sink: Arc<dyn SessionSink>,
        number: u64,
        timeout: Duration,
        server: usize,
    ) -> Arc<SessionClient> {
        let (sender, requests) = mpsc::unbounded_channel();
        let (state, known_state) = watch::channel(SessionState::Opening);
        let incarnation = Arc::new(AtomicU64::new(0));
        let task = Self {
            dialer,
            clock,
            sink,
            number,
            asked: timeout,
            timeout,
            identity: SessionIdentity::default(),
            incarnation: incarnation.clone(),
            requests,
            state,
            server,
            took: Duration::ZERO,
            ending: None,
        };
        tokio::spawn(task.run());
        SessionClient::new(number, sender, known_state, incarnation)
    }

    async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        let mut failed = None;
        loop {
            let is_first = failed.is_none();
            let Some(stream) = self.open(&mut backoff, failed).await else { return };
            let up_since = self.clock.now();
            self.state.send_replace(SessionState::Open(self.open_session()));
            if !is_first {
                self.sink.resumed();
            }
            match self.serve(stream).await {
                ConnectionEnd::Closed => return,
                ConnectionEnd::Lost { error, answered } => {
                    self.state.send_replace(SessionState::Down(error.clone()));
                    self.sink.disconnected(self.number, &error);
                    backoff.ended(answered.since(up_since));
                    self.server = self.dialer.servers.other_than(self.server);
                    failed = Some(error);
                }
            }
        }
    }

    fn open_session(&self) -> OpenSession {
        let incarnation = self.incarnation.load(Ordering::SeqCst);
        let server = self.server % self.dialer.servers.count();
        OpenSession { id: self.identity.id, incarnation, timeout: self.timeout, server }
    }

    /// Connects until the session is open: a new one at the first server that serves, a resumed one at one server after another.
    /// Requests wait for the first attempt, and fail immediately after it. `None` if the pool is closed.
    async fn open(
        &mut self,
        backoff: &mut Backoff,
        mut failed: Option<BackendError>,
    ) -> Option<Box<dyn ServerStream>> {
        let servers = self.dialer.servers.count();
        let since = self.clock.now();
        let (mut tried, mut shortened) = (0, 0);
        // The first attempt after a loss is made immediately if the connection has served.
        let mut pause = if failed.is_some() { backoff.next() } else { Duration::ZERO };
        loop {
            if let Some(ending) = &self.ending
                && (self.identity.is_new() || self.clock.now() >= ending.until)
            {
                return None;
            }
            let is_late = self.clock.now().since(since) > self.timeout;
            if is_late {
                // The session is over, unless all servers were away. Servers that were restored from a copy refuse a session that
                // has seen later transactions, before they look for it.
                self.identity.last_zxid = 0;
            }
            let (is_new, former) = (self.identity.is_new(), self.identity.id);
            let attempt = open_after(
                pause,
                self.dialer.clone(),
                self.clock,
                self.server % servers,
                self.identity.clone(),
                if is_new { self.asked } else { self.timeout },
                self.attempt_limit(tried),
            );
            let began = self.clock.now() + pause;
            let offered = self.failing_requests(failed.as_ref(), attempt).await?;
            let took = self.clock.now().since(began);
            pause = Duration::ZERO;
            let error = match offered {
                Ok((server, (mut stream, offer))) => match self.take_up(server, offer) {
                    TakenUp::Open if is_late && !is_new && self.identity.id == former => {
                        // The servers count it anew. In a copy it has nodes of locks that were released since then.
                        self.close_session(&mut stream).await;
                        continue;
                    }
                    TakenUp::Open => {
                        self.took = took;
                        return Some(stream);
                    }
                    TakenUp::Expired => continue,
                    TakenUp::Shortened(_) if shortened + 1 >= servers => {
                        // No server keeps it for as long as its locks need.
                        self.close_session(&mut stream).await;
                        continue;
                    }
                    TakenUp::Shortened(error) => {
                        shortened += 1;
                        error
                    }
                },
                Err(error) => error,
            };
            self.state.send_replace(SessionState::Down(error.clone()));
            self.sink.disconnected(self.number, &error);
            failed = Some(error);
            self.server += 1;
            tried += 1;
            if is_new || tried % servers == 0 {
                pause = backoff.next();
            }
        }
    }

    fn take_up(&mut self, server: usize, offer: SessionOffer) -> TakenUp {
        self.server = server;
        if let SessionOffer::Open { id, .. } = offer
            && !self.identity.is_new()
            && id != self.identity.id
        {
            // Another session in place of an expired one.
            self.expire();
        }
        match offer {
            SessionOffer::Open { id, timeout, .. }
                if id == self.identity.id && timeout < self.timeout =>
            {
                let name = self.dialer.servers.name(server);
                TakenUp::Shortened(session_shortened(&name, self.timeout, timeout))
            }
            SessionOffer::Open { id, password, timeout } => {
                if id != self.identity.id {
                    self.timeout = timeout;
                }
                let last_zxid = self.identity.last_zxid;
                self.identity = SessionIdentity { id, password, last_zxid };
                TakenUp::Open
            }
            SessionOffer::Expired => {
                self.expire();
                TakenUp::Expired
            }
        }
    }

    /// Ends the session that `stream` has resumed.
    async fn close_session(&mut self, stream: &mut Box<dyn ServerStream>) {
        let _ = stream.write_all(&NodeOperation::CloseSession.frame(1)).await;
        self.expire();
    }

    /// The session is gone. The next attempt asks for another one.
    fn expire(&mut self) {
        let last_zxid = self.identity.last_zxid;
        self.identity = SessionIdentity { last_zxid, ..SessionIdentity::default() };
        let ended = self.incarnation.fetch_add(1, Ordering::SeqCst);
        self.sink.expired(self.number, ended);
    }

    /// How long the next attempt may take, after `tried` others. A session that is open must reach another server before it
    /// expires, and a server that is silent must not use up that time. So each of several servers first gets a multiple of the
    /// time that the last connection took: in two rounds, as a new leader serves some seconds after the former one has stopped.
    fn attempt_limit(&self, tried: usize) -> Duration {
        const SHORTEST: Duration = Duration::from_millis(500);
        const FIRST: Duration = Duration::from_secs(1);
        let (limit, servers) = (self.dialer.limits.connect, self.dialer.servers.count());
        if self.identity.is_new() {
            return limit;
        }
        let limit = limit.min((self.timeout / 3).max(SHORTEST));
        if servers > 1 && tried < 2 * servers {
            limit.min(self.took.saturating_mul(4).max(FIRST))
        } else {
            limit
        }
    }

    /// The outcome of `attempt`. Requests that come meanwhile fail with `error`. `None` if the pool is closed, and there is no
    /// session to end, or no time left for it.
    async fn failing_requests<T>(
        &mut self,
        error: Option<&BackendError>,
        attempt: impl Future<Output = T>,
    ) -> Option<T> {
        let mut attempt = std::pin::pin!(attempt);
        let Some(error) = error else {
            let (state, clock, limit) = (&self.state, self.clock, self.dialer.limits.request);
            // A server may have opened the session by now, which then has to be ended.
            let given_up = async move {
                state.closed().await;
                clock.sleep_until(clock.now() + limit).await;
            };
            return tokio::select! {
                outcome = &mut attempt => Some(outcome),
                () = given_up => None,
            };
        };
        let error = error.clone().before_sending();
        loop {
            let until = self.ending.as_ref().map(|ending| ending.until);
            tokio::select! {
                outcome = &mut attempt => return Some(outcome),
                request = self.requests.recv(), if until.is_none() => match request? {
                    SessionRequest::Group { reply, .. } => drop(reply.send(Err(error.clone()))),
                    SessionRequest::Close(_) if self.identity.is_new() => return None,
                    SessionRequest::Close(end) => self.begin_end(end),
                },
                () = self.clock.sleep_until_due(until) => return None,
            }
        }
    }

    /// Sends and receives until the connection ends.
    async fn serve(&mut self, stream: Box<dyn ServerStream>) -> ConnectionEnd {
        let signs = SignsOfLife::new(self.timeout, self.dialer.limits.request);
        let mut open = OpenExchange::new(self.clock.now(), signs);
        self.send_end(&mut open);
        let (error, is_closed) = match self.exchange(&mut open, stream).await {
            // Requests that were sent may be executed.
            Ok(()) => (closed().after_a_part(), true),
            Err(error) => (error, false),
        };
        open.exchange.fail(&error);
        if is_closed {
            return ConnectionEnd::Closed;
        }
        ConnectionEnd::Lost { error, answered: open.heard }
    }

    async fn exchange(
        &mut self,
        open: &mut OpenExchange,
        stream: Box<dyn ServerStream>,
    ) -> Result<(), BackendError> {
        let name = self.dialer.servers.name(self.server % self.dialer.servers.count());
        let lost = |error: &std::io::Error| connection_lost(&name, &why(error));
        let (mut reader, mut writer) = tokio::io::split(stream);
        let (mut incoming, mut requests) = (Vec::new(), Vec::with_capacity(BATCH));
        loop {
            let now = self.clock.now();
            if open.is_over(now) {
                return Ok(());
            }
            // Before any answer that came meanwhile is read.
            if open.is_late(now) {
                return Err(connection_lost(&name, "this process has sent nothing for too long"));
            }
            let due = open.due();
            incoming.reserve(READ_SIZE);
            tokio::select! {
                biased;
                read = reader.read_buf(&mut incoming) => {
                    if read.map_err(|error| lost(&error))? == 0 {
                        return Err(lost(&std::io::ErrorKind::UnexpectedEof.into()));
                    }
                    open.heard = self.clock.now();
                    take_frames(&mut incoming, |frame| self.on_frame(open, frame))?;
                }
                written = writer.write(open.outgoing.bytes()), if !open.outgoing.bytes().is_empty() => {
                    let written = written.map_err(|error| lost(&error))?;
                    open.outgoing.on_taken(written, self.clock.now());
                }
                count = self.requests.recv_many(&mut requests, BATCH),
                    if open.outgoing.bytes().len() < MOST_UNSENT && open.closing.is_none() =>
                {
                    if count == 0 {
                        return Ok(());
                    }
                    for request in requests.drain(..) {
                        self.take_over(open, request);
                    }
                }
                () = self.clock.sleep_until(due) => {
                    let now = self.clock.now();
                    if open.is_silent(now) {
                        return Err(connection_lost(&name, "it does not answer"));
                    }
                    open.give_sign_if_due(now);
                }
            }
        }
    }

    fn begin_end(&mut self, end: SessionEnd) {
        self.ending =
            Some(SessionEnding { end, until: self.clock.now() + self.dialer.limits.request });
    }

    /// If the pool is closed.
    fn send_end(&self, open: &mut OpenExchange) {
        let Some(SessionEnding { end, until }) = &self.ending else { return };
        let last = match end {
            SessionEnd::Session => &[NodeOperation::CloseSession][..],
            SessionEnd::Nodes(deletes) => deletes,
        };
        open.send(last, oneshot::channel().0, self.clock.now());
        open.closing = Some(*until);
    }

    fn take_over(&mut self, open: &mut OpenExchange, request: SessionRequest) {
        let now = self.clock.now();
        match request {
            SessionRequest::Group { incarnation, operations, reply } => {
                // A delete is sent even if nothing waits for its answer any longer.
                let ends_nodes =
                    operations.iter().any(|it| matches!(it, NodeOperation::Delete { .. }));
                if incarnation != self.incarnation.load(Ordering::SeqCst) {
                    drop(reply.send(Err(expired())));
                } else if !reply.is_closed() || ends_nodes {
                    open.send(&operations, reply, now);
                }
            }
            SessionRequest::Close(end) => {
                self.begin_end(end);
                self.send_end(open);
            }
        }
    }

    fn on_frame(&mut self, open: &mut OpenExchange, frame: &[u8]) -> Result<(), BackendError> {
        let mut reader = JuteReader::new(frame);
        let form = |MalformedRecord| malformed();
        let header = AnswerHeader::read(&mut reader).map_err(form)?;
        match header.xid {
            EVENT_XID => {
                if let Some(event) = NodeEvent::read(&mut reader).map_err(form)? {
                    self.sink.node_changed(&event);
                }
            }
            AUTH_XID => ServerCode::check(header.code).map_err(failure)?,
            _ => open.exchange.on_answer(header, &mut reader)?,
        }
        self.identity.last_zxid = self.identity.last_zxid.max(header.zxid);
        Ok(())
    }
}

/// The server's position, its connection, and its offer.
type Offered = (usize, (Box<dyn ServerStream>, SessionOffer));

async fn open_after(
    pause: Duration,
    dialer: Arc<EnsembleDialer>,
    clock: Clock,
    server: usize,
    identity: SessionIdentity,
    asked: Duration,
    limit: Duration,
) -> Result<Offered, BackendError> {
    if !pause.is_zero() {
        sleep(pause).await;
    }
    let open = |server, limit| dialer.open(server, &identity, asked, limit);
    let opened = if identity.is_new() {
        // A session that another server has opened meanwhile ends by its timeout, and has no nodes.
        first_to_serve((server, dialer.servers.count()), limit, clock, open).await
    } else {
        // At one server at a time: the session moves to the last one that is asked.
        open(server, limit).await.map(|offered| (server, offered)).map_err(|failure| failure.error)
    };
    opened.map_err(BackendError::before_sending)
}
