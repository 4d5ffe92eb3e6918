//! The current master of a service, according to its sentinels.
//!
//! One connection to each sentinel is kept open. Each sentinel is queried every second, when it publishes that the
//! master has changed, and whenever a connection to the master is made. The answer with the latest configuration
//! epoch counts. Other sentinels learn of a failover up to seconds later. Until then they name the old master,
//! which may still answer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ProtocolVersion, PushInfo, PushKind, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::BackendConfig;
use crate::backend::backoff::Backoff;
use crate::backend::redis::discovery::sentinel_url::Service;
use crate::backend::redis::net::handshake::{lacks_hello, open};
use crate::backend::redis::net::io_task::IoTask;
use crate::backend::redis::net::progress::ConnectProgress;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::server_error;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::jitter;

/// The interval of queries, as the message about a new master may be lost.
const QUERY_EVERY: Duration = Duration::from_secs(1);

/// The wait for the other sentinels after the first answer. A sentinel that is down must not delay a connection longer.
const GRACE: Duration = Duration::from_millis(50);

/// How long the last answer of an unreachable sentinel counts. The others learn what it knew within about two seconds.
const STALE: Duration = Duration::from_secs(10);

/// The sentinels of one service. Dropping this ends the connections to them.
pub(crate) struct Sentinels {
    watch: Arc<MasterWatch>,
    master: Dialer,
    watchers: Vec<AbortHandle>,
}

/// The last answers of all sentinels. A task per sentinel updates its own entry.
struct MasterWatch {
    service: String,
    clock: Clock,
    /// The time limit for connecting to one sentinel.
    connect_limit: Duration,
    /// The time limit for one answer.
    limit: Duration,
    /// Incremented to query all sentinels immediately.
    round: watch::Sender<u64>,
    replies: watch::Sender<Vec<SentinelReply>>,
}

/// The last answer of one sentinel.
#[derive(Clone, Debug, Default)]
struct SentinelReply {
    /// The round of the last query.
    round: u64,
    master: Option<(MasterAddress, Instant)>,
    /// Why the last query has failed.
    error: Option<BackendError>,
}

/// A master as named by a sentinel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MasterAddress {
    /// Counts the failovers; zero if the sentinel does not report it.
    epoch: u64,
    host: String,
    port: u16,
}

impl Sentinels {
    /// Reads the certificate files and starts one task per sentinel.
    pub(crate) async fn new(
        service: Service,
        config: BackendConfig<'_>,
    ) -> Result<Self, LockError> {
        let master = Dialer::new(service.master.of_pool(config)?).await?;
        let mut dialers = Vec::new();
        for sentinel in service.sentinels {
            dialers.push(master.to(sentinel.with_credentials(config.sentinel_credentials)?)?);
        }
        let watch = Arc::new(MasterWatch {
            service: service.name,
            clock: config.clock,
            // The other half is left for the connection to the master.
            connect_limit: config.connect_timeout / 2,
            limit: config.request_timeout,
            round: watch::Sender::default(),
            replies: watch::Sender::new(vec![SentinelReply::default(); dialers.len()]),
        });
        let run = |(at, dialer)| tokio::spawn(watch.clone().run(at, dialer)).abort_handle();
        let watchers = dialers.into_iter().enumerate().map(run).collect();
        Ok(Self { watch, master, watchers })
    }

    /// Queries all sentinels and returns a dialer to the master.
    pub(crate) async fn master(&self, last: Option<&Endpoint>) -> Result<Dialer, BackendError> {
        self.watch.query_all().await;
        let replies = self.watch.replies.borrow().clone();
        let Some(MasterAddress { host, port, .. }) =
            best(&replies, self.watch.clock.now(), last).cloned()
        else {
            return Err(self.watch.no_master(&replies));
        };
        let endpoint = Endpoint { host, port, ..self.master.endpoint().clone() };
        let message = |error| BackendError::new(FailureKind::NotApplied, format!("{error}"));
        self.master.to(endpoint).map_err(message)
    }

    /// Returns when the master is not at `from`.
    pub(crate) async fn moved(&self, from: &Endpoint) {
        let mut replies = self.watch.replies.subscribe();
        let elsewhere = |replies: &Vec<SentinelReply>| {
            let best = best(replies, self.watch.clock.now(), Some(from));
            best.is_some_and(|best| !best.is_at(from))
        };
        if replies.wait_for(elsewhere).await.is_err() {
            // Closed: no more answers arrive.
            std::future::pending::<()>().await;
        }
    }

