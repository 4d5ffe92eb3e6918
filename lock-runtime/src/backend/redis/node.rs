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
use super::spare::Spare;
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
    dialer: Dialer,
    clock: Clock,
    /// How long a connection may take to come up, and how long it may be silent.
    patience: Duration,
    /// Where the server's own messages go, and the channel on which this pool can be told.
    ears: Arc<Ears>,
    channel: Channel,
    /// Finds out whether this user may do what the line of a lock needs. Without it nobody is called.
    probe: Option<Cmd>,
    line: Mutex<Line>,
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
    dialect: Dialect,
}

/// How much of the protocol the other end speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    Full,
    /// RESP2 without pushes.
    Plain,
    /// As plain, and it hangs up on a command that it does not know.
    Touchy,
}

impl Connection {
    fn new(
        requests: MultiplexedConnection,
        mover: AbortOnDrop,
        hears: Hears,
        dialect: Dialect,
    ) -> (Self, AbortOnDrop) {
        let handle = mover.0.abort_handle();
        (Self { requests, mover: handle, silence: Silence::default(), hears, dialect }, mover)
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
        dialer: Dialer,
        clock: Clock,
        patience: Duration,
        ears: Arc<Ears>,
        channel: Channel,
        probe: Option<Cmd>,
    ) -> Result<Self, BackendError> {
        let nothing_yet = BackendError::new(Failure::NotNow, "not connected yet");
        let line = Mutex::new(Line::Down(nothing_yet));
        let shared = Arc::new(Shared { dialer, clock, patience, ears, channel, probe, line });
        let (connection, mover) = shared.open().await?;
        *shared.line() = Line::Up(connection);
        let keeper = tokio::spawn(shared.clone().keep(mover)).abort_handle();
        Ok(Self { shared, keeper })
    }

    pub(super) fn hears(&self) -> Hears {
        match &*self.shared.line() {
            Line::Up(connection) => connection.hears,
            Line::Down(_) => Hears::default(),
        }
    }

    /// Whether this is a proxy that hangs up on what it does not know.
    pub(super) fn is_touchy(&self) -> bool {
        matches!(&*self.shared.line(), Line::Up(connection) if connection.dialect == Dialect::Touchy)
    }

    /// Another connection to the same server, for what cannot share one.
    pub(super) async fn another(&self) -> Result<Spare, BackendError> {
        let (requests, mover) = self.shared.within_patience(self.shared.log_in_plainly()).await?;
        Ok(Spare::new(requests, mover))
    }

    pub(super) fn server(&self) -> &impl std::fmt::Display {
        self.shared.dialer.endpoint()
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
        reply::failure(&self.shared.dialer.endpoint().to_string(), error)
    }

