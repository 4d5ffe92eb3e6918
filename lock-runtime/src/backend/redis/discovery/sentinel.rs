//! Who the master is, asked of its sentinels.
//!
//! One connection to each sentinel, kept up: it is asked about each second, at once when it says that the
//! master has changed, and at once whenever a connection to the master has to be made. The master is what the
//! sentinel with the latest configuration says: the others learn of a failover up to seconds later, and
//! go on naming the old master, which may still answer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ProtocolVersion, PushInfo, PushKind, RedisError, Value};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::BackendConfig;
use crate::backend::redis::conn::backoff::Backoff;
use crate::backend::redis::discovery::sentinel_url::Service;
use crate::backend::redis::net::handshake::{Progress, knows_no_hello, speak};
use crate::backend::redis::net::io_task::Mover;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::server_error;
use crate::backend::redis::url::Endpoint;
use crate::backend::{BackendError, FailureKind, Warning};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::jitter;

/// A message about a new master may get lost.
const LOOK: Duration = Duration::from_secs(1);

/// How long sentinels that answer may be waited for when one has. One that is gone must not cost more.
const GRACE: Duration = Duration::from_millis(50);

/// How long the word of a sentinel counts that cannot be asked any more. The others know what it knew
/// within about two seconds.
const STALE: Duration = Duration::from_secs(10);

/// The sentinels of one service.
pub(crate) struct Sentinels {
    board: Arc<Board>,
    master: Dialer,
    watchers: Vec<AbortHandle>,
}

/// What all sentinels have said.
struct Board {
    service: String,
    clock: Clock,
    /// How long one sentinel may take to be connected to.
    connect_limit: Duration,
    /// How long it may take to answer.
    limit: Duration,
    /// Counted up to have all asked at once.
    round: watch::Sender<u64>,
    words: watch::Sender<Vec<Word>>,
}

/// What one sentinel has said last.
#[derive(Clone, Debug, Default)]
struct Word {
    /// The round in which it was asked.
    round: u64,
    master: Option<(Master, Instant)>,
    /// Why there is no answer of this round.
    error: Option<BackendError>,
}

/// A master as a sentinel names it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Master {
    /// Counts the failovers; zero from a sentinel that does not tell.
    epoch: u64,
    host: String,
    port: u16,
}

impl Sentinels {
    /// Reads certificates, once, and begins to watch.
    pub(crate) async fn new(
        service: Service,
        config: BackendConfig<'_>,
    ) -> Result<Self, LockError> {
        let master = Dialer::new(service.master.of_pool(config)?).await?;
        let mut dialers = Vec::new();
        for sentinel in service.sentinels {
            dialers.push(master.to(sentinel.with_credentials(config.sentinel_credentials)?)?);
        }
        let board = Arc::new(Board {
            service: service.name,
            clock: config.clock,
            // What is left is for the master.
            connect_limit: config.connect_timeout / 2,
            limit: config.request_timeout,
            round: watch::Sender::default(),
            words: watch::Sender::new(vec![Word::default(); dialers.len()]),
        });
        let watch = |(at, dialer)| tokio::spawn(board.clone().watch(at, dialer)).abort_handle();
        let watchers = dialers.into_iter().enumerate().map(watch).collect();
        Ok(Self { board, master, watchers })
    }

    /// Asks all, and returns the way to the master.
    pub(crate) async fn master(&self, last: Option<&Endpoint>) -> Result<Dialer, BackendError> {
        self.board.ask_all().await;
        let words = self.board.words.borrow().clone();
        let Some(Master { host, port, .. }) = best(&words, self.board.clock.now(), last).cloned()
        else {
            return Err(self.board.nobody(&words));
        };
        let endpoint = Endpoint { host, port, ..self.master.endpoint().clone() };
        let message = |error| BackendError::new(FailureKind::NotApplied, format!("{error}"));
        self.master.to(endpoint).map_err(message)
    }

    /// Returns when the master is another one than `from`.
    pub(crate) async fn moved(&self, from: &Endpoint) {
        let mut words = self.board.words.subscribe();
        let elsewhere = |words: &Vec<Word>| {
            let best = best(words, self.board.clock.now(), Some(from));
            best.is_some_and(|best| !best.is_at(from))
        };
        if words.wait_for(elsewhere).await.is_err() {
            // Nobody watches any more.
            std::future::pending::<()>().await;
        }
    }

    pub(crate) fn replicas(&self) -> u16 {
        self.master.endpoint().replicas
    }

    pub(crate) fn warning(&self) -> Option<Warning> {
        self.master.endpoint().warning()
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
        write!(f, "the master of `{}`", self.board.service)
    }
}

impl Master {
    fn is_at(&self, endpoint: &Endpoint) -> bool {
        self.host == endpoint.host && self.port == endpoint.port
    }

    fn is_same_place(&self, other: &Self) -> bool {
        self.host == other.host && self.port == other.port
    }
}

