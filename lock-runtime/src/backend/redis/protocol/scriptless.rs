//! The locks of one server that runs no scripts, by plain commands: the same keys and tokens, so that processes
//! with and without scripts exclude each other.
//!
//! - **Acquire** is `SET NX PX`. Who is refused reads the key, and is told when it changes if the server can.
//!   An owner that finds its own token has asked before, and the reply got lost: its grant is extended,
//!   never shortened, by an exchange at the [`Desk`].
//! - **Renew and release** compare and write in one step: `SET IFEQ` (Redis 8.4, Valkey 8.1), `DELEX` (Redis 8.4)
//!   or `DELIFEQ` (Valkey 9.0), and where the server has none of them at the desk. `GET` and then `DEL` would
//!   free what is somebody else's by then, so a server that has neither is refused.
//! - **Several keys** are taken at the desk, all or none in one transaction. One `SET NX` after the other would
//!   have to give back what it got by then, and such a late release could meet a later grant to
//!   the same owner.
//! - **Fences** are refused. An `INCR` after the grant may be late: a holder that was frozen in between
//!   would get a greater fence than whoever came after it.
//! - **Waiting** is by client tracking or by polling. There is no line between processes: tokens name no channel,
//!   so those that stand in a line take this holder for one that knows none.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::BackendConfig;
use crate::backend::redis::conn::connection::Node;
use crate::backend::redis::conn::push::{Ears, Home};
use crate::backend::redis::keyspace::Names;
use crate::backend::redis::net::handshake::{Hearing, Opening};
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::scripted::{ROUNDING, holds, millis, unexpected};
use crate::backend::redis::protocol::wait_queue::{self, Token};
use crate::backend::redis::protocol::watch_transaction::{Desk, Exchanged, Seen};
use crate::backend::redis::server_error;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, LeaseRef,
    LeaseStatus, Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use crate::base::error::LockError;
use crate::base::jitter;
use crate::base::key::Key;
use crate::exec::events;

/// The server runs one transaction at a time.
const CHANGED_TOGETHER: usize = 256;

/// How often to start over when keys change under us. Each time somebody else got on.
const TRIES: usize = 4;

pub(crate) struct Plain {
    node: Arc<Node>,
    ears: Arc<Ears>,
    desk: Arc<Desk>,
    /// To [`make_changes`].
    jobs: mpsc::UnboundedSender<Job>,
    worker: AbortHandle,
    ways: Mutex<Ways>,
    warning: Warning,
}

/// Why there are no scripts.
#[derive(Debug)]
pub(crate) enum Cause {
    /// The URL says so.
    Wish,
    Refusal(BackendError),
}

/// How the server compares and writes in one step.
#[derive(Clone, Copy, Debug)]
struct Ways {
    delete: Option<Delete>,
    /// `SET IFEQ`.
    set: bool,
    /// `WATCH` and `MULTI`.
    watch: bool,
}

#[derive(Clone, Copy, Debug)]
enum Delete {
    Delex,
    Delifeq,
}

/// What becomes of keys that are their owner's.
#[derive(Clone, Copy, Debug)]
enum Write {
    Delete,
    /// The keys end after so many milliseconds.
    Expire(u64),
}

#[derive(Clone, Copy, Debug)]
struct Change<'a> {
    lease: &'a LeaseRef,
    write: Write,
    /// Whether a key that is not the owner's keeps the others as they are.
    is_whole: bool,
}

