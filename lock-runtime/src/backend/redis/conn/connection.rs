//! A connection to one server that is re-established when it ends.
//!
//! While it is down, requests fail immediately; the waiter of a lock decides how long to retry. A request that is
//! given up stays on the connection and may still be served. A connection on which no answers arrive is replaced.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::Limits;
use crate::backend::backoff::Backoff;
use crate::backend::redis::conn::answer_sign::AnswerSign;
use crate::backend::redis::conn::end_reason;
use crate::backend::redis::conn::foreground::{
    Advice, ForegroundLink, Foregrounds, are_of_one_server,
};
use crate::backend::redis::conn::history::ConnectHistory;
use crate::backend::redis::conn::link_io::{LinkIo, LinkRequests};
use crate::backend::redis::conn::path::Path;
use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::discovery::target::Target;
use crate::backend::redis::net::command::{CommandWriter, WriteCommand, WriteNthCommand};
use crate::backend::redis::net::handshake::{
    Dialect, Handshake, OpenConnection, PushConfig, PushSupport, open_direct,
};
use crate::backend::redis::net::io_task::IoTask;
use crate::backend::redis::net::progress::ConnectProgress;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, FailureKind, Warning};
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::{Mutex, MutexGuard};
use crate::exec::events;
use crate::exec::foreground::ForegroundPlace;
use crate::exec::inline_task::caller;

/// What a server answers to a command. The error is the server's.
pub(crate) type ServerAnswer = Result<Value, RedisError>;

/// Keeps one connection to `target` open. Dropping it closes the connection and stops the reconnecting.
pub(crate) struct Connection {
    state: Arc<ConnectionState>,
    supervisor: AbortHandle,
}

pub(super) struct ConnectionState {
    target: Target,
    history: Mutex<ConnectHistory>,
    pub(super) clock: Clock,
    pub(super) limits: Limits,
    /// The driver's runtime.
    pub(super) runtime: Handle,
    /// `None` for a connection without pushes.
    pushes: Option<PushConfig>,
    pub(super) link: Mutex<LinkState>,
    /// The send time of the last request that was served or refused by a server with its data, in the clock's nanoseconds.
    served: AtomicU64,
}

pub(super) enum LinkState {
    Up(Link),
    Down(BackendError),
}

/// The open connection of the driver, and the connections beside it to the same server.
pub(super) struct Link {
    io: Arc<LinkIo>,
    pub(super) up_since: Instant,
    pushes: PushSupport,
    dialect: Dialect,
    pub(super) foregrounds: Foregrounds,
}

/// An open connection, as its supervisor owns it.
struct SupervisedLink {
    io: IoTask,
    dialer: Dialer,
    up_since: Instant,
}

impl Connection {
    /// Connects. From the first success on, the connection is re-established when it ends.
    pub(crate) async fn connect(
        target: impl Into<Target>,
        clock: Clock,
        limits: Limits,
        pushes: PushConfig,
    ) -> Result<Self, BackendError> {
        let (connection, opened) = Self::start(target, clock, limits, Some(pushes)).await;
        opened.map(|()| connection)
    }

    /// Like [`connect`](Self::connect), without pushes.
    pub(crate) async fn connect_without_pushes(
        target: impl Into<Target>,
        clock: Clock,
        limits: Limits,
    ) -> Result<Self, BackendError> {
        let (connection, opened) = Self::start(target, clock, limits, None).await;
        opened.map(|()| connection)
    }

    /// Connects, and continues in the background if that fails. The second value is the result of the first attempt.
    pub(crate) async fn start(
        target: impl Into<Target>,
        clock: Clock,
        limits: Limits,
        pushes: Option<PushConfig>,
    ) -> (Self, Result<(), BackendError>) {
        let state = Arc::new(ConnectionState {
            target: target.into(),
            history: Mutex::default(),
            clock,
            limits,
            runtime: Handle::current(),
            pushes,
            link: Mutex::new(LinkState::Down(end_reason::not_connected())),
            served: AtomicU64::new(0),
        });
        let (link, opened) = match state.open().await {
            Ok(opened) => (Some(state.install(opened)), Ok(())),
            Err(error) => {
                state.note_failure(error.clone());
                (None, Err(error))
            }
        };
        let supervisor = tokio::spawn(state.clone().supervise(link)).abort_handle();
        (Self { state, supervisor }, opened)
    }

