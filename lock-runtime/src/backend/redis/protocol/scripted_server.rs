//! One server that runs scripts, and how commands reach it.

use std::ops::Range;
use std::sync::Arc;

use redis::{Cmd, Pipeline, Value};

use crate::backend::redis::channel::Channel;
use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::conn::path::Path;
use crate::backend::redis::conn::prelude::Prelude;
use crate::backend::redis::conn::push::PushHandler;
use crate::backend::redis::diagnostics::{self, Info};
use crate::backend::redis::discovery::target::Target;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::command::{CommandWriter, library_command};
use crate::backend::redis::net::handshake::{PushConfig, QueueChannel};
use crate::backend::redis::net::progress::OpenDeadline;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::redis::protocol::contended_keys::ContendedKeys;
use crate::backend::redis::protocol::counter_clock::CounterClock;
use crate::backend::redis::protocol::script::{self, By, WAIT_QUEUE, WriteCall, WriteNthCall};
use crate::backend::redis::protocol::shared_state::SharedState;
use crate::backend::redis::protocol::value::{lease_status, read_holders};
use crate::backend::redis::protocol::wait_queue::QueueToken;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, FailureKind, LeaseRef, LeaseStatus, Owner, Warning};
use crate::exec::events;

/// A server that keeps locks by scripts: all of a store, or one master of a cluster.
///
/// Owns its connection. `acquire`, `renew` and `release` are in the modules with these names.
pub(crate) struct ScriptedServer {
    pub(super) connection: Connection,
    pub(super) push_handler: Arc<PushHandler>,
    pub(super) keyspace: Keyspace,
    pub(super) contended: Arc<ContendedKeys>,
    pub(super) counter_clock: CounterClock,
    /// Part of every token of this pool; `None` if the first connection could not receive messages on it.
    channel: Option<Channel>,
    scope: MessageScope,
}

/// The reply to each request, or why there is none.
pub(super) type SharedReplies<T> = Vec<Result<T, BackendError>>;

/// Adds the reply to each request of a range, from the answer to its command.
type Split<'a, T> = dyn Fn(Range<usize>, Value, &mut SharedReplies<T>) + Send + Sync + 'a;

/// The server runs one script at a time, and this many locks take it about a fifth of a millisecond.
pub(super) const MAX_SHARED: usize = 128;

/// How requests reach a server of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum RouteHint {
    /// To the server that has the slot.
    Direct,
    /// One lease per command: a command fails as a whole if its keys are temporarily at two servers.
    Separate,
    /// As [`Separate`](Self::Separate), to the server that a slot is being moved to (`ASKING`).
    Asking,
}

/// Why a server cannot be used with scripts.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// The server is not reachable, or refuses the connection or what locks need.
    Failed(BackendError),
    /// The server runs no scripts for this user.
    NoScripts(BackendError),
}

impl ConnectError {
    pub(crate) fn into_error(self) -> BackendError {
        match self {
            Self::Failed(error) | Self::NoScripts(error) => error,
        }
    }
}

impl From<BackendError> for ConnectError {
    fn from(error: BackendError) -> Self {
        Self::Failed(error)
    }
}

