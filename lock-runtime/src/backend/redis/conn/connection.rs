//! One connection to one server, kept up.
//!
//! Requests fail at once while it is down: whoever waits for a lock knows better how long to. A request
//! that is given up stays on the connection and may still be served; a connection on which nothing is
//! answered any more is replaced.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::Limits;
use crate::backend::redis::conn::backoff::Backoff;
use crate::backend::redis::conn::dedicated::Spare;
use crate::backend::redis::discovery::target::Resolver;
use crate::backend::redis::net::handshake::{
    Dialect, Greeted, HangUp, Hearing, Hears, Meant, Progress, log_in, log_in_plainly,
};
use crate::backend::redis::net::io_task::{Bytes, Mover};
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::script::By;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, FailureKind, Warning};
use crate::base::clock::{Clock, Instant};

/// More requests than this are not left behind unanswered on one connection.
const MAX_UNANSWERED: usize = 10_000;

pub(crate) struct Node {
    shared: Arc<Shared>,
    keeper: AbortHandle,
}

struct Shared {
    resolver: Resolver,
    past: Mutex<Past>,
    clock: Clock,
    limits: Limits,
    /// Not there on a connection that is told nothing.
    hearing: Option<Hearing>,
    line: Mutex<Line>,
    /// When the request was sent that was answered last, in the clock's nanoseconds.
    answered: AtomicU64,
}

/// What earlier connections have shown.
#[derive(Default)]
struct Past {
    dialled: Option<Dialer>,
    /// What the last server has answered that was a replica; until there is a master.
    replica: Option<BackendError>,
    /// That of the last connection that came up.
    dialect: Option<Dialect>,
    /// How long the last one took to come up.
    took: Option<Duration>,
    /// Attempts since a connection was up.
    failures: u32,
}

impl Past {
    /// A server that has understood the greeting is not looked at as a proxy each time that it hangs up, but now and
    /// then: another one may be at the address.
    fn hang_up(&self) -> HangUp {
        const NOW_AND_THEN: u32 = 8;
        match self.dialect {
            Some(Dialect::Full | Dialect::Plain) if self.failures % NOW_AND_THEN != 7 => {
                HangUp::IsAFailure
            }
            _ => HangUp::MayBeAProxy,
        }
    }

    /// How long the next attempt may take. Several times what one took before, as what hangs is better dialled anew;
    /// twice as long after each that failed, as the link may have become slower.
    fn limit(&self, limits: Limits) -> Duration {
        let Some(took) = self.took else { return limits.connect };
        let usual = took.saturating_mul(4).max(limits.request);
        usual.saturating_mul(1 << self.failures.min(16)).min(limits.connect)
    }
}

enum Line {
    Up(Connection),
    Down(BackendError),
}

struct Connection {
    requests: MultiplexedConnection,
    bytes: Arc<Bytes>,
    up_since: Instant,
    silence: Silence,
    hears: Hears,
    dialect: Dialect,
}

impl Connection {
    fn new(greeted: Greeted, up_since: Instant) -> (Self, Mover) {
        let Greeted { requests, mover, hears, dialect } = greeted;
        let (bytes, silence) = (mover.bytes(), Silence::default());
        (Self { requests, bytes, up_since, silence, hears, dialect }, mover)
    }
}

/// What goes to the server in front of each command. It forgets one for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    Nothing,
    /// Arms a push for the keys that the command reads.
    Caching,
    /// Has it served by the server that the keys' slot is on the way to.
    Asking,
}

/// Requests that were given up since the connection last answered one.
#[derive(Default)]
struct Silence {
    since: Option<Instant>,
    unanswered: usize,
    /// When the last answer came, to whichever request. A connection on which answers come is slow, not silent.
    answered_at: Option<Instant>,
}

impl Node {
    /// Connects. A connection that comes up is kept up from then on.
    pub(crate) async fn connect(
        resolver: impl Into<Resolver>,
        clock: Clock,
        limits: Limits,
        hearing: Hearing,
    ) -> Result<Self, BackendError> {
        let (node, opened) = Self::begin(resolver, clock, limits, Some(hearing)).await;
        opened.map(|()| node)
    }

    /// A connection for requests alone.
    pub(crate) async fn connect_deaf(
        resolver: impl Into<Resolver>,
        clock: Clock,
        limits: Limits,
    ) -> Result<Self, BackendError> {
        let (node, opened) = Self::begin(resolver, clock, limits, None).await;
        opened.map(|()| node)
    }