    pub(crate) fn push_support(&self) -> PushSupport {
        match &*self.state.link.lock() {
            LinkState::Up(link) => link.pushes,
            LinkState::Down(_) => PushSupport::default(),
        }
    }

    /// Whether the server is a proxy that hangs up on unknown commands.
    pub(crate) fn is_minimal(&self) -> bool {
        matches!(&*self.state.link.lock(), LinkState::Up(link) if link.dialect == Dialect::Minimal)
    }

    /// When the current connection was opened. `None` while it is down.
    pub(crate) fn generation(&self) -> Option<Instant> {
        match &*self.state.link.lock() {
            LinkState::Up(link) => Some(link.up_since),
            LinkState::Down(_) => None,
        }
    }

    /// The dialer for another connection to the same server, and the time limit for connecting.
    pub(super) fn dialer(&self) -> Result<(Dialer, Duration), BackendError> {
        let dialer = self.state.dialer().ok_or_else(end_reason::not_connected)?;
        Ok((dialer, self.state.limits.connect))
    }

    /// Sends one command.
    pub(crate) async fn send(&self, command: &Cmd) -> Result<Value, BackendError> {
        self.try_send(command).await?.map_err(|error| self.failure(error))
    }

    /// Sends one command. The inner error is the server's error answer.
    pub(crate) async fn try_send(&self, command: &Cmd) -> Result<ServerAnswer, BackendError> {
        let send = async |io: &LinkIo| io.send(command).await;
        let answer = self.request(Path::Background, send, AnswerSign::of).await?;
        Ok(answer.and_then(Value::extract_error))
    }

    /// Sends several commands in one write. One answer per command, in order.
    pub(crate) async fn send_all(
        &self,
        commands: &Pipeline,
    ) -> Result<Vec<ServerAnswer>, BackendError> {
        let send = async |io: &LinkIo| io.send_all(commands).await;
        let answer =
            self.request(Path::Background, send, |answers| AnswerSign::of_all(answers)).await?;
        let values = answer.map_err(|error| self.failure(error))?;
        Ok(values.into_iter().map(Value::extract_error).collect())
    }

    /// Sends the command that `command` writes, after `prelude`. The inner error is the server's error answer.
    pub(crate) async fn try_send_after(
        &self,
        path: Path,
        prelude: Prelude,
        command: &WriteCommand<'_>,
    ) -> Result<ServerAnswer, BackendError> {
        if prelude == Prelude::None {
            let send = async |io: &LinkIo| io.send_written(command).await;
            let answer = self.request(path, send, AnswerSign::of).await?;
            return Ok(answer.and_then(Value::extract_error));
        }
        let command = |_: usize, out: &mut CommandWriter<'_>| command(out);
        let mut answers = Box::pin(self.send_after(path, prelude, 1, &command)).await?;
        answers.pop().ok_or_else(end_reason::not_connected)
    }

    /// Sends `count` commands in one write, each after `prelude`. `command` writes them. One answer per command, in order.
    pub(crate) async fn send_after(
        &self,
        path: Path,
        prelude: Prelude,
        count: usize,
        command: &WriteNthCommand<'_>,
    ) -> Result<Vec<ServerAnswer>, BackendError> {
        let values = self.send_raw(path, prelude, count, command, AnswerSign::of_all).await?;
        Ok(prelude.skip_own(values).map(Value::extract_error).collect())
    }

    /// As [`send_after`](Self::send_after), with all answers as they are. `sign` judges them.
    pub(crate) async fn send_raw(
        &self,
        path: Path,
        prelude: Prelude,
        count: usize,
        command: &WriteNthCommand<'_>,
        sign: impl FnOnce(&[Value]) -> AnswerSign,
    ) -> Result<Vec<Value>, BackendError> {
        let send = async |io: &LinkIo| io.send_all_written(prelude, count, command).await;
        let answer = self.request(path, send, |answers| sign(answers)).await?;
        answer.map_err(|error| self.failure(error))
    }

