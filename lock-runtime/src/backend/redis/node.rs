//! One connection to one server, kept up.
//!
//! Requests fail at once while it is down: whoever waits for a lock knows better how long to. A request
//! that is given up stays on the connection and may still be served; a connection on which nothing is
//! answered any more is replaced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, Pipeline, ProtocolVersion, PushInfo, RedisError, Value};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

use super::ears::Ears;
use super::line::Channel;
use super::reply;
use super::resolver::Resolver;
use super::stream::Dialer;
use crate::backend::{BackendError, Failure};
use crate::clock::{Clock, Instant};
use crate::jitter;

/// More requests than this are not left behind unanswered on one connection.
const MAX_UNANSWERED: usize = 10_000;

pub(super) struct Node {
    shared: Arc<Shared>,
    keeper: AbortHandle,
}

struct Shared {
    resolver: Resolver,
    dialled: Mutex<Option<Dialer>>,
    clock: Clock,
    /// How long a connection may take to come up, and how long it may be silent.
    patience: Duration,
    /// Not there on a connection that is told nothing.
    listener: Option<Listener>,
    line: Mutex<Line>,
}

struct Listener {
    /// Where the server's own messages go, and the channel on which this pool can be told.
    ears: Arc<Ears>,
    channel: Channel,
    /// Finds out whether this user may do what the line of a lock needs.
    probe: Cmd,
}

enum Line {
    Up(Connection),
    Down(BackendError),
}

struct Connection {
    requests: MultiplexedConnection,
    /// The task that moves its bytes. Without it every request fails at once.
    mover: AbortHandle,
    silence: Silence,
    hears: Hears,
}

impl Connection {
    fn new(
        requests: MultiplexedConnection,
        mover: AbortOnDrop,
        hears: Hears,
    ) -> (Self, AbortOnDrop) {
        let handle = mover.0.abort_handle();
        (Self { requests, mover: handle, silence: Silence::default(), hears }, mover)
    }
}

/// What this user is told on this connection without asking.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hears {
    /// Changes of the keys that were read behind `CLIENT CACHING YES`.
    pub(super) changes: bool,
    /// Its own channel; and all commands of the line are allowed.
    pub(super) calls: bool,
}

/// Requests that were given up since the connection last answered one.
#[derive(Default)]
struct Silence {
    since: Option<Instant>,
    unanswered: usize,
}

impl Node {
    pub(super) async fn connect(
        resolver: impl Into<Resolver>,
        clock: Clock,
        patience: Duration,
        ears: Arc<Ears>,
        channel: Channel,
        probe: Cmd,
    ) -> Result<Self, BackendError> {
        let listener = Some(Listener { ears, channel, probe });
        Self::start(resolver.into(), clock, patience, listener).await
    }

    /// A connection for requests alone.
    pub(super) async fn connect_deaf(
        resolver: impl Into<Resolver>,
        clock: Clock,
        patience: Duration,
    ) -> Result<Self, BackendError> {
        Self::start(resolver.into(), clock, patience, None).await
    }

    async fn start(
        resolver: Resolver,
        clock: Clock,
        patience: Duration,
        listener: Option<Listener>,
    ) -> Result<Self, BackendError> {
        let dialled = Mutex::new(None);
        let nothing_yet = BackendError::new(Failure::NotNow, "not connected yet");
        let line = Mutex::new(Line::Down(nothing_yet));
        let shared = Arc::new(Shared { resolver, dialled, clock, patience, listener, line });
        let opened = shared.open().await?;
        let link = shared.put_up(opened);
        let keeper = tokio::spawn(shared.clone().keep(link)).abort_handle();
        Ok(Self { shared, keeper })
    }

    pub(super) fn hears(&self) -> Hears {
        match &*self.shared.line() {
            Line::Up(connection) => connection.hears,
            Line::Down(_) => Hears::default(),
        }
    }

