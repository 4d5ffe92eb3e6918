//! Acknowledgement of a grant by replicas, before the grant is reported: `?replicas=n`.
//!
//! `WAIT` covers the writes of its own connection, and blocks every command behind it. So it has a connection of its
//! own, on which a script writes the locks once more before each `WAIT`.
//!
//! All changes reach the replicas in one stream, so `WAIT` after any other write there would cover the grant too. But
//! the script also shows that this server has granted the lock. Another server may have become the master
//! meanwhile, and may not know the lock. The script takes no lock, so it does no harm whenever it arrives: late, twice,
//! or for a caller that has given up.
//!
//! `WAIT` has one gap: a master that never had a replica counts no writes, and counts a replica that is just loading
//! its first copy. The lock is in that copy.
//!
//! All grants that arrive during one `WAIT` share the next one. If too few replicas have a grant, the grant is ambiguous,
//! as if its reply were lost. The pool repeats the request as long as the caller waits, and then releases the lock.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::BackendConfig;
use crate::backend::redis::conn::connection::Connection;
use crate::backend::redis::discovery::target::Target;
use crate::backend::redis::net::command::library_command;
use crate::backend::redis::net::progress::OpenDeadline;
use crate::backend::redis::protocol::script::{By, CONFIRM};
use crate::backend::redis::protocol::value::millis;
use crate::backend::redis::server_error;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, FailureKind, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::key::Key;

/// Owns a second connection to the server, and the task that confirms grants over it. Drop ends the task.
pub(crate) struct Replicas {
    request_timeout: Duration,
    grants: mpsc::UnboundedSender<UnconfirmedGrant>,
    worker: AbortHandle,
    connection: Arc<Connection>,
}

/// A grant that waits for its acknowledgement.
struct UnconfirmedGrant {
    keys: Arc<[Key]>,
    owner: Owner,
    ttl: Duration,
    /// When the caller stops waiting.
    until: Instant,
    reply: oneshot::Sender<Result<(), BackendError>>,
}

impl Replicas {
    /// `None` if the URL requires no replicas.
    pub(crate) async fn connect(
        target: Target,
        config: BackendConfig<'_>,
    ) -> Result<Option<Self>, LockError> {
        let BackendConfig { clock, request_timeout, .. } = config;
        let limits = config.limits();
        let required = target.replicas();
        if required == 0 {
            return Ok(None);
        }
        let deadline = OpenDeadline::start(clock, limits.connect);
        let connection = Connection::connect_without_pushes(target, clock, limits)
            .await
            .map_err(LockError::backend)?;
        // With no keys and no replicas, both commands return immediately. The probe fails without the right to `WAIT`,
        // and leaves the script in the server's cache.
        let mut probe = Pipeline::with_capacity(2);
        probe.add_command(confirmation(By::Text, &[], b"", Duration::ZERO));
        probe.cmd("WAIT").arg(0).arg(1);
        let answers =
            deadline.run(&connection.server(), "`WAIT`", connection.send_all(&probe)).await;
        let answers = answers.map_err(LockError::backend)?;
        if let Some(Err(error)) = answers.into_iter().nth(1)
            && error.code() == Some("NOPERM")
        {
            return Err(LockError::backend(connection.failure(error))
                .remedy("`?replicas=` needs the command `WAIT`: allow the ACL user `+wait`"));
        }
        let connection = Arc::new(connection);
        let (grants, inbox) = mpsc::unbounded_channel();
        let worker =
            ReplicaWorker { connection: connection.clone(), clock, request_timeout, required };
        let worker = tokio::spawn(worker.run(inbox)).abort_handle();
        Ok(Some(Self { request_timeout, grants, worker, connection }))
    }

    /// Replaces each grant that too few replicas acknowledge with an error. The requests were sent at `sent`.
    pub(crate) async fn confirm(
        &self,
        requests: &[AcquireRequest],
        outcomes: &mut [Result<AcquireOutcome, BackendError>],
        sent: Instant,
    ) {
        let mut unconfirmed = Vec::new();
        for (request, outcome) in requests.iter().zip(outcomes) {
            if let Ok(AcquireOutcome::Acquired { .. }) = outcome {
                let (reply, answer) = oneshot::channel();
                let AcquireRequest { keys, owner, ttl, .. } = request;
                let until = sent + self.request_timeout.min(*ttl);
                let (keys, owner, ttl) = (keys.clone(), *owner, *ttl);
                let grant = UnconfirmedGrant { keys, owner, ttl, until, reply };
                // After the end of the task this drops the sender of the reply.
                drop(self.grants.send(grant));
                unconfirmed.push((outcome, answer));
            }
        }
        for (outcome, answer) in unconfirmed {
            if let Err(error) = answer.await.unwrap_or_else(|_| Err(closed())) {
                *outcome = Err(error);
            }
        }
    }