/// The latest configuration counts; among words of the same one what most say, then where we are.
fn best<'a>(words: &'a [Word], now: Instant, last: Option<&Endpoint>) -> Option<&'a Master> {
    let valid = |word: &'a Word| match &word.master {
        Some((master, said)) if now.since(*said) < STALE => Some(master),
        _ => None,
    };
    let all: Vec<_> = words.iter().filter_map(valid).collect();
    let rank = |master: &&Master| {
        let alike = |other: &&&Master| other.epoch == master.epoch && other.is_same_place(master);
        let votes = all.iter().filter(alike).count();
        (master.epoch, votes, last.is_some_and(|last| master.is_at(last)))
    };
    // The first of equals: `max_by_key` would take the last.
    all.iter().rev().copied().max_by_key(rank)
}

impl Board {
    /// Returns when all have answered, or one has and the others do not hurry.
    async fn ask_all(&self) {
        let mut words = self.words.subscribe();
        let mut round = 0;
        self.round.send_modify(|last| {
            *last += 1;
            round = *last;
        });
        let answered = |word: &Word| word.round >= round;
        let all = |words: &Vec<Word>| words.iter().all(answered);
        let one = |words: &Vec<Word>| {
            all(words) || words.iter().any(|word| answered(word) && word.error.is_none())
        };
        if timeout(self.connect_limit, words.wait_for(one)).await.is_ok() {
            let _ = timeout(GRACE, words.wait_for(all)).await;
        }
    }

    fn post(&self, at: usize, round: u64, answer: Result<Master, BackendError>) {
        let now = self.clock.now();
        self.words.send_modify(|words| {
            if let Some(word) = words.get_mut(at) {
                word.round = round;
                match answer {
                    Ok(master) => {
                        word.master = Some((master, now));
                        word.error = None;
                    }
                    Err(error) => word.error = Some(error),
                }
            }
        });
    }

