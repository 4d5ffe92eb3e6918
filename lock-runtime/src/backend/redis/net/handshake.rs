//! The handshake of a new connection: log-in, role check, subscriptions, and the protocol that the server understands.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, Pipeline, ProtocolVersion, PushInfo, RedisError, Value};
use tokio::time::timeout;

use crate::backend::redis::channel::Channel;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::direct::{self, DirectConnection};
use crate::backend::redis::net::io_task::IoTask;
use crate::backend::redis::net::progress::{ConnectProgress, ConnectStage};
use crate::backend::redis::net::role::RoleCheck;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::server_error;
use crate::backend::redis::url::{LIBRARY, LIBRARY_VERSION};
use crate::backend::{BackendError, FailureKind};

/// Receives the pushes of a connection, on the connection's task: methods must not block.
pub(crate) trait PushSink: Send + Sync {
    fn on_push(&self, push: &PushInfo, scope: &MessageScope);

    /// The connection is a new one: pushes may have been missed in between.
    fn resync(&self);

    /// The connection has ended, or a new one has failed.
    fn disconnected(&self, error: &BackendError);
}

/// What a connection subscribes to.
pub(crate) struct PushConfig {
    pub(crate) sink: Arc<dyn PushSink>,
    pub(crate) scope: MessageScope,
    /// For a pool that uses wait queues.
    pub(crate) queue: Option<QueueChannel>,
}

/// How the wait queues of the server notify a pool.
pub(crate) struct QueueChannel {
    pub(crate) channel: Channel,
    /// Builds a command that checks whether this user has all rights that a wait queue needs, with a key of the given
    /// slot.
    pub(crate) probe: Box<dyn Fn(u16) -> Cmd + Send + Sync>,
    /// The keys of `probe`.
    pub(crate) keyspace: Keyspace,
}

/// Which pushes arrive on a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PushSupport {
    /// Changes of the keys that were read after `CLIENT CACHING YES`.
    pub(crate) tracking: bool,
    /// Messages on the pool's channel; and all commands of the wait queue are allowed.
    pub(crate) queue: bool,
}

impl PushSupport {
    /// Whether one server answers. A proxy that spreads keys over servers offers neither.
    pub(crate) const fn is_of_one_server(self) -> bool {
        self.tracking || self.queue
    }
}

/// The part of the protocol that the server understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    Full,
    /// RESP2, without pushes.
    Plain,
    /// RESP2, and an unknown command makes the server hang up.
    Minimal,
}

/// The reaction to a server that hangs up during the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HangUp {
    /// The server may be a proxy that does not know the commands: a second handshake finds out.
    TryMinimal,
    /// The server was such a proxy last time, and is not tested again.
    UseMinimal,
    /// The server has completed a handshake before and cannot serve now.
    Fail,
}

/// A connection that has completed its handshake.
pub(crate) struct OpenConnection {
    pub(crate) requests: MultiplexedConnection,
    pub(crate) io: IoTask,
    pub(crate) pushes: PushSupport,
    pub(crate) dialect: Dialect,
}

/// One handshake, in three round trips: the socket, the log-in, and everything else.
pub(crate) struct Handshake<'a> {
    pub(crate) dialer: &'a Dialer,
    pub(crate) role: RoleCheck,
    pub(crate) hang_up: HangUp,
    pub(crate) pushes: Option<&'a PushConfig>,
    pub(crate) progress: &'a ConnectProgress,
}

impl Handshake<'_> {
    pub(crate) async fn run(&self) -> Result<OpenConnection, BackendError> {
        let hung_up = match self.run_full().await? {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        if self.hang_up == HangUp::Fail {
            return Err(refused(self.dialer, hung_up));
        }
        // Some proxies hang up on unknown commands, but so does a server that is shutting down. The second full
        // handshake keeps a server that has come back from being treated as a proxy.
        let (mut requests, io) = log_in_minimal(self.dialer, self.progress).await?;
        if self.hang_up == HangUp::TryMinimal
            && let Ok(opened) = self.run_full().await?
        {
            return Ok(opened);
        }
        self.role.run(self.dialer.endpoint(), &mut requests).await?;
        let (pushes, dialect) = (PushSupport::default(), Dialect::Minimal);
        Ok(OpenConnection { requests, io, pushes, dialect })
    }

    /// The inner error is returned if the server hangs up.
    async fn run_full(&self) -> Result<Result<OpenConnection, RedisError>, BackendError> {
        let Self { dialer, role, pushes, progress, .. } = self;
        let on_push = pushes.map(|PushConfig { sink, scope, .. }| {
            let (sink, scope) = (sink.clone(), scope.clone());
            move |push: PushInfo| sink.on_push(&push, &scope)
        });
        let login = dialer.login(progress).await?;
        let (requests, io) = match open(dialer, &login, on_push, progress).await? {
            Ok(opened) => opened,
            Err(error) if server_error::is_hang_up(&error) => return Ok(Err(error)),
            // Older servers and some proxies know RESP2 only, which is sufficient.
            Err(error) if lacks_hello(&error) => {
                let (mut requests, io) = log_in_minimal(dialer, progress).await?;
                role.run(dialer.endpoint(), &mut requests).await?;
                let (pushes, dialect) = (PushSupport::default(), Dialect::Plain);
                return Ok(Ok(OpenConnection { requests, io, pushes, dialect }));
            }
            Err(error) => return Err(refused(dialer, error)),
        };
        let (mut for_role, for_pushes) = (requests.clone(), requests.clone());
        let subscribed = async {
            match pushes {
                Some(config) => subscribe(for_pushes, config).await,
                None => Ok(PushSupport::default()),
            }
        };
        // One round trip: all requests are sent in this order before any is answered.
        let (checked, pushes) =
            tokio::join!(biased; role.run(dialer.endpoint(), &mut for_role), subscribed);
        checked?;
        match pushes {
            Ok(pushes) => Ok(Ok(OpenConnection { requests, io, pushes, dialect: Dialect::Full })),
            Err(error) if server_error::is_hang_up(&error) => Ok(Err(error)),
            Err(error) => Err(refused(dialer, error)),
        }
    }
}