impl ScriptedServer {
    /// Connects, and finds out what this user may do. The queue probe uses the owner token `probe`.
    pub(crate) async fn connect(
        shared: &SharedState,
        target: impl Into<Target>,
        scope: MessageScope,
        probe: Owner,
    ) -> Result<Self, ConnectError> {
        let SharedState { keyspace, push_handler, contended, channel, clock, limits, .. } =
            shared.clone();
        let slot = scope.some_slot();
        let probe = {
            let (keyspace, token) = (keyspace.clone(), QueueToken::new(&probe, Some(channel)));
            Box::new(move |slot| queue_probe(&keyspace, slot, &token))
        };
        let queue = Some(QueueChannel { channel, probe, keyspace: keyspace.clone() });
        let pushes = PushConfig { sink: push_handler.clone(), scope: scope.clone(), queue };
        let deadline = OpenDeadline::start(clock, limits.connect);
        let connection = Connection::connect(target, clock, limits, pushes).await?;
        let server = connection.server();
        // Without the right to scripts a lock could be acquired by plain `SET` but not released.
        let refusal = script::refusal(&connection, &keyspace, slot);
        let info = async {
            if connection.is_minimal() {
                Ok(None)
            } else {
                connection.try_send(&diagnostics::info_command()).await.map(Some)
            }
        };
        // In one flight.
        let both = async { Ok(tokio::join!(biased; refusal, info)) };
        let (refusal, info) = deadline.run(&server, "the first script (`EVAL`)", both).await?;
        if let Some(refusal) = refusal? {
            if let Ok(Some(info)) = &info
                && Info::of(info).is_sentinel()
            {
                return Err(ConnectError::Failed(sentinel(&server)));
            }
            return Err(ConnectError::NoScripts(refusal));
        }
        if let Some(info) = info? {
            for warning in diagnostics::warnings(&server, keyspace.is_of_server(), &info, &[]) {
                events::backend_warning(&server, &warning);
            }
        }
        if let Some(warning) = connection.warning() {
            events::backend_warning(&server, &warning);
        }
        let channel = connection.push_support().queue.then_some(channel);
        let counter_clock = CounterClock::new(clock);
        Ok(Self { connection, push_handler, keyspace, contended, counter_clock, channel, scope })
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(crate) fn is_up(&self) -> bool {
        self.connection.is_up()
    }

    /// Whether the server reports changes of keys.
    pub(crate) fn reports_changes(&self) -> bool {
        self.connection.push_support().tracking
    }

    /// Whether the server keeps wait queues for this pool.
    pub(crate) fn keeps_wait_queues(&self) -> bool {
        self.channel.is_some() && self.connection.push_support().queue
    }

    pub(crate) fn close(&self) {
        self.connection.close();
    }

    pub(super) fn token(&self, owner: &Owner) -> QueueToken {
        QueueToken::new(owner, self.channel.map(|channel| self.scope.channel(channel)))
    }

    pub(crate) async fn are_held(
        &self,
        hint: RouteHint,
        leases: &[LeaseRef],
    ) -> Vec<Result<LeaseStatus, BackendError>> {
        let command =
            |at: usize, _, out: &mut CommandWriter<'_>| read_holders(&leases[at].keys, out);
        let replies = self.run(Path::Background, hint, false, leases.len(), &command).await;
        let status = |(lease, reply): (&LeaseRef, Result<Value, _>)| {
            reply.map(|holders| lease_status(&lease.owner, &holders))
        };
        leases.iter().zip(replies).map(status).collect()
    }

    pub(crate) async fn probe(&self) -> Result<(), BackendError> {
        self.connection.send(&redis::cmd("PING")).await.map(drop)
    }

    pub(crate) async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        if self.connection.is_minimal() {
            self.connection.send(&redis::cmd("PING")).await?;
            let text = format!(
                "Redis at {} is behind a proxy that supports few commands, so waiters poll",
                self.connection.server()
            );
            let remedy = "if the proxy spreads keys over several servers, give the keys of one `lock_all` a common hash tag";
            let more = self.connection.warning();
            return Ok(std::iter::once(Warning::new(text, remedy)).chain(more).collect());
        }
        let mut questions = Pipeline::with_capacity(4);
        questions.add_command(redis::cmd("PING")).add_command(diagnostics::info_command());
        for question in diagnostics::config_commands() {
            questions.add_command(question);
        }
        let mut answers = self.connection.send_all(&questions).await?.into_iter();
        // `PING` is allowed to every user, so its error is an error of the server.
        if let Some(Err(error)) = answers.next() {
            return Err(self.connection.failure(error));
        }
        let Some(info) = answers.next() else { return Ok(Vec::new()) };
        let answers: Vec<_> = answers.collect();
        let for_all = self.keyspace.is_of_server();
        let mut warnings =
            diagnostics::warnings(&self.connection.server(), for_all, &info, &answers);
        warnings.extend(self.connection.warning());
        Ok(warnings)
    }

    /// As [`script::run`].
    pub(crate) async fn run(
        &self,
        path: Path,
        hint: RouteHint,
        is_tracked: bool,
        count: usize,
        command: &WriteNthCall<'_>,
    ) -> Vec<Result<Value, BackendError>> {
        let prelude = self.prelude(hint, is_tracked);
        script::run(&self.connection, path, count, prelude, command).await
    }

    /// Sends one command. If the server has begun to check slots and refuses the command for that reason, it is sent once more
    /// with tagged names.
    pub(super) async fn run_one(
        &self,
        path: Path,
        hint: RouteHint,
        is_tracked: bool,
        command: &WriteCall<'_>,
    ) -> Result<Value, BackendError> {
        let were_tagged = self.keyspace.is_tagged();
        let prelude = self.prelude(hint, is_tracked);
        let answer = script::run_one(&self.connection, path, prelude, command).await;
        if were_tagged || !answer.as_ref().is_err_and(server_error::is_across_slots) {
            return answer;
        }
        self.keyspace.use_tags();
        script::run_one(&self.connection, path, prelude, command).await
    }