    /// The settings of connections to the master. Host and port have no meaning.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        self.master.endpoint()
    }

    pub(crate) fn close(&self) {
        self.watchers.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the master of `{}`", self.watch.service)
    }
}

impl MasterAddress {
    fn is_at(&self, endpoint: &Endpoint) -> bool {
        self.host == endpoint.host && self.port == endpoint.port
    }
}

/// The master with the latest epoch; among answers of the same epoch the one that most sentinels name, then `last`.
fn best<'a>(
    replies: &'a [SentinelReply],
    now: Instant,
    last: Option<&Endpoint>,
) -> Option<&'a MasterAddress> {
    let valid = |reply: &'a SentinelReply| match &reply.master {
        Some((master, answered_at)) if now.since(*answered_at) < STALE => Some(master),
        _ => None,
    };
    let all: Vec<_> = replies.iter().filter_map(valid).collect();
    let rank = |master: &&MasterAddress| {
        let votes = all.iter().filter(|other| *other == master).count();
        (master.epoch, votes, last.is_some_and(|last| master.is_at(last)))
    };
    // The first of equals: `max_by_key` would take the last.
    all.iter().rev().copied().max_by_key(rank)
}

impl MasterWatch {
    /// Returns when all sentinels have answered or failed, or [`GRACE`] after the first answer.
    async fn query_all(&self) {
        let mut replies = self.replies.subscribe();
        let mut round = 0;
        self.round.send_modify(|last| {
            *last += 1;
            round = *last;
        });
        let answered = |reply: &SentinelReply| reply.round >= round;
        let all = |replies: &Vec<SentinelReply>| replies.iter().all(answered);
        let one = |replies: &Vec<SentinelReply>| {
            all(replies) || replies.iter().any(|reply| answered(reply) && reply.error.is_none())
        };
        if timeout(self.connect_limit, replies.wait_for(one)).await.is_ok() {
            let _ = timeout(GRACE, replies.wait_for(all)).await;
        }
    }

    fn record(&self, at: usize, round: u64, answer: Result<MasterAddress, BackendError>) {
        let now = self.clock.now();
        self.replies.send_modify(|replies| {
            if let Some(reply) = replies.get_mut(at) {
                reply.round = round;
                match answer {
                    Ok(master) => {
                        reply.master = Some((master, now));
                        reply.error = None;
                    }
                    Err(error) => reply.error = Some(error),
                }
            }
        });
    }

    /// Keeps a connection to one sentinel open and queries it until the task is aborted.
    async fn run(self: Arc<Self>, at: usize, dialer: Dialer) {
        let mut rounds = self.round.subscribe();
        let mut backoff = Backoff::new(Duration::from_millis(50), QUERY_EVERY);
        loop {
            let round = *rounds.borrow_and_update();
            let connected = timeout(self.connect_limit, SentinelConnection::connect(&dialer)).await;
            match connected.unwrap_or_else(|_| Err(silent(&dialer))) {
                Ok(sentinel) => {
                    let EndedConnection { answered_for, failure } =
                        self.query_while_up(at, &dialer, sentinel, &mut rounds).await;
                    backoff.ended(answered_for);
                    if let Some((round, error)) = failure {
                        self.record(at, round, Err(error));
                    }
                }
                Err(error) => self.record(at, round, Err(error)),
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.next()) => {}
                Ok(()) = rounds.changed() => {}
            }
        }
    }

    /// Queries over one connection as long as it answers.
    async fn query_while_up(
        &self,
        at: usize,
        dialer: &Dialer,
        mut sentinel: SentinelConnection,
        rounds: &mut watch::Receiver<u64>,
    ) -> EndedConnection {
        let up_since = self.clock.now();
        let mut answered = None;
        let failure = loop {
            let round = *rounds.borrow_and_update();
            match timeout(self.limit, sentinel.query(&self.service)).await {
                Ok(Ok(Some(master))) => self.record(at, round, Ok(master)),
                Ok(Ok(None)) => self.record(at, round, Err(self.unknown(dialer))),
                Ok(Err(error)) if error.code().is_some() => {
                    self.record(at, round, Err(refused(dialer, error)));
                }
                Ok(Err(_)) if answered.is_some() => break None,
                Ok(Err(error)) => break Some((round, refused(dialer, error))),
                Err(_) => break Some((round, silent(dialer))),
            }
            answered = Some(self.clock.now());
            tokio::select! {
                () = tokio::time::sleep(jitter::below(QUERY_EVERY)) => {}
                () = sentinel.switched.notified() => {}
                Ok(()) = rounds.changed() => {}
                () = sentinel.io.ended() => break None,
            }
        };
        let answered_for = answered.map_or(Duration::ZERO, |answered| answered.since(up_since));
        EndedConnection { answered_for, failure }
    }

    fn unknown(&self, dialer: &Dialer) -> BackendError {
        let (endpoint, service) = (dialer.endpoint(), &self.service);
        let message =
            format!("the sentinel at {endpoint} knows no master with the name `{service}`");
        BackendError::new(FailureKind::Rejected, message).remedy(
            "put the name that follows `sentinel monitor` in the sentinels' configuration into the URL: `redis+sentinel://host:26379/name`",
        )
    }

    /// Why no master is known. An error that needs a change of the configuration comes before one that may pass.
    fn no_master(&self, replies: &[SentinelReply]) -> BackendError {
        let errors = || replies.iter().filter_map(|reply| reply.error.as_ref());
        let rejected = errors().find(|error| error.kind() == FailureKind::Rejected);
        if let Some(error) = rejected {
            return error.clone();
        }
        let service = &self.service;
        let message = match errors().next() {
            Some(error) => format!("no sentinel of `{service}` is reachable: {error}"),
            None => format!("no sentinel of `{service}` answers in time"),
        };
        BackendError::new(FailureKind::NotApplied, message).remedy(
            "check that the sentinels are up and reachable, and their hosts and ports (26379 if left out) in the URL",
        )
    }
}

