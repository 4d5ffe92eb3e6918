//! The greeting of a connection: who we are, what we want to be told, and how much the other end understands.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, ProtocolVersion, PushInfo, RedisError, Value};
use tokio::time::timeout;

use crate::backend::redis::channel::Channel;
use crate::backend::redis::conn::push::{Ears, Home};
use crate::backend::redis::discovery::target::Resolver;
use crate::backend::redis::keyspace::Names;
use crate::backend::redis::net::io_task::Mover;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::server_error;
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};

/// What the server may say without being asked.
pub(crate) struct Hearing {
    /// Where its messages go, those that are meant.
    pub(crate) ears: Arc<Ears>,
    pub(crate) home: Home,
    /// For a pool whose processes stand in lines.
    pub(crate) calls: Option<Calls>,
}

/// How a process is called that stands in the line of a lock.
pub(crate) struct Calls {
    /// The channel on which this pool can be told.
    pub(crate) channel: Channel,
    /// Finds out whether this user may do what the line of a lock needs, with a key of this slot.
    pub(crate) probe: Box<dyn Fn(u16) -> Cmd + Send + Sync>,
    /// Those that the probe uses.
    pub(crate) names: Names,
}

/// What this user is told on this connection without asking.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hears {
    /// Changes of the keys that were read behind `CLIENT CACHING YES`.
    pub(crate) changes: bool,
    /// Its own channel; and all commands of the line are allowed.
    pub(crate) calls: bool,
}

/// How much of the protocol the other end speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Full,
    /// RESP2 without pushes.
    Plain,
    /// As plain, and it hangs up on a command that it does not know.
    Touchy,
}

/// How far a connection has come that is being made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reached {
    #[default]
    Nothing,
    /// The provider of credentials is asked.
    Provider,
    /// The host has an address.
    Address,
    Socket,
    Tls,
    /// The server has answered the log-in.
    LogIn,
}

/// Where an attempt to connect is, for the error if its time is over.
#[derive(Debug, Default)]
pub(crate) struct Progress(Mutex<Reached>);

impl Progress {
    pub(crate) fn note(&self, reached: Reached) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reached;
    }

    fn reached(&self) -> Reached {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of an attempt that is not done within `limit`.
    pub(crate) fn too_slow(&self, server: &str, limit: Duration) -> BackendError {
        let (so_far, remedy) = match self.reached() {
            Reached::Nothing => ("its name is not resolved", CHECK_REACH),
            Reached::Provider => ("the provider of credentials has not answered", CHECK_PROVIDER),
            Reached::Address => ("there is no TCP connection", CHECK_REACH),
            Reached::Socket => ("there is a TCP connection, and no answer over it", CHECK_REACH),
            Reached::Tls => ("there is a TLS connection, and no answer to the log-in", CHECK_SLOW),
            Reached::LogIn => ("the log-in is answered, and what follows is not", CHECK_SLOW),
        };
        slow(server, limit, so_far, remedy)
    }
}

const CHECK_REACH: &str = "check that the server is up and reachable, and that the port speaks Redis, with TLS for `rediss://` and without for `redis://`; a slow link needs a longer `connect_timeout` of the builder, or `?connect_timeout=10s` in the URL";

const CHECK_PROVIDER: &str = "have `.credentials(..)` of the builder answer faster, for example with a token that it keeps and renews, or choose a longer `connect_timeout`";

const CHECK_SLOW: &str = "check the server and the network to it; a slow link needs a longer `connect_timeout` of the builder, or `?connect_timeout=10s` in the URL";

fn slow(server: &str, limit: Duration, so_far: &str, remedy: &'static str) -> BackendError {
    let message = format!("Redis at {server} did not answer within {limit:?}: {so_far}");
    BackendError::new(FailureKind::NotApplied, message).remedy(remedy)
}

/// The time in which a store has to be opened, its connection included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    clock: Clock,
    until: Instant,
    limit: Duration,
}

impl Opening {
    pub(crate) fn begin(clock: Clock, limit: Duration) -> Self {
        Self { clock, until: clock.now() + limit, limit }
    }

    /// Asks `server` something over the new connection; `what` says what, for the error if the time is over.
    pub(crate) async fn ask<T>(
        self,
        server: &str,
        what: &str,
        question: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let left = self.until.since(self.clock.now());
        let answer = timeout(left, question).await;
        answer.unwrap_or_else(|_| {
            let so_far = format!("it is connected, and {what} is not answered");
            Err(slow(server, self.limit, &so_far, CHECK_SLOW))
        })
    }
}