impl Plain {
    pub(crate) async fn connect(
        dialer: Dialer,
        names: &Names,
        config: BackendConfig<'_>,
        cause: Cause,
    ) -> Result<Self, LockError> {
        let BackendConfig { clock, request_timeout, .. } = config;
        let limits = config.limits();
        let opening = Opening::begin(clock, limits.connect);
        // Nobody calls under a name here.
        let (strays, _) = mpsc::unbounded_channel();
        let ears = Arc::new(Ears::new(strays, Arc::default(), clock));
        let hearing = Hearing { ears: ears.clone(), home: Home::Server, calls: None };
        let node =
            Node::connect(dialer, clock, limits, hearing).await.map_err(LockError::backend)?;
        let node = Arc::new(node);
        let probe = names.probe(0);
        let ways = Ways::of(&node, &probe);
        let ways = opening.ask(&node.server(), "what it can do without scripts", ways).await;
        let ways = ways.map_err(LockError::backend)?;
        let reason = match &cause {
            Cause::Wish => "the URL says `?scripts=off`",
            Cause::Refusal(refusal) => refusal.message(),
        };
        let server = node.server();
        if !ways.are_safe() {
            let message = format!(
                "Redis at {server} runs no scripts ({reason}), and has no other way to free a lock safely: neither `DELEX` or `DELIFEQ` with `SET IFEQ`, nor `WATCH`"
            );
            let error = BackendError::new(FailureKind::Rejected, message).remedy(
                "allow `EVAL` and `EVALSHA`, or `WATCH`, `UNWATCH`, `MULTI` and `EXEC`; if a proxy refuses them, connect to the server itself",
            );
            return Err(LockError::backend(error));
        }
        events::without_scripts(&server, reason);
        if let Some(warning) = node.warning() {
            events::backend_warning(&server, &warning);
        }
        let text = format!(
            "Redis at {server} runs no scripts ({reason}): locks have no fences and no line between processes"
        );
        let warning = Warning::new(
            text,
            "allow `EVAL` and `EVALSHA`, and leave `?scripts=off` out of the URL",
        );
        let desk = Arc::new(Desk::new(node.clone()));
        let (jobs, waiting) = mpsc::unbounded_channel();
        let worker =
            tokio::spawn(make_changes(desk.clone(), request_timeout, waiting)).abort_handle();
        Ok(Self { node, ears, desk, jobs, worker, ways: Mutex::new(ways), warning })
    }

