//! The backend for one server that runs no scripts. It uses plain commands with the same keys and tokens, so that
//! processes with and without scripts exclude each other.
//!
//! - **Acquire** is `SET NX PX`. A refused request reads the key, and tracks its changes if the server supports
//!   that. If it reads its own token, an earlier reply was lost: a [`WatchTransaction`] extends the lease, and never
//!   shortens it.
//! - **Renew and release** compare and write in one step, by `SET IFEQ` (Redis 8.4, Valkey 8.1), `DELEX` (Redis 8.4)
//!   or `DELIFEQ` (Valkey 9.0). If the server has none of them, they use a transaction. `GET` and then `DEL` could
//!   free the lock of a later holder, so a server with neither these commands nor transactions is refused.
//! - **Several keys** are taken in one transaction, all or none. With one `SET NX` after the other, a later refusal
//!   would require the release of the first keys. Such a late release could free a later grant of the same owner.
//! - **Fences** are refused. An `INCR` after the grant may be late: a holder that is frozen in between would
//!   get a greater fence than the next holder.
//! - **Waiting** is by client tracking or by polling. There is no wait queue between processes: tokens name no channel,
//!   so queued processes treat this holder as one of another library.

use std::sync::Arc;
use std::time::Duration;

use redis::{Pipeline, Value};
use tokio::sync::mpsc;

use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::conn::push::PushHandler;
use crate::backend::redis::keyspace::Keyspace;
use crate::backend::redis::net::command::library_command;
use crate::backend::redis::net::handshake::PushConfig;
use crate::backend::redis::net::progress::OpenDeadline;
use crate::backend::redis::net::shard_channel::MessageScope;
use crate::backend::redis::net::transport::Dialer;
use crate::backend::redis::protocol::cas_commands::{CasCommands, OwnedWrite, expire};
use crate::backend::redis::protocol::diagnosis;
use crate::backend::redis::protocol::list::locks_on;
use crate::backend::redis::protocol::lock_changes::watch_locks;
use crate::backend::redis::protocol::value::{
    lease_status, millis, read_holders, unexpected, watch,
};
use crate::backend::redis::protocol::wait_queue::{self, QueueToken};
use crate::backend::redis::protocol::watch_transaction::{
    MAX_TRIES, Observed, TxnResult, WatchTransaction,
};
use crate::backend::redis::protocol::write_batches::WriteBatches;
use crate::backend::redis::server_error;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities,
    FailureKind, Finding, Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, LockHolder,
    Notifier, Owner, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::mutex::Mutex;
use crate::exec::events;

/// Owns the connection for requests, the connection for transactions, and the task that batches writes.
pub(crate) struct Scriptless {
    connection: Arc<Connection>,
    push_handler: Arc<PushHandler>,
    transaction: Arc<WatchTransaction>,
    batches: WriteBatches,
    commands: Mutex<CasCommands>,
    warning: Warning,
}

/// Why there are no scripts.
#[derive(Debug)]
pub(crate) enum Reason {
    /// The URL has `?scripts=off`.
    Disabled,
    /// The server refuses them.
    Refused(BackendError),
}

/// An acquire request that is being served.
struct OpenRequest<'a> {
    /// Its place in the call.
    at: usize,
    request: &'a AcquireRequest,
    in_transaction: bool,
}

/// What the keys of a refused request hold.
enum Obstacle {
    /// All keys are free by now.
    Free,
    /// Only tokens of the same owner, with the remaining time of the first.
    SameOwner(Option<Duration>),
    /// A token of another owner, with the longest remaining time if it is known.
    Held(Option<Duration>),
    Failed(BackendError),
}