    /// The failure that a script tells of as a value.
    pub(super) fn refusal(&self, text: &str) -> BackendError {
        reply::told(&self.shared.dialer.endpoint().to_string(), text)
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
        let message =
            format!("the connection to Redis at {} is closed", self.shared.dialer.endpoint());
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

    /// Keeps the connection up for the life of the node, beginning with the one that `mover` moves.
    async fn keep(self: Arc<Self>, mut mover: AbortOnDrop) {
        loop {
            let _ = (&mut mover.0).await;
            {
                let mut line = self.line();
                if let Line::Up(_) = &*line {
                    *line = Line::Down(self.lost());
                }
            }
            mover = self.reconnect().await;
        }
    }

    async fn reconnect(&self) -> AbortOnDrop {
        let mut pause = Duration::from_millis(5);
        loop {
            tokio::time::sleep(jitter::below(pause)).await;
            match self.open().await {
                Ok((connection, mover)) => {
                    *self.line() = Line::Up(connection);
                    self.ears.has_missed_something();
                    return mover;
                }
                Err(error) => *self.line() = Line::Down(error),
            }
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    async fn open(&self) -> Result<(Connection, AbortOnDrop), BackendError> {
        self.within_patience(self.log_in()).await
    }

    async fn within_patience<T>(
        &self,
        login: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let silence = || {
            let (endpoint, patience) = (self.dialer.endpoint(), self.patience);
            let message = format!("Redis at {endpoint} did not answer within {patience:?}");
            BackendError::new(Failure::NotNow, message)
                .remedy("check that the server is up and reachable, and that the port speaks Redis, with TLS for `rediss://` and without for `redis://`")
        };
        timeout(self.patience, login).await.unwrap_or_else(|_| Err(silence()))
    }

    async fn log_in(&self) -> Result<(Connection, AbortOnDrop), BackendError> {
        if let Login::Done(connection, mover) = self.log_in_fully().await? {
            return Ok((connection, mover));
        }
        // Some proxies hang up on what they do not know. But so does a server that is going down, and one that
        // comes back is not to be spoken to plainly ever after.
        let (requests, plain) = self.log_in_plainly().await?;
        Ok(match self.log_in_fully().await? {
            Login::Done(connection, mover) => (connection, mover),
            Login::HungUp => Connection::new(requests, plain, Hears::default(), Dialect::Touchy),
        })
    }

    async fn log_in_fully(&self) -> Result<Login, BackendError> {
        let login = self.dialer.endpoint().login.clone();
        let (mut requests, mover) = match self.speak(&login, true).await? {
            Ok(connected) => connected,
            Err(error) if reply::is_hang_up(&error) => return Ok(Login::HungUp),
            // Older servers and some proxies know RESP2 only, which serves as well.
            Err(error) if knows_no_hello(&error) => {
                let (requests, mover) = self.log_in_plainly().await?;
                let (hears, dialect) = (Hears::default(), Dialect::Plain);
                let (connection, mover) = Connection::new(requests, mover, hears, dialect);
                return Ok(Login::Done(connection, mover));
            }
            Err(error) => return Err(refused(&self.dialer, error)),
        };
        let Some(hears) = self.listen(&mut requests).await else { return Ok(Login::HungUp) };
        let (connection, mover) = Connection::new(requests, mover, hears, Dialect::Full);
        Ok(Login::Done(connection, mover))
    }

    /// With nothing that a proxy could stumble over.
    async fn log_in_plainly(&self) -> Result<(MultiplexedConnection, AbortOnDrop), BackendError> {
        let login = &self.dialer.endpoint().login;
        let refused = |error| refused(&self.dialer, error);
        let nobody = redis::RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP2)
            .set_skip_set_lib_name();
        let (mut requests, mover) = self.speak(&nobody, false).await?.map_err(refused)?;
        // By hand, as the library does not tell why a password is refused.
        let mut ask =
            async |command: &Cmd| requests.req_packed_command(command).await?.extract_error();
        if let Some(password) = login.password() {
            let mut auth = redis::cmd("AUTH");
            auth.arg(login.username()).arg(password);
            ask(&auth).await.map_err(refused)?;
        }
        if login.db() != 0 {
            ask(redis::cmd("SELECT").arg(login.db())).await.map_err(refused)?;
        }
        // Without a password nothing has been said yet. A refusal is an answer too.
        match ask(&redis::cmd("PING")).await {
            Err(error) if error.code().is_none() => Err(refused(error)),
            Ok(_) | Err(_) => Ok((requests, mover)),
        }
    }

    /// Asks to be told of changes and calls. A user who may not, waits by asking. `None` if the other end has
    /// hung up over it.
    async fn listen(&self, connection: &mut MultiplexedConnection) -> Option<Hears> {
        let mut track = redis::cmd("CLIENT");
        // Only what is read behind `CLIENT CACHING YES`, and not what is changed on this connection.
        track.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
        let changes: Result<Value, _> = track.query_async(connection).await;
        if changes.as_ref().is_err_and(reply::is_hang_up) {
            return None;
        }
        let changes = changes.is_ok();
        let Some(probe) = &self.probe else { return Some(Hears { changes, calls: false }) };
        let subscribed = connection.subscribe(self.channel.name()).await;
        let subscribed_to = subscribed.is_ok();
        let heard: Result<u64, _> = match subscribed {
            Ok(()) => probe.query_async(connection).await,
            Err(error) => Err(error),
        };
        let calls = match heard {
            // More than one: the server may not have noticed yet that an earlier connection is gone.
            Ok(ears) => ears >= 1,
            Err(error) if reply::is_hang_up(&error) => return None,
            // Passes by itself; the claims will tell.
            Err(error) => subscribed_to && reply::passes(&error),
        };
        Some(Hears { changes, calls })
    }

    async fn speak(
        &self,
        login: &redis::RedisConnectionInfo,
        with_pushes: bool,
    ) -> Result<Result<(MultiplexedConnection, AbortOnDrop), RedisError>, BackendError> {
        let stream = self.dialer.dial().await?;
        // Time limits are those of the requests' makers; the library's own would only add timers.
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_pipeline_buffer_size(1024);
        if with_pushes {
            let ears = self.ears.clone();
            config = config.set_push_sender(move |push: PushInfo| {
                ears.hear(&push);
                Ok::<(), &'static str>(())
            });
        }
        let opened = MultiplexedConnection::new_with_config(login, stream, config).await;
        Ok(opened.map(|(connection, mover)| (connection, AbortOnDrop(tokio::spawn(mover)))))
    }

    fn lost(&self) -> BackendError {
        let message = format!("the connection to Redis at {} is lost", self.dialer.endpoint());
        BackendError::new(Failure::NotNow, message).remedy(
            "check that the server is up and reachable; the connection comes back by itself",
        )
    }

    fn silent(&self) -> BackendError {
        let message = format!("Redis at {} does not answer any more", self.dialer.endpoint());
        BackendError::new(Failure::NotNow, message).remedy(
            "check that the server is up and reachable; the connection is replaced by itself",
        )
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Silence {
    fn is_too_long(&self, now: Instant, patience: Duration) -> bool {
        self.unanswered > MAX_UNANSWERED
            || self.since.is_some_and(|since| now.since(since) >= patience)
    }
}

/// What came of the full greeting.
enum Login {
    Done(Connection, AbortOnDrop),
    HungUp,
}

#[derive(Debug)]
pub(super) struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn knows_no_hello(error: &RedisError) -> bool {
    let unknown = |detail: &str| detail.contains("unknown command");
    error.kind() == redis::ErrorKind::RESP3NotSupported || error.detail().is_some_and(unknown)
}

fn refused(dialer: &Dialer, error: RedisError) -> BackendError {
    let failure = reply::failure(&dialer.endpoint().to_string(), error);
    // Nothing but the greeting has been sent yet.
    failure.before_sending()
}