    fn ways(&self) -> MutexGuard<'_, Ways> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries to take all keys of each of the claims. `false` if one is somebody else's, or perhaps our own.
    async fn take(&self, wanted: &[Wanted<'_>]) -> Vec<Result<bool, BackendError>> {
        let mut sets = Pipeline::new();
        for Wanted { claim, .. } in wanted.iter().filter(|wanted| !wanted.at_desk) {
            for key in claim.keys.iter() {
                let token = Token::new(&claim.owner, None);
                sets.cmd("SET").arg(key.as_str()).arg(token.as_bytes());
                sets.arg("NX").arg("PX").arg(millis(claim.kept_for()));
            }
        }
        let mut answers = if sets.is_empty() {
            Vec::new().into_iter()
        } else {
            match self.node.send_all(&sets).await {
                Ok(answers) => answers.into_iter(),
                Err(error) => return wanted.iter().map(|_| Err(error.clone())).collect(),
            }
        };
        let mut taken = Vec::with_capacity(wanted.len());
        for wanted in wanted {
            taken.push(if wanted.at_desk {
                self.take_at_desk(wanted.claim).await
            } else {
                match answers.next() {
                    Some(Ok(Value::Okay)) => Ok(true),
                    Some(Ok(Value::Nil)) => Ok(false),
                    Some(Ok(other)) => Err(unexpected(&other)),
                    Some(Err(error)) => Err(self.node.failure(error)),
                    None => Err(unexpected(&Value::Nil)),
                }
            });
        }
        taken
    }

    /// Takes the keys if each of them is free or the owner's already.
    async fn take_at_desk(&self, claim: &AcquireRequest) -> Result<bool, BackendError> {
        let token = Token::new(&claim.owner, None);
        let keys: Vec<_> = claim.keys.iter().collect();
        let mut has_written = false;
        for _ in 0..TRIES {
            let mut verdict = Ok(true);
            let mut count = 0;
            let decide = |seen: &[Seen]| {
                let mut writes = Vec::new();
                for (key, seen) in keys.iter().zip(seen) {
                    match seen {
                        Seen::Free => {
                            let mut set = redis::cmd("SET");
                            set.arg(key.as_str()).arg(token.as_bytes());
                            set.arg("PX").arg(millis(claim.kept_for()));
                            writes.push(set);
                        }
                        // Never shorter: this may be a late request of one that wanted it for less time.
                        Seen::Held { by, left } if wait_queue::is_of(by, &claim.owner) => {
                            if left.is_some_and(|left| left < claim.kept_for()) {
                                writes.push(expire(key, millis(claim.kept_for())));
                            }
                        }
                        Seen::Held { .. } => verdict = Ok(false),
                        Seen::Strange(error) | Seen::Failed(error) => verdict = Err(error.clone()),
                    }
                }
                if !matches!(verdict, Ok(true)) {
                    writes.clear();
                }
                count = writes.len();
                writes
            };
            match self.desk.exchange(&keys, decide).await? {
                Exchanged::Written(answers) => {
                    let is_done = |answer: &&Value| matches!(answer, Value::Okay | Value::Int(1));
                    if !matches!(verdict, Ok(true))
                        || answers.iter().filter(is_done).count() == count
                    {
                        return verdict;
                    }
                    // A key of its own was over in that moment; now it is free.
                    has_written = true;
                }
                Exchanged::Disturbed => {}
            }
        }
        if has_written {
            return Err(BackendError::new(
                FailureKind::MaybeApplied,
                "only some of the keys were taken",
            )
            .remedy("they are freed again; choose a longer ttl"));
        }
        Ok(false)
    }

    /// Reads the keys of `claims`, and has their changes told if the server can.
    async fn look(&self, claims: &[&AcquireRequest]) -> Vec<Look> {
        let tracked = self.node.hears().changes;
        let mut reads = Pipeline::new();
        for key in claims.iter().flat_map(|claim| claim.keys.iter()) {
            if tracked {
                reads.cmd("CLIENT").arg("CACHING").arg("YES");
            }
            reads.cmd("GET").arg(key.as_str()).cmd("PTTL").arg(key.as_str());
        }
        let mut answers = match self.node.send_all(&reads).await {
            Ok(answers) => answers.into_iter(),
            // What was to be taken was refused before.
            Err(error) => return claims.iter().map(|_| Look::Failed(error.clone())).collect(),
        };
        let mut look_at = |claim: &&AcquireRequest| {
            let mut look = Look::Free;
            for _ in claim.keys.iter() {
                if tracked {
                    answers.next();
                }
                if let (Some(holder), Some(left)) = (answers.next(), answers.next()) {
                    let seen = Seen::new(&self.node, holder, left);
                    look = look.and(seen, &claim.owner);
                }
            }
            look
        };
        claims.iter().map(&mut look_at).collect()
    }

    fn busy(&self, expires_in: Option<Duration>) -> AcquireOutcome {
        // A lost push costs no more than this.
        const LOOK: Duration = Duration::from_millis(800);
        if !self.node.hears().changes {
            return AcquireOutcome::contended(expires_in);
        }
        let look = jitter::below(LOOK);
        let retry_after = expires_in.map_or(look, |expires_in| look.min(expires_in + ROUNDING));
        AcquireOutcome::Contended { expires_in, wait_mode: WaitMode::Watch { retry_after } }
    }

    /// Makes each change to the keys that are its owner's. False if one was not.
    async fn change(&self, changes: &[Change<'_>]) -> Vec<Result<bool, BackendError>> {
        let mut outcomes = self.change_by_comparing(changes).await;
        let mut at_desk = Vec::new();
        for (at, change) in changes.iter().enumerate().filter(|(at, _)| outcomes[*at].is_none()) {
            let (reply, answer) = oneshot::channel();
            let Change { lease, write, is_whole } = *change;
            let job = Job { lease: lease.clone(), write, is_whole, reply };
            // Refused after the end, which the answer tells too.
            let _ = self.jobs.send(job);
            at_desk.push((at, answer));
        }
        for (at, answer) in at_desk {
            outcomes[at] = Some(answer.await.unwrap_or_else(|_| Err(closed())));
        }
        outcomes.into_iter().flatten().collect()
    }

    /// The changes that one command per key can make, in one write. `None` for the others.
    async fn change_by_comparing(
        &self,
        changes: &[Change<'_>],
    ) -> Vec<Option<Result<bool, BackendError>>> {
        let ways = *self.ways();
        let mut all = Pipeline::new();
        let mut counts = Vec::with_capacity(changes.len());
        for change in changes {
            let commands = ways.commands(change);
            counts.push(commands.len());
            for command in commands {
                all.add_command(command);
            }
        }
        if all.is_empty() {
            return changes.iter().map(|_| None).collect();
        }
        let mut answers = match self.node.send_all(&all).await {
            Ok(answers) => answers.into_iter(),
            Err(error) => {
                let failed = |&count: &usize| (count > 0).then(|| Err(error.clone()));
                return counts.iter().map(failed).collect();
            }
        };
        let mut outcomes = Vec::with_capacity(changes.len());
        for (change, count) in changes.iter().zip(counts) {
            let mut outcome = (count > 0).then_some(Ok(true));
            for answer in answers.by_ref().take(count) {
                match answer {
                    Ok(Value::Okay | Value::Int(1)) => {}
                    Ok(Value::Nil | Value::Int(0)) => outcome = outcome.map(|it| it.and(Ok(false))),
                    Ok(other) => outcome = Some(Err(unexpected(&other))),
                    // A key of another type is somebody else's.
                    Err(error) if server_error::is_wrong_type(&error) => {
                        outcome = outcome.map(|it| it.and(Ok(false)));
                    }
                    // The server is an older one by now.
                    Err(error) if ways.watch && server_error::is_unknown_command(&error) => {
                        self.ways().unlearn(change.write);
                        outcome = None;
                    }
                    Err(error) => outcome = Some(Err(self.node.failure(error))),
                }
            }
            outcomes.push(outcome);
        }
        outcomes
    }
}

/// A change that waits for the desk.
struct Job {
    lease: LeaseRef,
    write: Write,
    is_whole: bool,
    reply: oneshot::Sender<Result<bool, BackendError>>,
}

impl Job {
    fn change(&self) -> Change<'_> {
        Change { lease: &self.lease, write: self.write, is_whole: self.is_whole }
    }
}

/// Makes the changes that take an exchange: what has come by the time that the desk is free in one. Otherwise each would wait
/// for the two round trips of all before it. Lives as long as the store, so a caller that gives up breaks no exchange off.
async fn make_changes(
    desk: Arc<Desk>,
    request_timeout: Duration,
    mut jobs: mpsc::UnboundedReceiver<Job>,
) {
    let mut together = Vec::new();
    while jobs.recv_many(&mut together, CHANGED_TOGETHER).await > 0 {
        let changes: Vec<_> = together.iter().map(Job::change).collect();
        let outcomes = change_at_desk(&desk, request_timeout, &changes).await;
        for (job, outcome) in together.drain(..).zip(outcomes) {
            let _ = job.reply.send(outcome);
        }
    }
}

/// All changes in one exchange, or, if they are in each other's way, in several.
async fn change_at_desk(
    desk: &Desk,
    request_timeout: Duration,
    changes: &[Change<'_>],
) -> Vec<Result<bool, BackendError>> {
    for _ in 0..TRIES {
        let tried = timeout(request_timeout, try_at_desk(desk, changes)).await;
        match tried.unwrap_or_else(|_| Err(silent())) {
            Ok(Some(outcomes)) => return outcomes,
            Ok(None) => {}
            // One may be refused for another.
            Err(error) if changes.len() > 1 && error.kind() == FailureKind::Rejected => break,
            Err(error) => return changes.iter().map(|_| Err(error.clone())).collect(),
        }
    }
    if let [_] = changes {
        return vec![Err(BackendError::new(
            FailureKind::NotApplied,
            "the key was changed each time it was looked at",
        )
        .remedy("another client writes to the keys of locks; give them a prefix of their own"))];
    }
    let (some, others) = changes.split_at(changes.len() / 2);
    let mut outcomes = Box::pin(change_at_desk(desk, request_timeout, some)).await;
    outcomes.extend(Box::pin(change_at_desk(desk, request_timeout, others)).await);
    outcomes
}

#[cold]
fn closed() -> BackendError {
    BackendError::new(FailureKind::Rejected, "the connections to Redis are closed")
}

#[cold]
fn silent() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "Redis did not answer a transaction in time")
        .remedy(
            "check that the server is up and reachable; what it may still do is for our own keys",
        )
}

/// `None` if a key changed meanwhile.
async fn try_at_desk(
    desk: &Desk,
    changes: &[Change<'_>],
) -> Result<Option<Vec<Result<bool, BackendError>>>, BackendError> {
    let keys: Vec<_> = changes.iter().flat_map(|change| change.lease.keys.iter()).collect();
    let mut plans = Vec::with_capacity(changes.len());
    let decide = |seen: &[Seen]| {
        let (mut seen, mut writes) = (seen.iter(), Vec::new());
        for change in changes {
            let before = writes.len();
            let mut outcome = Ok(true);
            for (key, seen) in change.lease.keys.iter().zip(&mut seen) {
                match seen {
                    Seen::Held { by, .. } if wait_queue::is_of(by, &change.lease.owner) => {
                        writes.push(change.write.command(key));
                    }
                    Seen::Failed(error) => outcome = Err(error.clone()),
                    Seen::Held { .. } | Seen::Free | Seen::Strange(_) => {
                        outcome = outcome.and(Ok(false));
                    }
                }
            }
            if change.is_whole && !matches!(outcome, Ok(true)) {
                writes.truncate(before);
            }
            plans.push((outcome, writes.len() - before));
        }
        writes
    };
    let Exchanged::Written(answers) = desk.exchange(&keys, decide).await? else {
        return Ok(None);
    };
    let mut answers = answers.into_iter();
    let outcome = |(outcome, count): (Result<bool, BackendError>, usize)| {
        // Its time was over just before.
        let done = answers.by_ref().take(count).filter(|answer| *answer == Value::Int(1)).count();
        outcome.map(|all_ours| all_ours && done == count)
    };
    Ok(Some(plans.into_iter().map(outcome).collect()))
}

/// A claim that is being made.
struct Wanted<'a> {
    at: usize,
    claim: &'a AcquireRequest,
    at_desk: bool,
}

/// What stands in the way of a claim.
enum Look {
    /// Nothing any more.
    Free,
    /// Its own earlier request, for so long still.
    Own(Option<Duration>),
    /// Somebody else, for so long still if that is known.
    Busy(Option<Duration>),
    Failed(BackendError),
}

impl Look {
    fn and(self, seen: Seen, owner: &Owner) -> Self {
        match (self, seen) {
            (Self::Failed(error), _) | (_, Seen::Strange(error) | Seen::Failed(error)) => {
                Self::Failed(error)
            }
            (look, Seen::Free) => look,
            (Self::Free, Seen::Held { by, left }) if wait_queue::is_of(&by, owner) => {
                Self::Own(left)
            }
            (look, Seen::Held { by, .. }) if wait_queue::is_of(&by, owner) => look,
            (Self::Busy(one), Seen::Held { left, .. }) => {
                Self::Busy(one.zip(left).map(|(one, other)| one.max(other)))
            }
            (Self::Free | Self::Own(_), Seen::Held { left, .. }) => Self::Busy(left),
        }
    }
}

impl Write {
    fn command(self, key: &Key) -> Cmd {
        match self {
            Self::Delete => {
                let mut delete = redis::cmd("DEL");
                delete.arg(key.as_str());
                delete
            }
            Self::Expire(millis) => expire(key, millis),
        }
    }
}

impl<'a> Change<'a> {
    fn extending(lease: &'a LeaseRef) -> Self {
        Self { lease, write: Write::Expire(millis(lease.kept_for())), is_whole: true }
    }