    /// Connects, and goes on trying if that fails. The second is how the first try went.
    pub(crate) async fn begin(
        resolver: impl Into<Resolver>,
        clock: Clock,
        limits: Limits,
        hearing: Option<Hearing>,
    ) -> (Self, Result<(), BackendError>) {
        let resolver = resolver.into();
        let (past, answered) = (Mutex::default(), AtomicU64::new(0));
        let nothing_yet = BackendError::new(FailureKind::NotApplied, "not connected yet");
        let line = Mutex::new(Line::Down(nothing_yet));
        let shared = Arc::new(Shared { resolver, past, clock, limits, hearing, line, answered });
        let (link, opened) = match shared.open().await {
            Ok(opened) => (Some(shared.put_up(opened)), Ok(())),
            Err(error) => {
                shared.note_failure(error.clone());
                (None, Err(error))
            }
        };
        let keeper = tokio::spawn(shared.clone().keep(link)).abort_handle();
        (Self { shared, keeper }, opened)
    }

    pub(crate) fn hears(&self) -> Hears {
        match &*self.shared.line() {
            Line::Up(connection) => connection.hears,
            Line::Down(_) => Hears::default(),
        }
    }

    /// Whether this is a proxy that hangs up on what it does not know.
    pub(crate) fn is_touchy(&self) -> bool {
        matches!(&*self.shared.line(), Line::Up(connection) if connection.dialect == Dialect::Touchy)
    }

    /// Another connection to the same server, for what cannot share one.
    pub(crate) async fn another(&self) -> Result<Spare, BackendError> {
        let shared = &self.shared;
        let Some(dialer) = shared.dialled() else {
            return Err(BackendError::new(FailureKind::NotApplied, "not connected yet"));
        };
        let (progress, limit) = (Progress::default(), shared.limits.connect);
        let opened = timeout(limit, log_in_plainly(&dialer, &progress)).await;
        let (requests, mover) =
            opened.unwrap_or_else(|_| Err(progress.too_slow(&shared.server(), limit)))?;
        Ok(Spare::new(requests, mover))
    }