/// How a connection to a sentinel has ended.
struct EndedConnection {
    /// How long after the log-in the last answer arrived.
    answered_for: Duration,
    /// The round and error of the last query, if the connection never answered or has become silent.
    failure: Option<(u64, BackendError)>,
}

/// A connection to one sentinel.
struct SentinelConnection {
    requests: MultiplexedConnection,
    io: IoTask,
    /// Notified when the sentinel publishes a new master.
    switched: Arc<Notify>,
}

impl SentinelConnection {
    async fn connect(dialer: &Dialer) -> Result<Self, BackendError> {
        let switched = Arc::<Notify>::default();
        let notify = switched.clone();
        let on_push = move |push: PushInfo| {
            if push.kind == PushKind::Message {
                notify.notify_one();
            }
        };
        // Never reported: a sentinel that is too slow is left out.
        let progress = ConnectProgress::default();
        let login = dialer.login(&progress).await?;
        let (mut requests, io) = match open(dialer, &login, Some(on_push), &progress).await? {
            Ok(opened) => opened,
            Err(error) if lacks_hello(&error) => {
                let login = login.set_protocol(ProtocolVersion::RESP2);
                let (requests, io) = open(dialer, &login, None::<fn(PushInfo)>, &progress)
                    .await?
                    .map_err(|error| refused(dialer, error))?;
                return Ok(Self { requests, io, switched });
            }
            Err(error) => return Err(refused(dialer, error)),
        };
        // Without the right to subscribe, the regular queries find a new master.
        let _ = requests.subscribe("+switch-master").await;
        Ok(Self { requests, io, switched })
    }

    /// `None` if the sentinel does not know the service.
    async fn query(&mut self, service: &str) -> Result<Option<MasterAddress>, RedisError> {
        let command = |name: &str| {
            let mut command = redis::cmd("SENTINEL");
            command.arg(name).arg(service);
            command
        };
        // The epoch is read first. After a failover between the two commands the new master is recorded with the old
        // epoch, which the next query corrects. The old master is never recorded with the new epoch.
        let (details, address) = (command("MASTER"), command("GET-MASTER-ADDR-BY-NAME"));
        let mut second = self.requests.clone();
        let (details, address) = tokio::join!(biased;
            details.query_async::<Value>(&mut self.requests),
            address.query_async::<Option<(String, u16)>>(&mut second)
        );
        let epoch = epoch(&details);
        Ok(address?.map(|(host, port)| MasterAddress { epoch, host, port }))
    }
}