    /// The failure of a request that the server answered with `error`. A connection to a replica is given up.
    pub(crate) fn failure(&self, error: RedisError) -> BackendError {
        let (is_replica, is_loading) =
            (server_error::is_of_a_replica(&error), server_error::is_loading(&error));
        let failure = server_error::failure(&self.state.server(), error);
        if is_replica || (is_loading && self.state.has_served()) {
            self.state.give_up_replica(&failure);
        }
        failure
    }

    /// As [`failure`](Self::failure), for an error that a script has returned as a value.
    pub(crate) fn script_failure(&self, text: &str) -> BackendError {
        let failure = server_error::script_failure(&self.state.server(), text);
        if server_error::is_text_of_a_replica(text) {
            self.state.give_up_replica(&failure);
        }
        failure
    }

    /// The current or last server, for messages.
    pub(crate) fn server(&self) -> String {
        self.state.server()
    }

    /// A weakness of a connection that works.
    pub(crate) fn warning(&self) -> Option<Warning> {
        self.state.target.warning()
    }

    /// Whether sentinels are queried for the master before each connection.
    pub(crate) fn has_sentinels(&self) -> bool {
        matches!(self.state.target, Target::Sentinels(_))
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(&*self.state.link.lock(), LinkState::Up(_))
    }

    /// The place on the connection of `caller`, the runtime of this thread, if there is one: [`Path::Foreground`]. After some
    /// requests from the same runtime a connection is opened; meanwhile the driver's connection serves.
    pub(crate) fn foreground(&self, caller: &Handle) -> Option<ForegroundPlace> {
        if caller.id() == self.state.runtime.id() {
            return None;
        }
        let (advice, generation) = match &mut *self.state.link.lock() {
            LinkState::Up(link) if link.dialect == Dialect::Full && !link.io.has_ended() => {
                (link.foregrounds.advice(caller, self.state.clock.now()), link.up_since)
            }
            LinkState::Up(_) | LinkState::Down(_) => return None,
        };
        match advice {
            Advice::Use(place) => Some(place),
            Advice::Open => {
                self.state.open_foreground(caller, generation);
                None
            }
            Advice::UseDriver => None,
        }
    }

    async fn request<T>(
        &self,
        path: Path,
        request: impl AsyncFnOnce(&LinkIo) -> Result<T, RedisError>,
        sign: impl FnOnce(&T) -> AnswerSign,
    ) -> Result<Result<T, RedisError>, BackendError> {
        let at = self.state.clock.now();
        let io = self.state.link_io(path, at)?;
        let mut sent = SentRequest { state: &self.state, io, at, answered: false };
        let answer = request(&sent.io).await;
        sent.answered = true;
        match AnswerSign::of_result(&answer, sign) {
            AnswerSign::Served => self.state.served.store(at.as_nanos(), Ordering::Relaxed),
            AnswerSign::NotServed => {}
            AnswerSign::InTransaction => sent.io.io.stop(),
        }
        if answer.as_ref().is_err_and(server_error::is_hang_up) && sent.io.was_silent() {
            return Err(end_reason::unanswered(&self.server()));
        }
        Ok(answer)
    }

    pub(crate) fn close(&self) {
        self.supervisor.abort();
        self.state.target.close();
        let message = format!("the connection to Redis at {} is closed", self.state.server());
        self.state.set_link(LinkState::Down(BackendError::new(FailureKind::Rejected, message)));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}

/// A request that has been sent. Dropping it before the answer records it as unanswered.
struct SentRequest<'a> {
    state: &'a Arc<ConnectionState>,
    io: Arc<LinkIo>,
    at: Instant,
    answered: bool,
}