    pub(crate) fn close(&self) {
        self.worker.abort();
        self.connection.close();
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

/// The task that confirms grants.
struct ReplicaWorker {
    connection: Arc<Connection>,
    clock: Clock,
    request_timeout: Duration,
    /// How many replicas have to acknowledge a grant.
    required: u16,
}

/// The reply to the script of each grant, and how many replicas have acknowledged all of them.
type Confirmation = (Vec<Result<Value, RedisError>>, Result<u64, RedisError>);

impl ReplicaWorker {
    async fn run(self, mut inbox: mpsc::UnboundedReceiver<UnconfirmedGrant>) {
        while let Some(first) = inbox.recv().await {
            let mut grants = vec![first];
            while let Ok(more) = inbox.try_recv() {
                grants.push(more);
            }
            // A caller that has given up has dropped the receiver.
            grants.retain(|grant| !grant.reply.is_closed());
            if grants.is_empty() {
                continue;
            }
            match self.round(&grants).await {
                Ok((answers, acknowledged)) => {
                    for (grant, answer) in grants.into_iter().zip(answers) {
                        let _ = grant.reply.send(self.verdict(answer, &acknowledged));
                    }
                }
                Err(error) => {
                    for grant in grants {
                        let _ = grant.reply.send(Err(error.clone().after_a_part()));
                    }
                }
            }
        }
    }

    async fn round(&self, grants: &[UnconfirmedGrant]) -> Result<Confirmation, BackendError> {
        let mut round = self.send(grants, By::Hash).await?;
        let is_unknown = |answer: &Result<Value, _>| matches!(answer, Err(error) if server_error::is_unknown_script(error));
        if round.0.iter().any(is_unknown) {
            round = self.send(grants, By::Text).await?;
        }
        Ok(round)
    }

    async fn send(
        &self,
        grants: &[UnconfirmedGrant],
        by: By,
    ) -> Result<Confirmation, BackendError> {
        let mut all = Pipeline::with_capacity(grants.len() + 1);
        for UnconfirmedGrant { keys, owner, ttl, .. } in grants {
            all.add_command(confirmation(by, keys, owner.as_bytes(), *ttl));
        }
        all.cmd("WAIT").arg(self.required).arg(millis(self.limit(grants)));
        let sent = timeout(self.request_timeout, self.connection.send_all(&all)).await;
        let mut answers = sent.unwrap_or_else(|_| Err(silent(&self.connection.server())))?;
        let acknowledged = match answers.pop() {
            Some(Ok(Value::Int(count))) => Ok(u64::try_from(count).unwrap_or_default()),
            Some(Err(error)) => Err(error),
            _ => Ok(0),
        };
        Ok((answers, acknowledged))
    }

    /// The limit of one `WAIT`. Half of the remaining time, so that the result still reaches the callers.
    ///
    /// No more than a tenth of the request timeout. A request near the end of its wait has at least a quarter of a
    /// second. A server notices the end of a `WAIT` up to 0.1 s late. A request with more time is repeated.
    fn limit(&self, grants: &[UnconfirmedGrant]) -> Duration {
        let now = self.clock.now();
        let left = grants.iter().map(|grant| grant.until.since(now)).min().unwrap_or_default();
        // Zero means no limit.
        (left / 2).min(self.request_timeout / 10).max(Duration::from_millis(1))
    }

    fn verdict(
        &self,
        answer: Result<Value, RedisError>,
        acknowledged: &Result<u64, RedisError>,
    ) -> Result<(), BackendError> {
        let required = self.required;
        let failure = |error| self.connection.failure(error).after_a_part();
        match (answer, acknowledged) {
            (Ok(Value::Int(1)), Ok(count)) if *count >= u64::from(required) => Ok(()),
            (Ok(Value::Int(1)), Ok(count)) => {
                let server = self.connection.server();
                let message = format!(
                    "{count} of the {required} replicas that `?replicas=` requires have acknowledged the lock to Redis at {server}"
                );
                Err(BackendError::new(FailureKind::MaybeApplied, message)
                    .remedy("check the replicas (`INFO replication`), or require fewer"))
            }
            (Ok(Value::Int(1)), Err(error)) => Err(failure(error.clone())),
            (Ok(_), _) => {
                let server = self.connection.server();
                let message =
                    format!("the lock was gone from Redis at {server} before replicas had it");
                Err(BackendError::new(FailureKind::MaybeApplied, message).remedy(
                    "a failover ends on its own; without one, find the client that deletes locks",
                ))
            }
            (Err(error), _) => Err(failure(error)),
        }
    }
}

fn confirmation(by: By, keys: &[Key], owner: &[u8], ttl: Duration) -> Cmd {
    library_command(|out| {
        let call = CONFIRM.call(out, by, keys.len());
        for key in keys {
            call.arg(key.as_str());
        }
        call.arg(owner).arg(millis(ttl));
    })
}

#[cold]
fn silent(server: &str) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("Redis at {server} did not answer how many replicas have the lock"),
    )
    .remedy("check that the server is up and reachable")
}

#[cold]
fn closed() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "the connection that confirms replicas is closed")
}