/// The `config-epoch` of a `SENTINEL MASTER` answer. Zero if the user has no right to it or the service is unknown.
fn epoch(answer: &Result<Value, RedisError>) -> u64 {
    let text = |value: &Value| match value {
        Value::BulkString(text) => String::from_utf8(text.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    };
    let is_epoch = |name: &Value| text(name).as_deref() == Some("config-epoch");
    let epoch = match answer {
        Ok(Value::Map(fields)) => {
            fields.iter().find(|(name, _)| is_epoch(name)).map(|field| &field.1)
        }
        Ok(Value::Array(parts)) => {
            parts.chunks_exact(2).find(|field| is_epoch(&field[0])).map(|field| &field[1])
        }
        _ => None,
    };
    epoch.and_then(text).and_then(|epoch| epoch.parse().ok()).unwrap_or_default()
}

#[cold]
fn refused(dialer: &Dialer, error: RedisError) -> BackendError {
    let endpoint = dialer.endpoint();
    let wrong = |what: &str, remedy| {
        let message = format!("the sentinel at {endpoint} {what}");
        BackendError::new(FailureKind::Rejected, message).remedy(remedy)
    };
    let is_refused_login = match error.code() {
        Some(code) => code == "WRONGPASS",
        None => error.kind() == redis::ErrorKind::AuthenticationFailed,
    };
    match error.code() {
        Some("NOAUTH") => wrong(
            "wants a password",
            "put it into the URL: `?sentinel_password=password`, with `&sentinel_user=name` if it is not the default user's; the part before the `@` is only for the master",
        ),
        _ if is_refused_login => wrong(
            "does not accept the user or the password",
            "check `?sentinel_user=` and `&sentinel_password=` in the URL; special characters are percent-encoded there",
        ),
        Some("NOPERM") => wrong(
            "does not let this user ask for the master",
            "allow its ACL user `+hello +sentinel|get-master-addr-by-name +sentinel|master +subscribe &+switch-master`",
        ),
        // The server is not a sentinel.
        Some("ERR") if error.detail().is_some_and(|detail| detail.contains("unknown command")) => {
            wrong(
                "is not a sentinel",
                "name sentinels in the URL, usually at port 26379; a single server is `redis://host:6379`",
            )
        }
        _ => server_error::failure(&format!("{endpoint} (a sentinel)"), error).before_sending(),
    }
}

#[cold]
fn silent(dialer: &Dialer) -> BackendError {
    let message = format!("the sentinel at {} does not answer", dialer.endpoint());
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("check that it is up and reachable, and its host and port in the URL")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(epoch: u64, port: u16, answered_at: u64) -> SentinelReply {
        let master = MasterAddress { epoch, host: "h".to_owned(), port };
        SentinelReply {
            master: Some((master, Instant::from_nanos(answered_at * 1_000_000_000))),
            ..SentinelReply::default()
        }
    }

    #[test]
    fn the_latest_epoch_counts_then_most_votes_then_the_last_master() {
        let now = Instant::from_nanos(20_000_000_000);
        let last = Endpoint::parse("redis://h:2").unwrap();
        let best =
            |replies: &[SentinelReply]| best(replies, now, Some(&last)).map(|master| master.port);
        assert_eq!(best(&[]), None);
        assert_eq!(best(&[SentinelReply::default(), reply(0, 1, 20)]), Some(1));
        // One sentinel has learnt of the failover, two have not.
        assert_eq!(best(&[reply(3, 2, 20), reply(3, 2, 20), reply(4, 1, 20)]), Some(1));
        assert_eq!(best(&[reply(3, 2, 20), reply(3, 1, 20), reply(3, 1, 20)]), Some(1));
        assert_eq!(best(&[reply(3, 1, 20), reply(3, 2, 20)]), Some(2));
        assert_eq!(best(&[reply(3, 1, 20), reply(3, 3, 20)]), Some(1));
        // The answer of an unreachable sentinel counts for a while.
        assert_eq!(best(&[reply(3, 2, 20), reply(4, 1, 11)]), Some(1));
        assert_eq!(best(&[reply(3, 2, 20), reply(4, 1, 10)]), Some(2));
    }

    #[test]
    fn the_epoch_is_read_in_both_protocols() {
        let text = |text: &str| Value::BulkString(text.into());
        let (name, value) = (text("config-epoch"), text("7"));
        let array = vec![text("name"), text("m"), name.clone(), value.clone()];
        assert_eq!(epoch(&Ok(Value::Array(array))), 7);
        assert_eq!(epoch(&Ok(Value::Map(vec![(name, value)]))), 7);
        assert_eq!(epoch(&Ok(Value::Nil)), 0);
    }
}