/// What it means if the other end hangs up on the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HangUp {
    /// It may be a proxy that does not know the commands, which is found out.
    MayBeAProxy,
    /// The server has understood the greeting before, and cannot serve now.
    IsAFailure,
}

/// A connection that may be used.
pub(crate) struct Greeted {
    pub(crate) requests: MultiplexedConnection,
    pub(crate) mover: Mover,
    pub(crate) hears: Hears,
    pub(crate) dialect: Dialect,
}

/// What a new connection has to show before it is used.
#[derive(Clone, Copy)]
pub(crate) struct Meant<'a> {
    pub(crate) resolver: &'a Resolver,
    /// What the last server has answered that was a replica and no master any more.
    pub(crate) replica: Option<&'a BackendError>,
    pub(crate) hang_up: HangUp,
}

impl Meant<'_> {
    async fn confirm(
        self,
        dialer: &Dialer,
        connection: &mut MultiplexedConnection,
    ) -> Result<(), BackendError> {
        self.resolver.confirm(dialer, connection, self.replica).await
    }
}

/// Connects by `dialer`, in three flights: the socket, the log-in, and all the rest.
pub(crate) async fn log_in(
    dialer: &Dialer,
    meant: Meant<'_>,
    hearing: Option<&Hearing>,
    progress: &Progress,
) -> Result<Greeted, BackendError> {
    let hung_up = match log_in_fully(dialer, meant, hearing, progress).await? {
        Ok(greeted) => return Ok(greeted),
        Err(error) => error,
    };
    if meant.hang_up == HangUp::IsAFailure {
        return Err(refused(dialer, hung_up));
    }
    // Some proxies hang up on what they do not know. But so does a server that is going down, and one that
    // comes back is not to be spoken to plainly ever after.
    let (mut requests, mover) = log_in_plainly(dialer, progress).await?;
    if let Ok(greeted) = log_in_fully(dialer, meant, hearing, progress).await? {
        return Ok(greeted);
    }
    meant.confirm(dialer, &mut requests).await?;
    Ok(Greeted { requests, mover, hears: Hears::default(), dialect: Dialect::Touchy })
}

/// The inner error is that of the other end hanging up over it.
async fn log_in_fully(
    dialer: &Dialer,
    meant: Meant<'_>,
    hearing: Option<&Hearing>,
    progress: &Progress,
) -> Result<Result<Greeted, RedisError>, BackendError> {
    let hear = hearing.map(|Hearing { ears, home, .. }| {
        let (ears, home) = (ears.clone(), home.clone());
        move |push: PushInfo| ears.hear(&push, &home)
    });
    let login = dialer.login(progress).await?;
    let (requests, mover) = match speak(dialer, &login, hear, progress).await? {
        Ok(connected) => connected,
        Err(error) if server_error::is_hang_up(&error) => return Ok(Err(error)),
        // Older servers and some proxies know RESP2 only, which serves as well.
        Err(error) if knows_no_hello(&error) => {
            let (mut requests, mover) = log_in_plainly(dialer, progress).await?;
            meant.confirm(dialer, &mut requests).await?;
            let (hears, dialect) = (Hears::default(), Dialect::Plain);
            return Ok(Ok(Greeted { requests, mover, hears, dialect }));
        }
        Err(error) => return Err(refused(dialer, error)),
    };
    let (mut to_confirm, to_listen) = (requests.clone(), requests.clone());
    let listening = async {
        match hearing {
            Some(hearing) => listen(to_listen, hearing).await,
            None => Ok(Hears::default()),
        }
    };
    // In one flight: each is sent before any is answered, in this order.
    let (confirmed, hears) =
        tokio::join!(biased; meant.confirm(dialer, &mut to_confirm), listening);
    confirmed?;
    Ok(hears.map(|hears| Greeted { requests, mover, hears, dialect: Dialect::Full }))
}

/// With nothing that a proxy could stumble over.
pub(crate) async fn log_in_plainly(
    dialer: &Dialer,
    progress: &Progress,
) -> Result<(MultiplexedConnection, Mover), BackendError> {
    let login = dialer.login(progress).await?;
    let refused = |error| refused(dialer, error);
    let anonymous = redis::RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP2)
        .set_skip_set_lib_name();
    let (mut requests, mover) =
        speak(dialer, &anonymous, None::<fn(PushInfo)>, progress).await?.map_err(refused)?;
    // By hand, as the library does not tell why a password is refused.
    let mut ask = async |command: &Cmd| requests.req_packed_command(command).await?.extract_error();
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
        Err(error) if error.code().is_none() || server_error::is_full(&error) => {
            Err(refused(error))
        }
        Ok(_) | Err(_) => Ok((requests, mover)),
    }
}