    fn ending(release: &'a ReleaseRequest) -> Self {
        let write = match release.free_after {
            Duration::ZERO => Write::Delete,
            free_after => Write::Expire(millis(free_after)),
        };
        Self { lease: &release.lease, write, is_whole: false }
    }
}

impl Ways {
    /// Finds out on connections of their own: a proxy may hang up on what it does not know. Nothing is
    /// written; `probe` is a lock that nobody takes.
    async fn of(node: &Node, probe: &Key) -> Result<Self, BackendError> {
        let lease = LeaseRef {
            keys: Arc::new([probe.clone()]),
            owner: Owner::from_text([b'0'; 32]),
            ttl: Duration::from_millis(1),
            min_hold: Duration::ZERO,
        };
        let try_out = async |ways: Self, write| {
            let mut all = Pipeline::new();
            for command in ways.commands(&Change { lease: &lease, write, is_whole: true }) {
                all.add_command(command);
            }
            knows(node, &all).await
        };
        let none = Self { delete: None, set: false, watch: false };
        let set = try_out(Self { set: true, ..none }, Write::Expire(1)).await?;
        let mut delete = None;
        if set {
            for way in [Delete::Delex, Delete::Delifeq] {
                if try_out(Self { delete: Some(way), ..none }, Write::Delete).await? {
                    delete = Some(way);
                    break;
                }
            }
        }
        let mut exchange = Pipeline::new();
        let key = probe.as_str();
        exchange.cmd("WATCH").arg(key).cmd("GET").arg(key).cmd("PTTL").arg(key).cmd("UNWATCH");
        exchange.cmd("WATCH").arg(key).cmd("MULTI");
        exchange.add_command(Write::Delete.command(probe));
        exchange.add_command(Write::Expire(1).command(probe));
        exchange.cmd("EXEC");
        let watch = knows(node, &exchange).await?;
        Ok(Self { delete, set, watch })
    }