impl Drop for SentRequest<'_> {
    fn drop(&mut self) {
        let now = self.state.clock.now();
        if self.answered {
            return self.io.note_answer(self.at, now);
        }
        self.io.note_unanswered(self.at);
        if !self.state.end_if_silent(&self.io) && self.io.begin_watch() {
            let (state, io) = (self.state.clone(), self.io.clone());
            self.state.runtime.spawn(async move {
                io.until_silent(state.clock).await;
                state.end_if_silent(&io);
            });
        }
    }
}

impl ConnectionState {
    /// The connection on which a request is sent at `now`.
    fn link_io(&self, path: Path, now: Instant) -> Result<Arc<LinkIo>, BackendError> {
        match &*self.give_up_if_silent(self.link.lock(), now) {
            LinkState::Up(link) => {
                let of_caller = match path {
                    Path::Foreground => caller().and_then(|caller| link.foregrounds.of(caller)),
                    Path::Background => None,
                };
                Ok(of_caller.unwrap_or(&link.io).clone())
            }
            LinkState::Down(error) => Err(error.clone()),
        }
    }

    /// Opens a connection on this runtime. `None` if it fails, or leads to a server other than the driver's.
    pub(super) async fn foreground(&self) -> Option<ForegroundLink> {
        let driver = self.link_io(Path::Background, self.clock.now()).ok()?;
        let dialer = self.dialer()?.connecting_on(&self.runtime);
        let progress = ConnectProgress::default();
        let role = self.target.role_check(None);
        let (requests, task) = open_direct(&dialer, &role, &progress).await.ok()?;
        let io = LinkIo::new(LinkRequests::Direct(requests), task.io(), self.limits.request);
        // A name or a virtual address may lead elsewhere by now.
        are_of_one_server(&io, &driver).await.then_some(ForegroundLink { io, _task: task })
    }

    /// Ends the connection `io` if it is silent.
    fn end_if_silent(&self, io: &LinkIo) -> bool {
        let now = self.clock.now();
        let is_silent = io.check_silence(now);
        if is_silent {
            // The driver's connection ends with a reason, which `stop` on its own would not give.
            drop(self.give_up_if_silent(self.link.lock(), now));
            io.io.stop();
        }
        is_silent
    }