/// Logs in with commands that every proxy knows.
pub(crate) async fn log_in_minimal(
    dialer: &Dialer,
    progress: &ConnectProgress,
) -> Result<(MultiplexedConnection, IoTask), BackendError> {
    let login = dialer.login(progress).await?;
    let refused = |error| refused(dialer, error);
    let anonymous = redis::RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP2)
        .set_skip_set_lib_name();
    let (mut requests, io) =
        open(dialer, &anonymous, None::<fn(PushInfo)>, progress).await?.map_err(refused)?;
    // Sent here because the client library hides why a password is refused.
    let mut send =
        async |command: &Cmd| requests.req_packed_command(command).await?.extract_error();
    if let Some(password) = login.password() {
        let mut auth = redis::cmd("AUTH");
        auth.arg(login.username()).arg(password);
        send(&auth).await.map_err(refused)?;
    }
    if login.db() != 0 {
        send(redis::cmd("SELECT").arg(login.db())).await.map_err(refused)?;
    }
    // Without a password this is the first command. A refusal also shows that the server answers.
    match send(&redis::cmd("PING")).await {
        Err(error) if error.code().is_none() || server_error::is_full(&error) => {
            Err(refused(error))
        }
        Ok(_) | Err(_) => Ok((requests, io)),
    }
}

/// Opens a connection without pushes to a server that knows `HELLO`. The server is a master if `role` requires one.
pub(crate) async fn open_direct(
    dialer: &Dialer,
    role: &RoleCheck,
    progress: &ConnectProgress,
) -> Result<(DirectConnection, IoTask), BackendError> {
    let login = dialer.login(progress).await?;
    let (mut requests, io) = direct::connection(dialer.dial(progress).await?);
    let io = IoTask::spawn(io);
    let mut greeting = Pipeline::new();
    if let Some(password) = login.password() {
        // Without a name, `AUTH` refuses a password for a default user that needs none; `HELLO` accepts it.
        greeting.cmd("AUTH").arg(login.username().unwrap_or("default")).arg(password);
    }
    if login.db() != 0 {
        greeting.cmd("SELECT").arg(login.db());
    }
    let required = greeting.len();
    for (name, value) in [("LIB-NAME", LIBRARY), ("LIB-VER", LIBRARY_VERSION)] {
        greeting.cmd("CLIENT").arg("SETINFO").arg(name).arg(value);
    }
    let answers = requests.send_all(&greeting).await.map_err(|error| refused(dialer, error))?;
    // Older servers do not know the name of a library.
    for answer in answers.into_iter().take(required) {
        answer.extract_error().map_err(|error| refused(dialer, error))?;
    }
    progress.note(ConnectStage::LogIn);
    role.run(dialer.endpoint(), &mut requests).await?;
    Ok((requests, io))
}