    /// Sends one command.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, BackendError> {
        self.try_send(command).await?.map_err(|error| self.failure(error))
    }

    /// Sends one command whose refusal the caller looks at.
    pub(super) async fn try_send(
        &self,
        command: &Cmd,
    ) -> Result<Result<Value, RedisError>, BackendError> {
        let answer =
            self.ask(async |connection| connection.req_packed_command(command).await).await?;
        Ok(answer.and_then(Value::extract_error))
    }

    /// Sends several commands in one write. One answer per command, in order.
    pub(super) async fn send_all(
        &self,
        commands: &Pipeline,
    ) -> Result<Vec<Result<Value, RedisError>>, BackendError> {
        let count = commands.len();
        let answer = self
            .ask(async |connection| connection.req_packed_commands(commands, 0, count).await)
            .await?;
        let values = answer.map_err(|error| self.failure(error))?;
        Ok(values.into_iter().map(Value::extract_error).collect())
    }

    pub(super) fn failure(&self, error: RedisError) -> BackendError {
        let is_replica = reply::is_of_a_replica(&error);
        let failure = reply::failure(&self.shared.server(), error);
        if is_replica {
            self.shared.give_up_a_replica(&failure);
        }
        failure
    }

    /// Where it is connected to, or was, for messages.
    pub(super) fn server(&self) -> String {
        self.shared.server()
    }

    /// The failure that a script tells of as a value.
    pub(super) fn refusal(&self, text: &str) -> BackendError {
        let failure = reply::told(&self.shared.server(), text);
        if reply::tells_of_a_replica(text) {
            self.shared.give_up_a_replica(&failure);
        }
        failure
    }

    async fn ask<T>(
        &self,
        request: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<Result<T, RedisError>, BackendError> {
        let mut connection = self.shared.connection()?;
        let mut pending =
            Pending { shared: &self.shared, sent: self.shared.clock.now(), answered: false };
        let answer = request(&mut connection).await;
        pending.answered = true;
        Ok(answer)
    }

    pub(super) fn close(&self) {
        self.keeper.abort();
        self.shared.resolver.close();
        let message = format!("the connection to Redis at {} is closed", self.shared.server());
        *self.shared.line() = Line::Down(BackendError::new(Failure::Refused, message));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// A request on its way. Dropped without an answer it was given up.
struct Pending<'a> {
    shared: &'a Shared,
    sent: Instant,
    answered: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.answered {
            self.shared.note_answer(self.sent);
        } else {
            self.shared.note_silence(self.sent);
        }
    }
}

impl Shared {
    fn connection(&self) -> Result<MultiplexedConnection, BackendError> {
        let mut line = self.line();
        self.give_up_if_silent(&mut line);
        match &*line {
            Line::Up(connection) => Ok(connection.requests.clone()),
            Line::Down(error) => Err(error.clone()),
        }
    }

    /// Answers come in the order of the requests: one for a request sent at `sent` vouches for all
    /// that were sent before.
    fn note_answer(&self, sent: Instant) {
        if let Line::Up(Connection { silence, .. }) = &mut *self.line()
            && silence.since.is_some_and(|since| since <= sent)
        {
            *silence = Silence::default();
        }
    }

    fn note_silence(&self, sent: Instant) {
        let mut line = self.line();
        if let Line::Up(Connection { silence, .. }) = &mut *line {
            silence.since.get_or_insert(sent);
            silence.unanswered += 1;
        }
        self.give_up_if_silent(&mut line);
    }

    /// Ends a connection that answers nothing any more, with all that is left on it; the keeper then
    /// makes another.
    fn give_up_if_silent(&self, line: &mut Line) {
        if let Line::Up(Connection { silence, mover, .. }) = line
            && silence.is_too_long(self.clock.now(), self.patience)
        {
            mover.abort();
            *line = Line::Down(self.silent());
        }
    }