impl Scriptless {
    pub(crate) async fn connect(
        dialer: Dialer,
        keyspace: &Keyspace,
        config: BackendConfig<'_>,
        reason: Reason,
    ) -> Result<Self, LockError> {
        let BackendConfig { clock, request_timeout, .. } = config;
        let limits = config.limits();
        let deadline = OpenDeadline::start(clock, limits.connect);
        // Without a wait queue there are no reservations, so none can be unclaimed.
        let (unclaimed, _) = mpsc::unbounded_channel();
        let push_handler = PushHandler::new(unclaimed, |_| {});
        let pushes =
            PushConfig { sink: push_handler.clone(), scope: MessageScope::AllSlots, queue: None };
        let connection =
            Connection::connect(dialer, clock, limits, pushes).await.map_err(LockError::backend)?;
        let connection = Arc::new(connection);
        let probe = keyspace.probe(0);
        let commands = CasCommands::of(&connection, &probe);
        let commands =
            deadline.run(&connection.server(), "what it can do without scripts", commands).await;
        let commands = commands.map_err(LockError::backend)?;
        let reason = match &reason {
            Reason::Disabled => "the URL says `?scripts=off`",
            Reason::Refused(refusal) => refusal.message(),
        };
        let server = connection.server();
        if !commands.are_safe() {
            let message = format!(
                "Redis at {server} runs no scripts ({reason}), and has no other way to free a lock safely: neither `DELEX` or `DELIFEQ` with `SET IFEQ`, nor `WATCH`"
            );
            let error = BackendError::new(FailureKind::Rejected, message).remedy(
                "allow `EVAL` and `EVALSHA`, or `WATCH`, `UNWATCH`, `MULTI` and `EXEC`; if a proxy refuses them, connect to the server itself",
            );
            return Err(LockError::backend(error));
        }
        events::without_scripts(&server, reason);
        if let Some(warning) = connection.warning() {
            events::backend_warning(&server, &warning);
        }
        let text = format!(
            "Redis at {server} runs no scripts ({reason}): locks have no fences and no wait queue between processes"
        );
        let warning = Warning::new(
            text,
            "allow `EVAL` and `EVALSHA`, and leave `?scripts=off` out of the URL",
        );
        let transaction = Arc::new(WatchTransaction::new(connection.clone()));
        let batches = WriteBatches::new(transaction.clone(), request_timeout);
        let commands = Mutex::new(commands);
        Ok(Self { connection, push_handler, transaction, batches, commands, warning })
    }