    /// As [`run`](Self::run). If the server has begun to check slots, the commands that it refuses for that reason
    /// are sent once more with tagged names.
    pub(super) async fn run_named(
        &self,
        path: Path,
        hint: RouteHint,
        is_tracked: bool,
        count: usize,
        command: &WriteNthCall<'_>,
    ) -> Vec<Result<Value, BackendError>> {
        let were_tagged = self.keyspace.is_tagged();
        let mut answers = self.run(path, hint, is_tracked, count, command).await;
        if were_tagged || !answers.iter().any(Result::is_err) {
            return answers;
        }
        let crosses = |at: &usize| answers[*at].as_ref().is_err_and(server_error::is_across_slots);
        let refused: Vec<_> = (0..count).filter(crosses).collect();
        if !refused.is_empty() {
            self.keyspace.use_tags();
            let command = |n: usize, by, out: &mut CommandWriter<'_>| command(refused[n], by, out);
            let more = self.run(path, hint, is_tracked, refused.len(), &command).await;
            replace(&mut answers, &refused, more);
        }
        answers
    }

    /// The maximum number of locks in one script if each of its requests has its own owner.
    ///
    /// A script with several keys needs all of them at one server.
    pub(super) fn max_shared(&self, hint: RouteHint) -> usize {
        let may_share =
            hint == RouteHint::Direct && !self.keyspace.is_tagged() && !self.may_spread_keys();
        if may_share { MAX_SHARED } else { 1 }
    }

    /// Whether a proxy may spread keys over servers that have no slots.
    pub(super) fn may_spread_keys(&self) -> bool {
        !self.keyspace.is_tagged() && !self.connection.push_support().is_of_one_server()
    }

    /// Sends a command for each range of requests in `calls`, and returns the reply to each of these requests.
    ///
    /// The server may refuse a command for several requests because of the key of one request. Each request is then sent once
    /// more in its own command. The server refuses the shared command before the script begins.
    pub(super) async fn run_shared<T: Send>(
        &self,
        path: Path,
        hint: RouteHint,
        is_tracked: bool,
        calls: &[Range<usize>],
        command: &(dyn Fn(Range<usize>, By, &mut CommandWriter<'_>) + Send + Sync),
        split: &Split<'_, T>,
    ) -> SharedReplies<T> {
        let of_call =
            |at: usize, by, out: &mut CommandWriter<'_>| command(calls[at].clone(), by, out);
        let answers = self.run_named(path, hint, is_tracked, calls.len(), &of_call).await;
        let mut replies = Vec::with_capacity(calls.iter().map(Range::len).sum());
        let (mut places, mut apart) = (Vec::new(), Vec::new());
        for (call, answer) in calls.iter().zip(answers) {
            match answer {
                Ok(answer) => split(call.clone(), answer, &mut replies),
                Err(error) => {
                    if call.len() > 1 && server_error::is_about_keys(&error) {
                        places.extend(replies.len()..replies.len() + call.len());
                        apart.extend(call.clone().map(|at| at..at + 1));
                    }
                    replies.extend(call.clone().map(|_| Err(error.clone())));
                }
            }
        }
        if !apart.is_empty() {
            let more = self.run_shared(path, hint, is_tracked, &apart, command, split);
            replace(&mut replies, &places, Box::pin(more).await);
        }
        replies
    }

    /// The prefix of commands that need one for this route, or to start tracking if the server supports it.
    pub(super) fn prelude(&self, hint: RouteHint, is_tracked: bool) -> Prelude {
        match hint {
            RouteHint::Asking => Prelude::Asking,
            _ if is_tracked && self.reports_changes() => Prelude::Caching,
            _ => Prelude::None,
        }
    }
}

/// The commands for `count` requests, as ranges of requests. Neighbours share a command if they may, up to the limit that `most`
/// gives for the first request.
pub(super) fn shared_calls(
    count: usize,
    most: impl Fn(usize) -> usize,
    may_share: impl Fn(usize, usize) -> bool,
) -> Vec<Range<usize>> {
    let mut calls: Vec<Range<usize>> = Vec::with_capacity(count);
    for at in 0..count {
        match calls.last_mut() {
            Some(call) if call.len() < most(call.start) && may_share(call.start, at) => {
                call.end += 1;
            }
            _ => calls.push(at..at + 1),
        }
    }
    calls
}

/// Replaces the entries of `answers` at `places` by `more`.
pub(super) fn replace<T>(answers: &mut [T], places: &[usize], more: Vec<T>) {
    for (at, answer) in places.iter().zip(more) {
        answers[*at] = answer;
    }
}

/// Tests that the user may run every command of a wait queue, and that messages on the pool's channel arrive.
fn queue_probe(keyspace: &Keyspace, slot: u16, token: &QueueToken) -> Cmd {
    let lock = keyspace.probe(slot);
    library_command(|out| {
        let call = WAIT_QUEUE.call(out, By::Text, 2);
        call.arg(lock.as_str()).arg(keyspace.wait_queue(&lock)).arg("probe").arg(token.as_bytes());
    })
}

#[cold]
fn sentinel(server: &str) -> BackendError {
    let message = format!("the server at {server} is a sentinel, which keeps no locks");
    BackendError::new(FailureKind::Rejected, message).remedy(
        "write `redis+sentinel://host:26379/service`, with the name that follows `sentinel monitor` in its configuration",
    )
}