    /// Ends the connection to a server that is not the master any more, where there is a way to find the
    /// one that is.
    fn give_up_a_replica(&self, failure: &BackendError) {
        let mut line = self.line();
        if let Line::Up(Connection { mover, .. }) = &*line
            && self.resolver.finds_masters()
        {
            mover.abort();
            *line = Line::Down(failure.clone());
        }
    }

    /// Keeps the connection up for the life of the node, beginning with `link`.
    async fn keep(self: Arc<Self>, mut link: Link) {
        loop {
            let why = tokio::select! {
                biased;
                // A master that has been put down in good order goes on saying OK for seconds.
                () = self.resolver.moved(link.dialer.endpoint()) => self.moved(),
                _ = &mut link.mover.0 => self.lost(),
            };
            link.mover.0.abort();
            {
                let mut line = self.line();
                if let Line::Up(_) = &*line {
                    *line = Line::Down(why);
                }
            }
            link = self.reconnect().await;
        }
    }

    async fn reconnect(&self) -> Link {
        let mut pause = Duration::from_millis(5);
        loop {
            tokio::select! {
                () = tokio::time::sleep(jitter::below(pause)) => {}
                () = self.moved_on() => {}
            }
            match self.open().await {
                Ok(opened) => {
                    let link = self.put_up(opened);
                    if let Some(Listener { ears, .. }) = &self.listener {
                        ears.has_missed_something();
                    }
                    return link;
                }
                Err(error) => *self.line() = Line::Down(error),
            }
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    /// Returns when it is of no use any more to dial the same server again.
    async fn moved_on(&self) {
        match self.dialled() {
            Some(dialer) => self.resolver.moved(dialer.endpoint()).await,
            None => std::future::pending().await,
        }
    }

    fn put_up(&self, (connection, link): (Connection, Link)) -> Link {
        *self.line() = Line::Up(connection);
        link
    }

    async fn open(&self) -> Result<(Connection, Link), BackendError> {
        let silence = || {
            let (server, patience) = (self.server(), self.patience);
            let message = format!("Redis at {server} did not answer within {patience:?}");
            BackendError::new(Failure::NotNow, message)
                .remedy("check that the server is up and reachable, and that the port speaks Redis, with TLS for `rediss://` and without for `redis://`")
        };
        let opened = async {
            let last = self.dialled();
            let dialer = self.resolver.resolve(last.as_ref().map(Dialer::endpoint)).await?;
            *self.dialled.lock().unwrap_or_else(PoisonError::into_inner) = Some(dialer.clone());
            let (connection, mover) = tokio::select! {
                connected = self.log_in(&dialer) => connected?,
                () = self.resolver.moved(dialer.endpoint()) => return Err(self.moved()),
            };
            Ok((connection, Link { mover, dialer }))
        };
        timeout(self.patience, opened).await.unwrap_or_else(|_| Err(silence()))
    }

    async fn log_in(&self, dialer: &Dialer) -> Result<(Connection, AbortOnDrop), BackendError> {
        let login = dialer.endpoint().login.clone();
        let hear = self.listener.as_ref().map(|Listener { ears, .. }| {
            let ears = ears.clone();
            move |push: PushInfo| ears.hear(&push)
        });
        let (mut requests, mover) = match speak(dialer, &login, hear).await? {
            Ok(connected) => connected,
            // Older servers and some proxies know RESP2 only, which serves as well.
            Err(error) if knows_no_hello(&error) => {
                let login = login.set_protocol(ProtocolVersion::RESP2);
                let (mut requests, mover) = speak(dialer, &login, None::<fn(PushInfo)>)
                    .await?
                    .map_err(|error| refused(dialer, error))?;
                self.resolver.confirm(dialer, &mut requests).await?;
                return Ok(Connection::new(requests, mover, Hears::default()));
            }
            Err(error) => return Err(refused(dialer, error)),
        };
        self.resolver.confirm(dialer, &mut requests).await?;
        let hears = match &self.listener {
            Some(listener) => listener.listen(&mut requests).await,
            None => Hears::default(),
        };
        Ok(Connection::new(requests, mover, hears))
    }

    fn lost(&self) -> BackendError {
        let message = format!("the connection to Redis at {} is lost", self.server());
        BackendError::new(Failure::NotNow, message).remedy(
            "check that the server is up and reachable; the connection comes back by itself",
        )
    }

    fn silent(&self) -> BackendError {
        let message = format!("Redis at {} does not answer any more", self.server());
        BackendError::new(Failure::NotNow, message).remedy(
            "check that the server is up and reachable; the connection is replaced by itself",
        )
    }

    fn moved(&self) -> BackendError {
        let message = format!("Redis at {} is not the master any more", self.server());
        BackendError::new(Failure::NotNow, message)
            .remedy("nothing has to be done: the connection goes to the new master by itself")
    }

    /// What is or was dialled, for messages.
    fn server(&self) -> String {
        match self.dialled() {
            Some(dialer) => dialer.endpoint().to_string(),
            None => self.resolver.to_string(),
        }
    }

    fn dialled(&self) -> Option<Dialer> {
        self.dialled.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Listener {
    /// Asks to be told of changes and calls. A user who may not, waits by asking.
    async fn listen(&self, connection: &mut MultiplexedConnection) -> Hears {
        let mut track = redis::cmd("CLIENT");
        // Only what is read behind `CLIENT CACHING YES`, and not what is changed on this connection.
        track.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
        let changes: Result<Value, _> = track.query_async(connection).await;
        let subscribed = connection.subscribe(self.channel.name()).await;
        let subscribed_to = subscribed.is_ok();
        let heard: Result<u64, _> = match subscribed {
            Ok(()) => self.probe.query_async(connection).await,
            Err(error) => Err(error),
        };
        let calls = match heard {
            // More than one: the server may not have noticed yet that an earlier connection is gone.
            Ok(ears) => ears >= 1,
            // Passes by itself; the claims will tell.
            Err(error) => subscribed_to && reply::passes(&error),
        };
        Hears { changes: changes.is_ok(), calls }
    }
}

impl Silence {
    fn is_too_long(&self, now: Instant, patience: Duration) -> bool {
        self.unanswered > MAX_UNANSWERED
            || self.since.is_some_and(|since| now.since(since) >= patience)
    }
}

/// The bytes of one connection, and where they go.
struct Link {
    mover: AbortOnDrop,
    dialer: Dialer,
}

/// Dials and greets. The inner error is the server's answer to the greeting; pushes need RESP3.
pub(super) async fn speak(
    dialer: &Dialer,
    login: &redis::RedisConnectionInfo,
    hear: Option<impl Fn(PushInfo) + Send + Sync + 'static>,
) -> Result<Result<(MultiplexedConnection, AbortOnDrop), RedisError>, BackendError> {
    let stream = dialer.dial().await?;
    // Time limits are those of the requests' makers; the library's own would only add timers.
    let mut config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    if let Some(hear) = hear {
        config = config.set_push_sender(move |push: PushInfo| {
            hear(push);
            Ok::<(), &'static str>(())
        });
    }
    let opened = MultiplexedConnection::new_with_config(login, stream, config).await;
    Ok(opened.map(|(connection, mover)| (connection, AbortOnDrop(tokio::spawn(mover)))))
}

pub(super) struct AbortOnDrop(pub(super) JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) fn knows_no_hello(error: &RedisError) -> bool {
    let unknown = |detail: &str| detail.contains("unknown command");
    error.kind() == redis::ErrorKind::RESP3NotSupported || error.detail().is_some_and(unknown)
}

fn refused(dialer: &Dialer, error: RedisError) -> BackendError {
    let failure = reply::failure(&dialer.endpoint().to_string(), error);
    // Nothing but the greeting has been sent yet.
    failure.before_sending()
}