    fn are_safe(self) -> bool {
        self.watch || (self.set && self.delete.is_some())
    }

    /// The commands that make this change by comparing, one per key. None if it takes an exchange.
    fn commands(self, change: &Change<'_>) -> Vec<Cmd> {
        // All of several keys or none of them.
        if change.is_whole && change.lease.keys.len() > 1 && self.watch {
            return Vec::new();
        }
        let token = Token::new(&change.lease.owner, None);
        let command = |key: &Key| {
            let mut command = match (change.write, self.delete, self.set) {
                (Write::Delete, Some(Delete::Delex), _) => redis::cmd("DELEX"),
                (Write::Delete, Some(Delete::Delifeq), _) => redis::cmd("DELIFEQ"),
                (Write::Expire(_), _, true) => redis::cmd("SET"),
                (Write::Delete, None, _) | (Write::Expire(_), _, false) => return None,
            };
            command.arg(key.as_str());
            match (change.write, self.delete) {
                (Write::Delete, Some(Delete::Delex)) => {
                    command.arg("IFEQ").arg(token.as_bytes());
                }
                (Write::Delete, _) => {
                    command.arg(token.as_bytes());
                }
                (Write::Expire(millis), _) => {
                    command.arg(token.as_bytes()).arg("IFEQ").arg(token.as_bytes());
                    command.arg("PX").arg(millis);
                }
            }
            Some(command)
        };
        change.lease.keys.iter().filter_map(command).collect()
    }