    /// Asks one sentinel, again and again.
    async fn watch(self: Arc<Self>, at: usize, dialer: Dialer) {
        let mut rounds = self.round.subscribe();
        let mut backoff = Backoff::new(Duration::from_millis(50), LOOK);
        loop {
            let round = *rounds.borrow_and_update();
            let connected = timeout(self.connect_limit, Sentinel::connect(&dialer)).await;
            match connected.unwrap_or_else(|_| Err(silent(&dialer))) {
                Ok(sentinel) => {
                    let Followed { answered_for, ended } =
                        self.follow(at, &dialer, sentinel, &mut rounds).await;
                    backoff.ended(answered_for);
                    if let Err((round, error)) = ended {
                        self.post(at, round, Err(error));
                    }
                }
                Err(error) => self.post(at, round, Err(error)),
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.next()) => {}
                Ok(()) = rounds.changed() => {}
            }
        }
    }

    /// Asks over one connection as long as it answers.
    async fn follow(
        &self,
        at: usize,
        dialer: &Dialer,
        mut sentinel: Sentinel,
        rounds: &mut watch::Receiver<u64>,
    ) -> Followed {
        let up_since = self.clock.now();
        let mut answered = None;
        let ended = loop {
            let round = *rounds.borrow_and_update();
            match timeout(self.limit, sentinel.ask(&self.service)).await {
                Ok(Ok(Some(master))) => self.post(at, round, Ok(master)),
                Ok(Ok(None)) => self.post(at, round, Err(self.unknown(dialer))),
                Ok(Err(error)) if error.code().is_some() => {
                    self.post(at, round, Err(refused(dialer, error)));
                }
                Ok(Err(_)) if answered.is_some() => break Ok(()),
                Ok(Err(error)) => break Err((round, refused(dialer, error))),
                Err(_) => break Err((round, silent(dialer))),
            }
            answered = Some(self.clock.now());
            tokio::select! {
                () = tokio::time::sleep(jitter::below(LOOK)) => {}
                () = sentinel.news.notified() => {}
                Ok(()) = rounds.changed() => {}
                () = sentinel.mover.ended() => break Ok(()),
            }
        };
        let answered_for = answered.map_or(Duration::ZERO, |answered| answered.since(up_since));
        Followed { answered_for, ended }
    }

    fn unknown(&self, dialer: &Dialer) -> BackendError {
        let (endpoint, service) = (dialer.endpoint(), &self.service);
        let message = format!("the sentinel at {endpoint} knows no master of the name `{service}`");
        BackendError::new(FailureKind::Rejected, message).remedy(
            "put the name behind `sentinel monitor` in the sentinels' configuration into the URL: `redis+sentinel://host:26379/name`",
        )
    }

    /// Why there is no master: what somebody has to see to comes before what may pass.
    fn nobody(&self, words: &[Word]) -> BackendError {
        let errors = || words.iter().filter_map(|word| word.error.as_ref());
        let refused = errors().find(|error| error.kind() == FailureKind::Rejected);
        if let Some(error) = refused {
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
struct Followed {
    /// How long after the log-in the last answer came.
    answered_for: Duration,
    /// Why there is no answer of this round, if it never gave one or does not hang up.
    ended: Result<(), (u64, BackendError)>,
}

/// A connection to one sentinel.
struct Sentinel {
    requests: MultiplexedConnection,
    mover: Mover,
    news: Arc<Notify>,
}

impl Sentinel {
    async fn connect(dialer: &Dialer) -> Result<Self, BackendError> {
        let news = Arc::<Notify>::default();
        let told = news.clone();
        let hear = move |push: PushInfo| {
            if push.kind == PushKind::Message {
                told.notify_one();
            }
        };
        // A sentinel that is too slow is just left out.
        let progress = Progress::default();
        let login = dialer.login(&progress).await?;
        let (mut requests, mover) = match speak(dialer, &login, Some(hear), &progress).await? {
            Ok(connected) => connected,
            Err(error) if knows_no_hello(&error) => {
                let login = login.set_protocol(ProtocolVersion::RESP2);
                let (requests, mover) = speak(dialer, &login, None::<fn(PushInfo)>, &progress)
                    .await?
                    .map_err(|error| refused(dialer, error))?;
                return Ok(Self { requests, mover, news });
            }
            Err(error) => return Err(refused(dialer, error)),
        };
        // Who may not is asked each second all the same.
        let _ = requests.subscribe("+switch-master").await;
        Ok(Self { requests, mover, news })
    }

    /// `None` if it does not know the service.
    async fn ask(&mut self, service: &str) -> Result<Option<Master>, RedisError> {
        let ask = |about: &str| {
            let mut ask = redis::cmd("SENTINEL");
            ask.arg(about).arg(service);
            ask
        };
        // The epoch first: if there is a failover between the two, the new master goes under the old epoch,
        // which is put right by the next look, and never the old one under the new.
        let (about, whereabouts) = (ask("MASTER"), ask("GET-MASTER-ADDR-BY-NAME"));
        let mut second = self.requests.clone();
        let (about, address) = tokio::join!(biased;
            about.query_async::<Value>(&mut self.requests),
            whereabouts.query_async::<Option<(String, u16)>>(&mut second)
        );
        let epoch = epoch(&about);
        Ok(address?.map(|(host, port)| Master { epoch, host, port }))
    }
}

/// Of a sentinel that does not tell it to this user, or does not know the service: zero.
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
    let is_wrong = error.kind() == redis::ErrorKind::AuthenticationFailed;
    match error.code() {
        Some("NOAUTH") => wrong(
            "wants a password",
            "put it into the URL: `?sentinel_password=password`, with `&sentinel_user=name` if it is not the default user's; what stands before the `@` is for the master alone",
        ),
        Some("WRONGPASS") => wrong("does not accept the user or the password", CHECK_LOGIN),
        None if is_wrong => wrong("does not accept the user or the password", CHECK_LOGIN),
        Some("NOPERM") => wrong(
            "does not let this user ask for the master",
            "allow its ACL user `+hello +sentinel|get-master-addr-by-name +sentinel|master +subscribe &+switch-master`",
        ),
        // A server that is no sentinel.
        Some("ERR") if error.detail().is_some_and(|detail| detail.contains("unknown command")) => {
            wrong(
                "is not a sentinel",
                "name sentinels in the URL, as a rule at port 26379; a server alone is `redis://host:6379`",
            )
        }
        _ => server_error::failure(&format!("{endpoint} (a sentinel)"), error).before_sending(),
    }
}

const CHECK_LOGIN: &str = "check `?sentinel_user=` and `&sentinel_password=` in the URL; special characters are percent-encoded there";

#[cold]
fn silent(dialer: &Dialer) -> BackendError {
    let message = format!("the sentinel at {} does not answer", dialer.endpoint());
    BackendError::new(FailureKind::NotApplied, message)
        .remedy("check that it is up and reachable, and its host and port in the URL")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(epoch: u64, port: u16, said: u64) -> Word {
        let master = Master { epoch, host: "h".to_owned(), port };
        Word {
            master: Some((master, Instant::from_nanos(said * 1_000_000_000))),
            ..Word::default()
        }
    }

    #[test]
    fn the_latest_configuration_counts_then_most_voices_then_where_we_are() {
        let now = Instant::from_nanos(20_000_000_000);
        let here = Endpoint::parse("redis://h:2").unwrap();
        let best = |words: &[Word]| best(words, now, Some(&here)).map(|master| master.port);
        assert_eq!(best(&[]), None);
        assert_eq!(best(&[Word::default(), word(0, 1, 20)]), Some(1));
        // One that has not learnt of the failover yet, and one that has.
        assert_eq!(best(&[word(3, 2, 20), word(3, 2, 20), word(4, 1, 20)]), Some(1));
        assert_eq!(best(&[word(3, 2, 20), word(3, 1, 20), word(3, 1, 20)]), Some(1));
        assert_eq!(best(&[word(3, 1, 20), word(3, 2, 20)]), Some(2));
        assert_eq!(best(&[word(3, 1, 20), word(3, 3, 20)]), Some(1));
        // One that cannot be asked any more, for a while and for long.
        assert_eq!(best(&[word(3, 2, 20), word(4, 1, 11)]), Some(1));
        assert_eq!(best(&[word(3, 2, 20), word(4, 1, 10)]), Some(2));
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