    /// Sends one command.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, BackendError> {
        self.try_send(command).await?.map_err(|error| self.failure(error))
    }

    /// Sends one command whose refusal the caller looks at.
    pub(crate) async fn try_send(
        &self,
        command: &Cmd,
    ) -> Result<Result<Value, RedisError>, BackendError> {
        let answer =
            self.ask(async |connection| connection.req_packed_command(command).await).await?;
        Ok(answer.and_then(Value::extract_error))
    }

    /// Sends several commands in one write. One answer per command, in order.
    pub(crate) async fn send_all(
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

    /// Sends `count` commands in one write: scripts by their hash, and once more by their text those that the
    /// server does not know.
    pub(crate) async fn run(
        &self,
        count: usize,
        ahead: Ahead,
        command: impl Fn(usize, By) -> Cmd + Send + Sync,
    ) -> Vec<Result<Value, BackendError>> {
        let every = 1 + usize::from(ahead != Ahead::Nothing);
        let build = |by: By, places: &[usize]| {
            let mut all = Pipeline::with_capacity(places.len() * every);
            for &at in places {
                match ahead {
                    Ahead::Nothing => {}
                    Ahead::Caching => {
                        let mut caching = redis::cmd("CLIENT");
                        caching.arg("CACHING").arg("YES");
                        all.add_command(caching);
                    }
                    Ahead::Asking => {
                        all.add_command(redis::cmd("ASKING"));
                    }
                }
                all.add_command(command(at, by));
            }
            all
        };
        let places: Vec<_> = (0..count).collect();
        let sent = self.send_all(&build(By::Hash, &places)).await;
        let mut answers: Vec<_> = match sent {
            Ok(answers) => answers.into_iter().skip(every - 1).step_by(every).collect(),
            Err(error) => return (0..count).map(|_| Err(error.clone())).collect(),
        };
        let is_unknown = |answer: &Result<Value, RedisError>| matches!(answer, Err(error) if server_error::is_unknown_script(error));
        let unknown: Vec<_> = (0..answers.len()).filter(|&at| is_unknown(&answers[at])).collect();
        if !unknown.is_empty() {
            match self.send_all(&build(By::Text, &unknown)).await {
                Ok(texts) => {
                    let texts = texts.into_iter().skip(every - 1).step_by(every);
                    for (at, answer) in unknown.into_iter().zip(texts) {
                        answers[at] = answer;
                    }
                }
                Err(error) => {
                    let failure = |answer: Result<Value, RedisError>| {
                        if is_unknown(&answer) {
                            return Err(error.clone());
                        }
                        answer.map_err(|error| self.failure(error))
                    };
                    return answers.into_iter().map(failure).collect();
                }
            }
        }
        answers.into_iter().map(|answer| answer.map_err(|error| self.failure(error))).collect()
    }

    pub(crate) fn failure(&self, error: RedisError) -> BackendError {
        let (is_replica, is_loading) =
            (server_error::is_of_a_replica(&error), server_error::is_loading(&error));
        let failure = server_error::failure(&self.shared.server(), error);
        if is_replica || (is_loading && self.shared.has_served()) {
            self.shared.give_up_a_replica(&failure);
        }
        failure
    }

    /// Where it is connected to, or was, for messages.
    pub(crate) fn server(&self) -> String {
        self.shared.server()
    }

    /// What is wrong with its connection although it works.
    pub(crate) fn warning(&self) -> Option<Warning> {
        self.shared.resolver.warning()
    }

    /// The failure that a script tells of as a value.
    pub(crate) fn refusal(&self, text: &str) -> BackendError {
        let failure = server_error::told(&self.shared.server(), text);
        if server_error::tells_of_a_replica(text) {
            self.shared.give_up_a_replica(&failure);
        }
        failure
    }

    /// Whether it is asked where the master is before it is connected to.
    pub(crate) fn finds_masters(&self) -> bool {
        matches!(self.shared.resolver, Resolver::Sentinels(_))
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(&*self.shared.line(), Line::Up(_))
    }

    async fn ask<T>(
        &self,
        request: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<Result<T, RedisError>, BackendError> {
        let (mut connection, bytes) = self.shared.connection()?;
        let mut pending =
            Pending { shared: &self.shared, sent: self.shared.clock.now(), answered: false };
        let answer = bytes.carry(request(&mut connection)).await;
        pending.answered = true;
        if !answer.as_ref().is_err_and(server_error::is_hang_up) {
            self.shared.answered.store(pending.sent.as_nanos(), Ordering::Relaxed);
        }
        Ok(answer)
    }

    pub(crate) fn close(&self) {
        self.keeper.abort();
        self.shared.resolver.close();
        let message = format!("the connection to Redis at {} is closed", self.shared.server());
        *self.shared.line() = Line::Down(BackendError::new(FailureKind::Rejected, message));
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
    fn connection(&self) -> Result<(MultiplexedConnection, Arc<Bytes>), BackendError> {
        match &*self.give_up_if_silent(self.line()) {
            Line::Up(connection) => Ok((connection.requests.clone(), connection.bytes.clone())),
            Line::Down(error) => Err(error.clone()),
        }
    }

    /// Answers come in the order of the requests: one for a request sent at `sent` vouches for all
    /// that were sent before.
    fn note_answer(&self, sent: Instant) {
        if let Line::Up(Connection { silence, .. }) = &mut *self.line() {
            if silence.since.is_some_and(|since| since <= sent) {
                *silence = Silence::default();
            }
            silence.answered_at = Some(self.clock.now());
        }
    }

    fn note_silence(&self, sent: Instant) {
        let mut line = self.line();
        if let Line::Up(Connection { silence, .. }) = &mut *line {
            silence.since.get_or_insert(sent);
            silence.unanswered += 1;
        }
        drop(self.give_up_if_silent(line));
    }

    /// Ends a connection that answers nothing any more, with all that is left on it; the keeper then
    /// makes another.
    fn give_up_if_silent<'a>(&'a self, line: MutexGuard<'a, Line>) -> MutexGuard<'a, Line> {
        match &*line {
            Line::Up(Connection { silence, .. })
                if silence.is_too_long(self.clock.now(), self.limits.request) =>
            {
                self.give_up(line, self.silent())
            }
            _ => line,
        }
    }

    /// What was waited for on the connection is told of its end when the line is free again: it may look at it.
    fn give_up<'a>(
        &'a self,
        mut line: MutexGuard<'a, Line>,
        why: BackendError,
    ) -> MutexGuard<'a, Line> {
        let old = mem::replace(&mut *line, Line::Down(why));
        drop(line);
        if let Line::Up(Connection { bytes, .. }) = old {
            bytes.stop();
        }
        self.line()
    }

    /// Ends the connection to a server that is not the master any more. The sentinels name the one that is, or
    /// the name or the address of the URL leads to it.
    fn give_up_a_replica(&self, failure: &BackendError) {
        let line = self.line();
        if let Line::Up(_) = &*line {
            self.past().replica = Some(failure.clone());
            drop(self.give_up(line, failure.clone()));
        }
    }

    /// Whether the connection has answered requests for a while.
    fn has_served(&self) -> bool {
        match &*self.line() {
            Line::Up(connection) => Backoff::is_steady(self.answered_for(connection.up_since)),
            Line::Down(_) => false,
        }
    }

    /// How long after it came up a connection gave its last answer.
    fn answered_for(&self, up_since: Instant) -> Duration {
        Instant::from_nanos(self.answered.load(Ordering::Relaxed)).since(up_since)
    }

    /// Keeps the connection up for the life of the node, beginning with `link`.
    async fn keep(self: Arc<Self>, mut link: Option<Link>) {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        loop {
            if let Some(mut link) = link.take() {
                let why = tokio::select! {
                    biased;
                    // A master that has been put down in good order goes on saying OK for seconds.
                    () = self.resolver.moved(link.dialer.endpoint()) => self.moved(),
                    () = link.mover.ended() => self.lost(),
                };
                backoff.ended(self.answered_for(link.up_since));
                drop(link);
                let mut line = self.line();
                if let Line::Up(_) = &*line {
                    *line = Line::Down(why);
                }
            }
            link = Some(self.reconnect(&mut backoff).await);
        }
    }

    async fn reconnect(&self, backoff: &mut Backoff) -> Link {
        loop {
            tokio::select! {
                () = tokio::time::sleep(backoff.next()) => {}
                () = self.moved_on() => {}
            }
            match self.open().await {
                Ok(opened) => {
                    let link = self.put_up(opened);
                    if let Some(Hearing { ears, .. }) = &self.hearing {
                        ears.has_missed_something();
                    }
                    return link;
                }
                Err(error) => self.note_failure(error),
            }
        }
    }

    /// Returns when it is of no use any more to dial the same server again.
    async fn moved_on(&self) {
        match self.dialled() {
            Some(dialer) => self.resolver.moved(dialer.endpoint()).await,
            None => std::future::pending().await,
        }
    }

    fn note_failure(&self, error: BackendError) {
        let mut past = self.past();
        past.failures = past.failures.wrapping_add(1);
        drop(past);
        *self.line() = Line::Down(error);
    }

    fn put_up(&self, (connection, link): (Connection, Link)) -> Link {
        let mut past = self.past();
        past.failures = 0;
        past.replica = None;
        past.dialect = Some(connection.dialect);
        drop(past);
        *self.line() = Line::Up(connection);
        link
    }

    async fn open(&self) -> Result<(Connection, Link), BackendError> {
        let progress = Progress::default();
        let (began, limit) = (self.clock.now(), self.past().limit(self.limits));
        let opened = async {
            let last = self.dialled();
            let dialer = self.resolver.resolve(last.as_ref().map(Dialer::endpoint)).await?;
            let (replica, hang_up) = {
                let mut past = self.past();
                past.dialled = Some(dialer.clone());
                (past.replica.clone(), past.hang_up())
            };
            let meant = Meant { resolver: &self.resolver, replica: replica.as_ref(), hang_up };
            let greeted = tokio::select! {
                greeted = log_in(&dialer, meant, self.hearing.as_ref(), &progress) => greeted?,
                () = self.resolver.moved(dialer.endpoint()) => return Err(self.moved()),
            };
            let up_since = self.clock.now();
            self.past().took = Some(up_since.since(began));
            let (connection, mover) = Connection::new(greeted, up_since);
            Ok((connection, Link { mover, dialer, up_since }))
        };
        let opened = timeout(limit, opened).await;
        opened.unwrap_or_else(|_| Err(progress.too_slow(&self.server(), limit)))
    }

    fn lost(&self) -> BackendError {
        let message = format!("the connection to Redis at {} is lost", self.server());
        BackendError::new(FailureKind::NotApplied, message).remedy(
            "check that the server is up and reachable; the connection comes back by itself",
        )
    }

    fn silent(&self) -> BackendError {
        let message = format!("Redis at {} does not answer any more", self.server());
        BackendError::new(FailureKind::NotApplied, message).remedy(
            "check that the server is up and reachable; the connection is replaced by itself",
        )
    }

    fn moved(&self) -> BackendError {
        let message = format!("Redis at {} is not the master any more", self.server());
        BackendError::new(FailureKind::NotApplied, message)
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
        self.past().dialled.clone()
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Silence {
    fn is_too_long(&self, now: Instant, request_timeout: Duration) -> bool {
        let is_silent = |since: Instant| {
            now.since(self.answered_at.map_or(since, |answered| answered.max(since)))
                >= request_timeout
        };
        self.unanswered > MAX_UNANSWERED || self.since.is_some_and(is_silent)
    }
}

/// The bytes of one connection, and where they go.
struct Link {
    mover: Mover,
    dialer: Dialer,
    up_since: Instant,
}