    fn unlearn(&mut self, write: Write) {
        match write {
            Write::Delete => self.delete = None,
            Write::Expire(_) => self.set = false,
        }
    }
}

/// Whether the server knows all of `commands` and lets this user run them.
async fn knows(node: &Node, commands: &Pipeline) -> Result<bool, BackendError> {
    match node.another().await?.send_all(commands).await {
        Ok(answers) => {
            for error in answers.into_iter().filter_map(Result::err) {
                // `EXEC` says by its own code that it is refused, and that something before it was.
                let aborted = error.code() == Some("EXECABORT");
                let refused =
                    aborted && error.detail().is_some_and(|it| it.contains("because of:"));
                if server_error::is_beyond_this_user(&error) || (aborted && !refused) {
                    continue;
                }
                if refused || server_error::is_unknown_command(&error) || is_syntax(&error) {
                    return Ok(false);
                }
                return Err(node.failure(error).before_sending());
            }
            Ok(true)
        }
        Err(error) if server_error::is_hang_up(&error) => Ok(false),
        Err(error) => Err(node.failure(error).before_sending()),
    }
}

/// A known command with an option that is not.
fn is_syntax(error: &RedisError) -> bool {
    let detail = error.detail().unwrap_or_default();
    error.code() == Some("ERR")
        && (detail.contains("syntax error") || detail.contains("wrong number of arguments"))
}

fn expire(key: &Key, millis: u64) -> Cmd {
    let mut expire = redis::cmd("PEXPIRE");
    expire.arg(key.as_str()).arg(millis);
    expire
}

impl Backend for Plain {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.fencing = false;
        capabilities
    }

