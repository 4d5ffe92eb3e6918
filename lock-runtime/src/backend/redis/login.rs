//! The greeting of a connection: who we are, what we want to be told, and how much the other end understands.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, ProtocolVersion, PushInfo, RedisError, Value};
use tokio::time::timeout;

use super::ears::{Ears, Home};
use super::line::Channel;
use super::mover::Mover;
use super::reply;
use super::resolver::Resolver;
use super::stream::Dialer;
use crate::backend::{BackendError, Failure};

/// What the server may say without being asked.
pub(super) struct Hearing {
    /// Where its messages go, those that are meant.
    pub(super) ears: Arc<Ears>,
    pub(super) home: Home,
    /// For a pool whose processes stand in lines.
    pub(super) calls: Option<Calls>,
}

/// How a process is called that stands in the line of a lock.
pub(super) struct Calls {
    /// The channel on which this pool can be told.
    pub(super) channel: Channel,
    /// Finds out whether this user may do what the line of a lock needs, with a key of this slot.
    pub(super) probe: Box<dyn Fn(u16) -> Cmd + Send + Sync>,
}

/// What this user is told on this connection without asking.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hears {
    /// Changes of the keys that were read behind `CLIENT CACHING YES`.
    pub(super) changes: bool,
    /// Its own channel; and all commands of the line are allowed.
    pub(super) calls: bool,
}

/// How much of the protocol the other end speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Full,
    /// RESP2 without pushes.
    Plain,
    /// As plain, and it hangs up on a command that it does not know.
    Touchy,
}

/// A connection that may be used.
pub(super) struct Greeted {
    pub(super) requests: MultiplexedConnection,
    pub(super) mover: Mover,
    pub(super) hears: Hears,
    pub(super) dialect: Dialect,
}

/// Connects by `dialer`; `resolver` has to agree that this is the server that is meant.
pub(super) async fn log_in(
    dialer: &Dialer,
    resolver: &Resolver,
    hearing: Option<&Hearing>,
) -> Result<Greeted, BackendError> {
    if let Some(greeted) = log_in_fully(dialer, resolver, hearing).await? {
        return Ok(greeted);
    }
    // Some proxies hang up on what they do not know. But so does a server that is going down, and one that
    // comes back is not to be spoken to plainly ever after.
    let (mut requests, mover) = log_in_plainly(dialer).await?;
    if let Some(greeted) = log_in_fully(dialer, resolver, hearing).await? {
        return Ok(greeted);
    }
    resolver.confirm(dialer, &mut requests).await?;
    Ok(Greeted { requests, mover, hears: Hears::default(), dialect: Dialect::Touchy })
}

/// `None` if the other end has hung up over it.
async fn log_in_fully(
    dialer: &Dialer,
    resolver: &Resolver,
    hearing: Option<&Hearing>,
) -> Result<Option<Greeted>, BackendError> {
    let hear = hearing.map(|Hearing { ears, home, .. }| {
        let (ears, home) = (ears.clone(), home.clone());
        move |push: PushInfo| ears.hear(&push, &home)
    });
    let (mut requests, mover) = match speak(dialer, &dialer.endpoint().login, hear).await? {
        Ok(connected) => connected,
        Err(error) if reply::is_hang_up(&error) => return Ok(None),
        // Older servers and some proxies know RESP2 only, which serves as well.
        Err(error) if knows_no_hello(&error) => {
            let (mut requests, mover) = log_in_plainly(dialer).await?;
            resolver.confirm(dialer, &mut requests).await?;
            let (hears, dialect) = (Hears::default(), Dialect::Plain);
            return Ok(Some(Greeted { requests, mover, hears, dialect }));
        }
        Err(error) => return Err(refused(dialer, error)),
    };
    resolver.confirm(dialer, &mut requests).await?;
    let hears = match hearing {
        Some(hearing) => listen(&mut requests, hearing).await,
        None => Some(Hears::default()),
    };
    Ok(hears.map(|hears| Greeted { requests, mover, hears, dialect: Dialect::Full }))
}

/// With nothing that a proxy could stumble over.
pub(super) async fn log_in_plainly(
    dialer: &Dialer,
) -> Result<(MultiplexedConnection, Mover), BackendError> {
    let login = &dialer.endpoint().login;
    let refused = |error| refused(dialer, error);
    let nobody = redis::RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP2)
        .set_skip_set_lib_name();
    let (mut requests, mover) =
        speak(dialer, &nobody, None::<fn(PushInfo)>).await?.map_err(refused)?;
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
        Err(error) if error.code().is_none() => Err(refused(error)),
        Ok(_) | Err(_) => Ok((requests, mover)),
    }
}

/// Asks to be told of changes and calls. A user who may not, waits by asking. `None` if the other end has
/// hung up over it.
async fn listen(connection: &mut MultiplexedConnection, hearing: &Hearing) -> Option<Hears> {
    let mut track = redis::cmd("CLIENT");
    // Only what is read behind `CLIENT CACHING YES`, and not what is changed on this connection.
    track.arg("TRACKING").arg("ON").arg("OPTIN").arg("NOLOOP");
    let changes: Result<Value, _> = track.query_async(connection).await;
    if changes.as_ref().is_err_and(reply::is_hang_up) {
        return None;
    }
    let changes = changes.is_ok();
    let Hearing { home, calls, .. } = hearing;
    let Some(Calls { channel, probe }) = calls else {
        return Some(Hears { changes, calls: false });
    };
    let subscribed = connection.subscribe(channel.name()).await;
    let subscribed_to = subscribed.is_ok();
    let heard: Result<u64, _> = match subscribed {
        Ok(()) => probe(home.some_slot()).query_async(connection).await,
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

/// Asks `command` on a connection that is for it alone.
pub(super) async fn ask_once(
    dialer: &Dialer,
    patience: Duration,
    command: &Cmd,
) -> Result<Value, BackendError> {
    let asking = async {
        let stream = dialer.dial().await?;
        // No pushes are expected, and this is understood by all.
        let login = dialer.endpoint().login.clone().set_protocol(ProtocolVersion::RESP2);
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let opened = MultiplexedConnection::new_with_config(&login, stream, config).await;
        let (mut connection, mover) = opened.map_err(|error| refused(dialer, error))?;
        let _mover = Mover::start(mover);
        let answer = connection.req_packed_command(command).await;
        answer.and_then(Value::extract_error).map_err(|error| refused(dialer, error))
    };
    timeout(patience, asking)
        .await
        .unwrap_or_else(|_| Err(no_answer(&dialer.endpoint().to_string(), patience)))
}

pub(super) fn no_answer(server: &str, patience: Duration) -> BackendError {
    let message = format!("Redis at {server} did not answer within {patience:?}");
    BackendError::new(Failure::NotNow, message)
        .remedy("check that the server is up and reachable, and that the port speaks Redis, with TLS for `rediss://` and without for `redis://`")
}

/// Dials and greets. The inner error is the server's answer to the greeting; pushes need RESP3.
pub(super) async fn speak(
    dialer: &Dialer,
    login: &redis::RedisConnectionInfo,
    hear: Option<impl Fn(PushInfo) + Send + Sync + 'static>,
) -> Result<Result<(MultiplexedConnection, Mover), RedisError>, BackendError> {
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
    Ok(opened.map(|(connection, mover)| (connection, Mover::start(mover))))
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