/// Asks to be told of changes and calls, in one flight. A user without the right to it waits by asking. The error
/// is that of the other end hanging up over it.
async fn listen(connection: MultiplexedConnection, hearing: &Hearing) -> Result<Hears, RedisError> {
    let [mut first, mut second, mut third] = std::array::from_fn(|_| connection.clone());
    let mut fourth = connection;
    let changes = async {
        let mut track = redis::cmd("CLIENT");
        // Only what is read behind `CLIENT CACHING YES`, and not what is changed on this connection.
        track.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
        first.req_packed_command(&track).await?.extract_error()
    };
    let Hearing { home, calls, .. } = hearing;
    let Some(Calls { channel, probe, names }) = calls else {
        let changes = unless_hung_up(changes.await)?.is_ok();
        return Ok(Hears { changes, calls: false });
    };
    let slot = home.some_slot();
    let question = probe(slot);
    let heard = async { question.query_async::<u64>(&mut third).await };
    let subscribed = second.subscribe(channel.name());
    let in_shard = home.listen(&mut fourth, *channel);
    let (changes, subscribed, heard, ()) =
        tokio::join!(biased; changes, subscribed, heard, in_shard);
    let changes = unless_hung_up(changes)?.is_ok();
    let subscribed = unless_hung_up(subscribed)?.is_ok();
    let mut heard = unless_hung_up(heard)?;
    if heard.as_ref().is_err_and(server_error::crosses_slots) && !names.are_tagged() {
        names.tag_all();
        heard = unless_hung_up(probe(slot).query_async(&mut fourth).await)?;
    }
    let calls = match heard {
        // More than one: the server may not have noticed yet that an earlier connection is gone.
        Ok(ears) => subscribed && ears >= 1,
        // Passes by itself; the claims will tell.
        Err(error) => subscribed && server_error::passes(&error),
    };
    Ok(Hears { changes, calls })
}

fn unless_hung_up<T>(answer: Result<T, RedisError>) -> Result<Result<T, RedisError>, RedisError> {
    match answer {
        Err(error) if server_error::is_hang_up(&error) => Err(error),
        answer => Ok(answer),
    }
}

/// Asks `command` on a connection that is for it alone.
pub(crate) async fn ask_once(
    dialer: &Dialer,
    limit: Duration,
    command: &Cmd,
) -> Result<Value, BackendError> {
    let progress = Progress::default();
    let asking = async {
        // No pushes are expected, and this is understood by all.
        let login = dialer.login(&progress).await?.set_protocol(ProtocolVersion::RESP2);
        let stream = dialer.dial(&progress).await?;
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let opened = MultiplexedConnection::new_with_config(&login, stream, config).await;
        let (mut connection, mover) = opened.map_err(|error| refused(dialer, error))?;
        progress.note(Reached::LogIn);
        let _mover = Mover::start(mover);
        let answer = connection.req_packed_command(command).await;
        answer.and_then(Value::extract_error).map_err(|error| refused(dialer, error))
    };
    timeout(limit, asking)
        .await
        .unwrap_or_else(|_| Err(progress.too_slow(&dialer.endpoint().to_string(), limit)))
}

/// Dials and greets. The inner error is the server's answer to the greeting; pushes need RESP3.
pub(crate) async fn speak(
    dialer: &Dialer,
    login: &redis::RedisConnectionInfo,
    hear: Option<impl Fn(PushInfo) + Send + Sync + 'static>,
    progress: &Progress,
) -> Result<Result<(MultiplexedConnection, Mover), RedisError>, BackendError> {
    let stream = dialer.dial(progress).await?;
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
    Ok(opened.map(|(connection, mover)| {
        progress.note(Reached::LogIn);
        (connection, Mover::start(mover))
    }))
}

pub(crate) fn knows_no_hello(error: &RedisError) -> bool {
    let unknown = |detail: &str| detail.contains("unknown command");
    error.kind() == redis::ErrorKind::RESP3NotSupported || error.detail().is_some_and(unknown)
}

fn refused(dialer: &Dialer, error: RedisError) -> BackendError {
    let endpoint = dialer.endpoint();
    if endpoint.credentials.is_some() && server_error::is_about_the_login(&error) {
        let message = format!(
            "Redis at {endpoint} does not accept the user or the password that the provider gives"
        );
        // It may give others in a moment.
        return BackendError::new(FailureKind::NotApplied, message)
            .remedy("check what `.credentials(..)` of the builder gives against the server's users; it is asked again for each new connection")
            .because(error);
    }
    let failure = server_error::failure(&dialer.endpoint().to_string(), error);
    // Nothing but the greeting has been sent yet.
    failure.before_sending()
}