    fn subscribe(&self, notifier: Notifier) {
        self.ears.subscribe(notifier);
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let watch = self.ways().watch;
        let mut outcomes: Vec<_> =
            claims.iter().map(|claim| refusal(claim, watch).map(Err)).collect();
        let mut open: Vec<_> = (0..claims.len())
            .filter(|&at| outcomes[at].is_none())
            .map(|at| Wanted { at, claim: &claims[at], at_desk: claims[at].keys.len() > 1 })
            .collect();
        for _ in 0..TRIES {
            if open.is_empty() {
                break;
            }
            let mut refused = Vec::new();
            let taken = self.take(&open).await;
            for (wanted, taken) in open.into_iter().zip(taken) {
                match taken {
                    Ok(true) => outcomes[wanted.at] = Some(Ok(AcquireOutcome::acquired(None))),
                    // Only from the next attempt on the pool can be told of changes, and it makes none if it does not
                    // wait.
                    Ok(false)
                        if wanted.claim.attempt == 0 && self.waits_for_changes(wanted.claim) =>
                    {
                        let wait_mode = WaitMode::Watch { retry_after: Duration::ZERO };
                        outcomes[wanted.at] =
                            Some(Ok(AcquireOutcome::Contended { expires_in: None, wait_mode }));
                    }
                    Ok(false) => refused.push(wanted),
                    Err(error) => outcomes[wanted.at] = Some(Err(error)),
                }
            }
            open = Vec::new();
            if refused.is_empty() {
                break;
            }
            let looked: Vec<_> = refused.iter().map(|wanted| wanted.claim).collect();
            for (wanted, look) in refused.into_iter().zip(self.look(&looked).await) {
                match look {
                    Look::Free => open.push(wanted),
                    Look::Own(_) if watch => open.push(Wanted { at_desk: true, ..wanted }),
                    // Extending it could meet a later, longer grant. It is free when its time is over.
                    Look::Own(left) => {
                        outcomes[wanted.at] = Some(Ok(AcquireOutcome::contended(left)))
                    }
                    Look::Busy(expires_in) => outcomes[wanted.at] = Some(Ok(self.busy(expires_in))),
                    Look::Failed(error) => outcomes[wanted.at] = Some(Err(error)),
                }
            }
        }
        // They changed hands each time.
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|| Ok(self.busy(Some(Duration::ZERO)))))
            .collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let changes: Vec<_> = leases.iter().map(Change::extending).collect();
        let held = |ours| if ours { LeaseStatus::Held } else { LeaseStatus::NotHeld };
        self.change(&changes).await.into_iter().map(|outcome| outcome.map(held)).collect()
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let changes: Vec<_> = releases.iter().map(Change::ending).collect();
        let released = |ours| if ours { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld };
        self.change(&changes).await.into_iter().map(|outcome| outcome.map(released)).collect()
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        holds(&self.node, lease).await
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.node.send(&redis::cmd("PING")).await?;
        Ok(std::iter::once(self.warning.clone()).chain(self.node.warning()).collect())
    }

    async fn close(&self) {
        self.worker.abort();
        self.node.close();
        self.desk.close().await;
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

impl Plain {
    fn waits_for_changes(&self, claim: &AcquireRequest) -> bool {
        (claim.enqueue || claim.keys.len() > 1) && self.node.hears().changes
    }
}

/// What cannot be done without scripts, told before anything is sent.
fn refusal(claim: &AcquireRequest, watch: bool) -> Option<BackendError> {
    if claim.fencing {
        return Some(
            BackendError::new(FailureKind::Rejected, "fences need scripts, which this Redis does not run for us")
                .remedy("write `.fencing(false)`, or leave `guard` out of the attribute, if nobody checks the fence; otherwise allow `EVAL` and `EVALSHA`"),
        );
    }
    if claim.keys.len() > 1 && !watch {
        return Some(
            BackendError::new(
                FailureKind::Rejected,
                "locks of several keys need scripts or `WATCH`, and this Redis lets us use neither",
            )
            .remedy("allow `EVAL` and `EVALSHA`, or `WATCH`, `UNWATCH`, `MULTI` and `EXEC`; or lock one key"),
        );
    }
    None
}