/// Turns on client tracking and subscribes to the pool's channels, in one round trip. Without the rights to do so,
/// a waiter polls. The error is returned if the server hangs up or cannot serve yet.
async fn subscribe(
    connection: MultiplexedConnection,
    config: &PushConfig,
) -> Result<PushSupport, RedisError> {
    let [mut first, mut second, mut third] = std::array::from_fn(|_| connection.clone());
    let mut fourth = connection;
    let tracking = async {
        let mut track = redis::cmd("CLIENT");
        // Only keys that are read after `CLIENT CACHING YES`, and no changes made on this connection.
        track.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
        first.req_packed_command(&track).await?.extract_error()
    };
    let PushConfig { scope, queue, .. } = config;
    let Some(QueueChannel { channel, probe, keyspace }) = queue else {
        let tracking = is_permitted(tracking.await)?;
        return Ok(PushSupport { tracking, queue: false });
    };
    let slot = scope.some_slot();
    let request = probe(slot);
    let probed = async { request.query_async::<u64>(&mut third).await };
    let subscribed = second.subscribe(channel.name());
    let in_shard = scope.subscribe(&mut fourth, *channel);
    let (tracking, subscribed, probed, ()) =
        tokio::join!(biased; tracking, subscribed, probed, in_shard);
    let (tracking, subscribed) = (is_permitted(tracking)?, is_permitted(subscribed)?);
    let mut probed = unless_hung_up(probed)?;
    if probed.as_ref().is_err_and(server_error::crosses_slots) && !keyspace.is_tagged() {
        keyspace.use_tags();
        probed = unless_hung_up(probe(slot).query_async(&mut fourth).await)?;
    }
    let queue = match probed {
        // More than one subscriber: the server may not have noticed the end of an earlier connection yet.
        Ok(subscribers) => subscribed && subscribers >= 1,
        // A transient error: the claims show whether the queue works.
        Err(error) => subscribed && server_error::is_transient(&error),
    };
    Ok(PushSupport { tracking, queue })
}

/// Whether the user may do this. A server that is busy says nothing about it, and the connection would be without pushes for
/// as long as it lasts.
fn is_permitted<T>(answer: Result<T, RedisError>) -> Result<bool, RedisError> {
    match unless_hung_up(answer)? {
        Ok(_) => Ok(true),
        Err(error) if server_error::is_transient(&error) => Err(error),
        Err(_) => Ok(false),
    }
}

fn unless_hung_up<T>(answer: Result<T, RedisError>) -> Result<Result<T, RedisError>, RedisError> {
    match answer {
        Err(error) if server_error::is_hang_up(&error) => Err(error),
        answer => Ok(answer),
    }
}

/// Sends `command` on a connection that is opened for it and closed after it.
pub(crate) async fn request_once(
    dialer: &Dialer,
    limit: Duration,
    command: &Cmd,
) -> Result<Value, BackendError> {
    let progress = ConnectProgress::default();
    let request = async {
        // All servers understand RESP2, and no pushes are expected.
        let login = dialer.login(&progress).await?.set_protocol(ProtocolVersion::RESP2);
        let stream = dialer.dial(&progress).await?;
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let opened = MultiplexedConnection::new_with_config(&login, stream, config).await;
        let (mut connection, io) = opened.map_err(|error| refused(dialer, error))?;
        progress.note(ConnectStage::LogIn);
        let _io = IoTask::spawn(io);
        let answer = connection.req_packed_command(command).await;
        answer.and_then(Value::extract_error).map_err(|error| refused(dialer, error))
    };
    timeout(limit, request)
        .await
        .unwrap_or_else(|_| Err(progress.too_slow(&dialer.endpoint().to_string(), limit)))
}

/// Dials and logs in. The inner error is the server's answer to the log-in. Pushes need RESP3.
pub(crate) async fn open(
    dialer: &Dialer,
    login: &redis::RedisConnectionInfo,
    on_push: Option<impl Fn(PushInfo) + Send + Sync + 'static>,
    progress: &ConnectProgress,
) -> Result<Result<(MultiplexedConnection, IoTask), RedisError>, BackendError> {
    let stream = dialer.dial(progress).await?;
    // The callers set time limits; those of the library would only add timers.
    let mut config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    if let Some(on_push) = on_push {
        config = config.set_push_sender(move |push: PushInfo| {
            on_push(push);
            Ok::<(), &'static str>(())
        });
    }
    let opened = MultiplexedConnection::new_with_config(login, stream, config).await;
    Ok(opened.map(|(connection, io)| {
        progress.note(ConnectStage::LogIn);
        (connection, IoTask::spawn(io))
    }))
}

/// Whether the server does not know `HELLO` or RESP3.
pub(crate) fn lacks_hello(error: &RedisError) -> bool {
    let unknown = |detail: &str| detail.contains("unknown command");
    error.kind() == redis::ErrorKind::RESP3NotSupported || error.detail().is_some_and(unknown)
}

fn refused(dialer: &Dialer, error: RedisError) -> BackendError {
    let endpoint = dialer.endpoint();
    if endpoint.credentials.is_some() && server_error::is_about_the_login(&error) {
        let message = format!(
            "Redis at {endpoint} does not accept the user or the password that the provider gives"
        );
        // The provider may return other credentials next time.
        return BackendError::new(FailureKind::NotApplied, message)
            .remedy("check what `.credentials(..)` of the builder returns against the server's users; it is called again for each new connection")
            .because(error);
    }
    // Only the handshake has been sent so far.
    server_error::failure(&endpoint.to_string(), error).before_sending()
}