    /// Ends a silent connection and fails its pending requests. The supervisor then opens another one.
    fn give_up_if_silent<'a>(
        &'a self,
        link: MutexGuard<'a, LinkState>,
        now: Instant,
    ) -> MutexGuard<'a, LinkState> {
        match &*link {
            LinkState::Up(Link { io, .. }) if io.check_silence(now) => {
                self.give_up(link, end_reason::silent(&self.server()))
            }
            _ => link,
        }
    }

    /// Ends the connection. Its pending requests fail after the mutex is released, as their wakers may lock it.
    fn give_up<'a>(
        &'a self,
        mut link: MutexGuard<'a, LinkState>,
        reason: BackendError,
    ) -> MutexGuard<'a, LinkState> {
        let old = mem::replace(&mut *link, LinkState::Down(reason));
        drop(link);
        if let LinkState::Up(Link { io, .. }) = &old {
            io.io.stop();
        }
        drop(old);
        self.link.lock()
    }

    fn set_link(&self, link: LinkState) {
        if let (LinkState::Down(error), Some(PushConfig { sink, .. })) = (&link, &self.pushes) {
            sink.disconnected(error);
        }
        let old = mem::replace(&mut *self.link.lock(), link);
        // The mutex is released by now: the end of a connection wakes tasks.
        drop(old);
    }

    /// Ends the connection to a server that is no longer the master. The sentinels name the new one, or the name or
    /// address in the URL leads to it.
    fn give_up_replica(&self, failure: &BackendError) {
        let link = self.link.lock();
        if let LinkState::Up(_) = &*link {
            self.history.lock().replica = Some(failure.clone());
            drop(self.give_up(link, failure.clone()));
        }
    }

    /// Whether the connection has answered requests for a while.
    fn has_served(&self) -> bool {
        match &*self.link.lock() {
            LinkState::Up(link) => Backoff::is_steady(self.served_for(link.up_since)),
            LinkState::Down(_) => false,
        }
    }

    /// The time from `up_since` to the last served request.
    fn served_for(&self, up_since: Instant) -> Duration {
        Instant::from_nanos(self.served.load(Ordering::Relaxed)).since(up_since)
    }

    /// Re-establishes the connection, starting with `link`, until the task is aborted.
    async fn supervise(self: Arc<Self>, mut link: Option<SupervisedLink>) {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        loop {
            if let Some(mut link) = link.take() {
                let reason = tokio::select! {
                    biased;
                    // A master that was demoted in a planned failover still answers OK for seconds.
                    () = self.target.moved(link.dialer.endpoint()) => {
                        end_reason::moved(&self.server())
                    }
                    () = link.io.ended() => end_reason::lost(&self.server()),
                };
                backoff.ended(self.served_for(link.up_since));
                drop(link);
                if matches!(&*self.link.lock(), LinkState::Up(_)) {
                    self.set_link(LinkState::Down(reason));
                }
            }
            link = Some(self.reconnect(&mut backoff).await);
        }
    }

    async fn reconnect(&self, backoff: &mut Backoff) -> SupervisedLink {
        loop {
            tokio::select! {
                () = tokio::time::sleep(backoff.next()) => {}
                () = self.target_moved() => {}
            }
            match self.open().await {
                Ok(opened) => {
                    let link = self.install(opened);
                    if let Some(PushConfig { sink, .. }) = &self.pushes {
                        sink.resync();
                    }
                    return link;
                }
                Err(error) => self.note_failure(error),
            }
        }
    }

    /// Returns when the last server is no longer the one to connect to.
    async fn target_moved(&self) {
        match self.dialer() {
            Some(dialer) => self.target.moved(dialer.endpoint()).await,
            None => std::future::pending().await,
        }
    }

    fn note_failure(&self, error: BackendError) {
        self.history.lock().on_failure();
        self.set_link(LinkState::Down(error));
    }

    /// Makes an opened connection the one that requests use.
    fn install(&self, (link, supervised): (Link, SupervisedLink)) -> SupervisedLink {
        let server = supervised.dialer.endpoint().to_string();
        let former = self.history.lock().on_success(link.dialect, server.clone());
        if let Some(former) = former {
            events::master_moved(former, server);
        }
        self.set_link(LinkState::Up(link));
        supervised
    }

    async fn open(&self) -> Result<(Link, SupervisedLink), BackendError> {
        let progress = ConnectProgress::default();
        let (began, limit) = (self.clock.now(), self.history.lock().limit(self.limits));
        let opened = async {
            let last = self.dialer();
            let dialer = self.target.resolve(last.as_ref().map(Dialer::endpoint)).await?;
            let (replica, hang_up) = {
                let mut history = self.history.lock();
                history.dialer = Some(dialer.clone());
                (history.replica.clone(), history.hang_up())
            };
            let handshake = Handshake {
                dialer: &dialer,
                role: self.target.role_check(replica),
                hang_up,
                pushes: self.pushes.as_ref(),
                progress: &progress,
            };
            let opened = tokio::select! {
                opened = handshake.run() => opened?,
                () = self.target.moved(dialer.endpoint()) => {
                    return Err(end_reason::moved(&self.server()));
                }
            };
            let up_since = self.clock.now();
            self.history.lock().took = Some(up_since.since(began));
            let OpenConnection { requests, io: task, pushes, dialect } = opened;
            let requests = LinkRequests::Multiplexed(requests);
            let io = LinkIo::new(requests, task.io(), self.limits.request);
            let foregrounds = Foregrounds::default();
            let link = Link { io, up_since, pushes, dialect, foregrounds };
            Ok((link, SupervisedLink { io: task, dialer, up_since }))
        };
        let opened = timeout(limit, opened).await;
        opened.unwrap_or_else(|_| Err(progress.too_slow(&self.server(), limit)))
    }

    /// The current or last server, for messages.
    fn server(&self) -> String {
        match self.dialer() {
            Some(dialer) => dialer.endpoint().to_string(),
            None => self.target.to_string(),
        }
    }

    fn dialer(&self) -> Option<Dialer> {
        self.history.lock().dialer.clone()
    }
}