    /// Takes all keys of each request. `false` if a key is held, perhaps by the same owner.
    async fn take(&self, open: &[OpenRequest<'_>]) -> Vec<Result<bool, BackendError>> {
        let mut sets = Pipeline::new();
        for OpenRequest { request, .. } in open.iter().filter(|open| !open.in_transaction) {
            for key in request.keys.iter() {
                let token = QueueToken::new(&request.owner, None);
                sets.cmd("SET").arg(key.as_str()).arg(token.as_bytes());
                sets.arg("NX").arg("PX").arg(millis(request.kept_for()));
            }
        }
        let mut answers = if sets.is_empty() {
            Vec::new().into_iter()
        } else {
            match self.connection.send_all(&sets).await {
                Ok(answers) => answers.into_iter(),
                Err(error) => return open.iter().map(|_| Err(error.clone())).collect(),
            }
        };
        let mut taken = Vec::with_capacity(open.len());
        for open in open {
            taken.push(if open.in_transaction {
                self.take_in_transaction(open.request).await
            } else {
                match answers.next() {
                    Some(Ok(Value::Okay)) => Ok(true),
                    Some(Ok(Value::Nil)) => Ok(false),
                    Some(Ok(other)) => Err(unexpected(&other)),
                    Some(Err(error)) => Err(self.connection.failure(error)),
                    None => Err(unexpected(&Value::Nil)),
                }
            });
        }
        taken
    }

    /// Takes the keys if each of them is free or held by the same owner.
    async fn take_in_transaction(&self, request: &AcquireRequest) -> Result<bool, BackendError> {
        let mut has_written = false;
        match self.try_transactions(request, &mut has_written).await {
            // Other keys were taken.
            Ok(false) if has_written => Err(BackendError::new(
                FailureKind::MaybeApplied,
                "only some of the keys were taken",
            )
            .remedy("they are released again; choose a longer ttl")),
            Err(error) if has_written => Err(error.after_a_part()),
            outcome => outcome,
        }
    }

    /// `has_written` says whether a transaction took some of the keys, also if the request fails after that.
    async fn try_transactions(
        &self,
        request: &AcquireRequest,
        has_written: &mut bool,
    ) -> Result<bool, BackendError> {
        let token = QueueToken::new(&request.owner, None);
        let keys: Vec<_> = request.keys.iter().collect();
        for _ in 0..MAX_TRIES {
            let mut verdict = Ok(true);
            let mut count = 0;
            let decide = |observed: &[Observed]| {
                let mut writes = Vec::new();
                for (key, observed) in keys.iter().zip(observed) {
                    match observed {
                        Observed::Free => {
                            let mut set = redis::cmd("SET");
                            set.arg(key.as_str()).arg(token.as_bytes());
                            set.arg("PX").arg(millis(request.kept_for()));
                            writes.push(set);
                        }
                        // Never shorten the lease: this may be a late request with a shorter ttl.
                        Observed::Held { by, expires_in }
                            if wait_queue::is_of(by, &request.owner) =>
                        {
                            if expires_in.is_some_and(|left| left < request.kept_for()) {
                                writes.push(expire(key, millis(request.kept_for())));
                            }
                        }
                        Observed::Held { .. } => verdict = Ok(false),
                        Observed::WrongType(error) | Observed::Failed(error) => {
                            verdict = Err(error.clone());
                        }
                    }
                }
                if !matches!(verdict, Ok(true)) {
                    writes.clear();
                }
                count = writes.len();
                writes
            };
            self.transaction.prepare().await?;
            match self.transaction.run(&keys, decide).await? {
                TxnResult::Written(answers) => {
                    let is_done = |answer: &&Value| matches!(answer, Value::Okay | Value::Int(1));
                    if !matches!(verdict, Ok(true))
                        || answers.iter().filter(is_done).count() == count
                    {
                        return verdict;
                    }
                    // A key of the same owner expired at that moment; now it is free.
                    *has_written = true;
                }
                TxnResult::Conflict => {}
            }
        }
        Ok(false)
    }

    /// Reads the keys of `requests`, and tracks their changes if the server supports it.
    async fn read(&self, requests: &[&AcquireRequest]) -> Vec<Obstacle> {
        let tracked = self.connection.push_support().tracking;
        let mut reads = Pipeline::new();
        for key in requests.iter().flat_map(|request| request.keys.iter()) {
            if tracked {
                reads.cmd("CLIENT").arg("CACHING").arg("YES");
            }
            reads.cmd("GET").arg(key.as_str()).cmd("PTTL").arg(key.as_str());
        }
        let mut answers = match self.connection.send_all(&reads).await {
            Ok(answers) => answers.into_iter(),
            // Nothing is ambiguous: the server has already refused to take the keys.
            Err(error) => {
                return requests.iter().map(|_| Obstacle::Failed(error.clone())).collect();
            }
        };
        let mut obstacle_of = |request: &&AcquireRequest| {
            let mut obstacle = Obstacle::Free;
            for _ in request.keys.iter() {
                if tracked {
                    answers.next();
                }
                if let (Some(holder), Some(left)) = (answers.next(), answers.next()) {
                    let observed = Observed::new(&self.connection, holder, left);
                    obstacle = obstacle.and(observed, &request.owner);
                }
            }
            obstacle
        };
        requests.iter().map(&mut obstacle_of).collect()
    }

    fn contended(&self, expires_in: Option<Duration>) -> AcquireOutcome {
        if self.connection.push_support().tracking {
            AcquireOutcome::contended_until(expires_in, watch(expires_in))
        } else {
            AcquireOutcome::contended(expires_in)
        }
    }

    /// Makes each write to the keys that its owner holds. `false` if a key was not held.
    async fn write(&self, writes: &[OwnedWrite<'_>]) -> Vec<Result<bool, BackendError>> {
        let mut outcomes = self.compare_and_write(writes).await;
        let mut in_transaction = Vec::new();
        for (at, write) in writes.iter().enumerate().filter(|(at, _)| outcomes[*at].is_none()) {
            in_transaction.push((at, self.batches.submit(write)));
        }
        for (at, answer) in in_transaction {
            outcomes[at] = Some(answer.await.unwrap_or_else(|_| Err(closed())));
        }
        outcomes.into_iter().flatten().collect()
    }

    /// Sends the writes that need one command per key, in one flight. `None` for the others.
    async fn compare_and_write(
        &self,
        writes: &[OwnedWrite<'_>],
    ) -> Vec<Option<Result<bool, BackendError>>> {
        let commands = *self.commands.lock();
        let mut all = Pipeline::new();
        let mut counts = Vec::with_capacity(writes.len());
        for write in writes {
            let commands = commands.commands(write);
            counts.push(commands.len());
            for command in commands {
                all.add_command(command);
            }
        }
        if all.is_empty() {
            return writes.iter().map(|_| None).collect();
        }
        let mut answers = match self.connection.send_all(&all).await {
            Ok(answers) => answers.into_iter(),
            Err(error) => {
                let failed = |&count: &usize| (count > 0).then(|| Err(error.clone()));
                return counts.iter().map(failed).collect();
            }
        };
        let mut outcomes = Vec::with_capacity(writes.len());
        for (write, count) in writes.iter().zip(counts) {
            let mut outcome = (count > 0).then_some(Ok(true));
            for answer in answers.by_ref().take(count) {
                match answer {
                    Ok(Value::Okay | Value::Int(1)) => {}
                    Ok(Value::Nil | Value::Int(0)) => outcome = outcome.map(|it| it.and(Ok(false))),
                    Ok(other) => outcome = Some(Err(unexpected(&other))),
                    // A key of another type is not held by this owner.
                    Err(error) if server_error::is_wrong_type(&error) => {
                        outcome = outcome.map(|it| it.and(Ok(false)));
                    }
                    // An older server is at the address by now.
                    Err(error) if commands.watch && server_error::is_unsupported(&error) => {
                        self.commands.lock().forget(write.write);
                        outcome = None;
                    }
                    Err(error) => outcome = Some(Err(self.connection.failure(error))),
                }
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    fn waits_for_changes(&self, request: &AcquireRequest) -> bool {
        (request.enqueue || request.keys.len() > 1) && self.connection.push_support().tracking
    }
}

impl Obstacle {
    fn and(self, observed: Observed, owner: &Owner) -> Self {
        match (self, observed) {
            (Self::Failed(error), _)
            | (_, Observed::WrongType(error) | Observed::Failed(error)) => Self::Failed(error),
            (obstacle, Observed::Free) => obstacle,
            (Self::Free, Observed::Held { by, expires_in }) if wait_queue::is_of(&by, owner) => {
                Self::SameOwner(expires_in)
            }
            (obstacle, Observed::Held { by, .. }) if wait_queue::is_of(&by, owner) => obstacle,
            (Self::Held(one), Observed::Held { expires_in, .. }) => {
                Self::Held(one.zip(expires_in).map(|(one, other)| one.max(other)))
            }
            (Self::Free | Self::SameOwner(_), Observed::Held { expires_in, .. }) => {
                Self::Held(expires_in)
            }
        }
    }
}

impl Backend for Scriptless {
    fn capabilities(&self) -> Capabilities {
        Capabilities { fencing: false, ..Capabilities::default() }
    }

    fn subscribe(&self, notifier: Notifier) {
        self.push_handler.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let watch = self.commands.lock().watch;
        let mut outcomes: Vec<_> =
            requests.iter().map(|request| refusal(request, watch).map(Err)).collect();
        let mut open: Vec<_> = requests
            .iter()
            .enumerate()
            .filter(|(at, _)| outcomes[*at].is_none())
            .map(|(at, request)| OpenRequest {
                at,
                request,
                in_transaction: request.keys.len() > 1,
            })
            .collect();
        for _ in 0..MAX_TRIES {
            if open.is_empty() {
                break;
            }
            let mut refused = Vec::new();
            let taken = self.take(&open).await;
            for (open, taken) in open.into_iter().zip(taken) {
                match taken {
                    Ok(true) => outcomes[open.at] = Some(Ok(AcquireOutcome::acquired(None))),
                    // The pool can handle a notification only from the next attempt on. A request that does not wait has
                    // no next attempt.
                    Ok(false)
                        if open.request.attempt == 0 && self.waits_for_changes(open.request) =>
                    {
                        let wait_mode = WaitMode::Watch { retry_after: Duration::ZERO };
                        outcomes[open.at] =
                            Some(Ok(AcquireOutcome::contended_until(None, wait_mode)));
                    }
                    Ok(false) => refused.push(open),
                    Err(error) => outcomes[open.at] = Some(Err(error)),
                }
            }
            open = Vec::new();
            if refused.is_empty() {
                break;
            }
            let reads: Vec<_> = refused.iter().map(|open| open.request).collect();
            for (refused, obstacle) in refused.into_iter().zip(self.read(&reads).await) {
                match obstacle {
                    Obstacle::Free => open.push(refused),
                    Obstacle::SameOwner(_) if watch => {
                        open.push(OpenRequest { in_transaction: true, ..refused });
                    }
                    // A plain `PEXPIRE` could shorten a later, longer grant. The lock is free when its time is over.
                    Obstacle::SameOwner(left) => {
                        outcomes[refused.at] = Some(Ok(AcquireOutcome::contended(left)));
                    }
                    Obstacle::Held(expires_in) => {
                        outcomes[refused.at] = Some(Ok(self.contended(expires_in)));
                    }
                    Obstacle::Failed(error) => outcomes[refused.at] = Some(Err(error)),
                }
            }
        }
        // The holder changed during each try.
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|| Ok(self.contended(Some(Duration::ZERO)))))
            .collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let writes: Vec<_> = leases.iter().map(OwnedWrite::renewal).collect();
        self.write(&writes).await.into_iter().map(|outcome| outcome.map(LeaseStatus::of)).collect()
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let writes: Vec<_> = requests.iter().map(OwnedWrite::release).collect();
        let released = |held| if held { ReleaseOutcome::Freed } else { ReleaseOutcome::NotHeld };
        self.write(&writes).await.into_iter().map(|outcome| outcome.map(released)).collect()
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let holders =
            self.connection.send(&library_command(|out| read_holders(&lease.keys, out))).await?;
        Ok(lease_status(&lease.owner, &holders))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let mut reads = Pipeline::with_capacity(2);
        reads.cmd("GET").arg(key.as_str()).cmd("PTTL").arg(key.as_str());
        let mut answers = self.connection.send_all(&reads).await?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
        let (holder, left) = (next(), next());
        let holder = match Observed::new(&self.connection, holder, left) {
            Observed::Free => None,
            Observed::Held { by, expires_in } => {
                let holder = LockHolder::new(wait_queue::owner_tag(&by));
                let holder = holder.with_token(wait_queue::owner_in(&by)).with_expiry(expires_in);
                Some(holder.with_info(wait_queue::owner_info(&by)))
            }
            // The value is not a lock, but it keeps all owners out.
            Observed::WrongType(_) => Some(LockHolder::new(None)),
            Observed::Failed(error) => return Err(error),
        };
        Ok(Some(Inspection::new(holder)))
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        let is_lock = |value: &[u8]| wait_queue::owner_in(value).is_some();
        locks_on(&self.connection, pattern, limit, is_lock).await.map(Some)
    }

    async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        watch_locks(&self.connection, pattern, changed).await
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.connection.send(&redis::cmd("PING")).await?;
        Ok(std::iter::once(self.warning.clone()).chain(self.connection.warning()).collect())
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let server = self.connection.server();
        let mut findings = diagnosis::of_server(&self.connection, true).await?;
        findings.push(Finding::warning("scripts", &self.warning).at(&*server));
        findings.push(diagnosis::of_tracking(&server, self.connection.push_support().tracking));
        Ok(findings)
    }

    async fn close(&self) {
        self.batches.close();
        self.connection.close();
        self.transaction.close().await;
    }
}

/// The error of a request that needs scripts or transactions, before anything is sent.
fn refusal(request: &AcquireRequest, watch: bool) -> Option<BackendError> {
    if request.fencing {
        return Some(
            BackendError::new(FailureKind::Rejected, "fences need scripts, and this Redis runs none for this user")
                .remedy("write `.fencing(false)`, or leave `guard` out of the attribute, if no resource checks the fence; otherwise allow `EVAL` and `EVALSHA`"),
        );
    }
    if request.keys.len() > 1 && !watch {
        return Some(
            BackendError::new(
                FailureKind::Rejected,
                "locks of several keys need scripts or `WATCH`, and this Redis allows neither",
            )
            .remedy("allow `EVAL` and `EVALSHA`, or `WATCH`, `UNWATCH`, `MULTI` and `EXEC`; or lock one key"),
        );
    }
    None
}

#[cold]
fn closed() -> BackendError {
    BackendError::new(FailureKind::Rejected, "the connections to Redis are closed")
}
