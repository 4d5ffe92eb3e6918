//! Makes sure that a grant is in replicas before anybody believes in it: `?replicas=n`.
//!
//! `WAIT` answers for the writes of its own connection, and blocks everything behind it. So it is sent over a
//! second connection, behind a script that writes the locks there once more. That is better than any other
//! write, though one stream of changes leads to the replicas and a later change in it would speak for the
//! earlier ones: the script also shows that it is the same server which has granted the lock, and not one that
//! became the master meanwhile and knows nothing of it. It takes no lock, so it does no harm whenever it
//! arrives: late, twice, or for a caller who has given up.
//!
//! `WAIT` has one gap: a master that never had a replica counts no writes, and says of one that is just loading
//! its first copy that it has them. The lock is in that copy.
//!
//! All grants that come while one `WAIT` is on its way share the next one. A grant that too few replicas have is
//! like one whose reply got lost: the pool asks again as long as the caller waits, and then frees the lock.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::BackendConfig;
use crate::backend::redis::conn::connection::Node;
use crate::backend::redis::discovery::target::Resolver;
use crate::backend::redis::net::handshake::Opening;
use crate::backend::redis::protocol::script::{By, CONFIRM};
use crate::backend::redis::protocol::scripted::millis;
use crate::backend::redis::server_error;
use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, FailureKind, Owner};
use crate::base::clock::{Clock, Instant};
use crate::base::error::LockError;
use crate::base::key::Key;

pub(crate) struct Replicas {
    request_timeout: Duration,
    grants: mpsc::UnboundedSender<Grant>,
    worker: AbortHandle,
    node: Arc<Node>,
}

/// A grant that is to be in the replicas.
struct Grant {
    keys: Arc<[Key]>,
    owner: Owner,
    ttl: Duration,
    /// When the caller gives up.
    until: Instant,
    reply: oneshot::Sender<Result<(), BackendError>>,
}

impl Replicas {
    /// `None` if none are wanted.
    pub(crate) async fn connect(
        resolver: Resolver,
        config: BackendConfig<'_>,
    ) -> Result<Option<Self>, LockError> {
        let BackendConfig { clock, request_timeout, .. } = config;
        let limits = config.limits();
        let wanted = resolver.replicas();
        if wanted == 0 {
            return Ok(None);
        }
        let opening = Opening::begin(clock, limits.connect);
        let node = Node::connect_deaf(resolver, clock, limits).await.map_err(LockError::backend)?;
        // With no keys and no replicas both answer at once. Who may not wait should learn it here; and the
        // server knows the script from now on.
        let mut probe = Pipeline::with_capacity(2);
        probe.add_command(confirmation(By::Text, &[], b"", Duration::ZERO));
        probe.cmd("WAIT").arg(0).arg(1);
        let answers = opening.ask(&node.server(), "`WAIT`", node.send_all(&probe)).await;
        let answers = answers.map_err(LockError::backend)?;
        if let Some(Err(error)) = answers.into_iter().nth(1)
            && error.code() == Some("NOPERM")
        {
            return Err(LockError::backend(node.failure(error))
                .remedy("`?replicas=` needs the command `WAIT`: allow the ACL user `+wait`"));
        }
        let node = Arc::new(node);
        let (grants, inbox) = mpsc::unbounded_channel();
        let worker = Worker { node: node.clone(), clock, request_timeout, wanted };
        let worker = tokio::spawn(worker.run(inbox)).abort_handle();
        Ok(Some(Self { request_timeout, grants, worker, node }))
    }

    /// Turns those grants into errors that too few replicas have. The claims were sent at `sent`.
    pub(crate) async fn confirm(
        &self,
        claims: &[AcquireRequest],
        attempts: &mut [Result<AcquireOutcome, BackendError>],
        sent: Instant,
    ) {
        let mut asked = Vec::new();
        for (claim, attempt) in claims.iter().zip(attempts) {
            if let Ok(AcquireOutcome::Acquired { .. }) = attempt {
                let (reply, answer) = oneshot::channel();
                let AcquireRequest { keys, owner, ttl, .. } = claim;
                let until = sent + self.request_timeout.min(*ttl);
                let grant = Grant { keys: keys.clone(), owner: *owner, ttl: *ttl, until, reply };
                // If it fails, so does the answer.
                drop(self.grants.send(grant));
                asked.push((attempt, answer));
            }
        }
        for (attempt, answer) in asked {
            if let Err(error) = answer.await.unwrap_or_else(|_| Err(closed())) {
                *attempt = Err(error);
            }
        }
    }

    pub(crate) fn close(&self) {
        self.worker.abort();
        self.node.close();
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

struct Worker {
    node: Arc<Node>,
    clock: Clock,
    request_timeout: Duration,
    wanted: u16,
}

/// The answer to each grant's script, and how many replicas have them all.
type Round = (Vec<Result<Value, RedisError>>, Result<u64, RedisError>);

impl Worker {
    async fn run(self, mut inbox: mpsc::UnboundedReceiver<Grant>) {
        while let Some(first) = inbox.recv().await {
            let mut grants = vec![first];
            while let Ok(more) = inbox.try_recv() {
                grants.push(more);
            }
            // Dropped by callers that have given up.
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
                        let _ = grant.reply.send(Err(error.clone().after_a_grant()));
                    }
                }
            }
        }
    }

    async fn round(&self, grants: &[Grant]) -> Result<Round, BackendError> {
        let mut round = self.send(grants, By::Hash).await?;
        let is_unknown = |answer: &Result<Value, _>| matches!(answer, Err(error) if server_error::is_unknown_script(error));
        if round.0.iter().any(is_unknown) {
            round = self.send(grants, By::Text).await?;
        }
        Ok(round)
    }

    async fn send(&self, grants: &[Grant], by: By) -> Result<Round, BackendError> {
        let mut all = Pipeline::with_capacity(grants.len() + 1);
        for Grant { keys, owner, ttl, .. } in grants {
            all.add_command(confirmation(by, keys, owner.as_bytes(), *ttl));
        }
        all.cmd("WAIT").arg(self.wanted).arg(millis(self.limit(grants)));
        let sent = timeout(self.request_timeout, self.node.send_all(&all)).await;
        let mut answers = sent.unwrap_or_else(|_| Err(silent(&self.node.server())))?;
        let acknowledged = match answers.pop() {
            Some(Ok(Value::Int(count))) => Ok(u64::try_from(count).unwrap_or_default()),
            Some(Err(error)) => Err(error),
            _ => Ok(0),
        };
        Ok((answers, acknowledged))
    }

    /// How long replicas may take. Half of what is left, so that the callers can be told of it; and no more
    /// than a tenth of the request_timeout, as those whose wait is nearly over have a quarter of a second at least,
    /// and servers see up to 0.1 s late that a `WAIT` is over. Whoever has more time asks again.
    fn limit(&self, grants: &[Grant]) -> Duration {
        let now = self.clock.now();
        let left = grants.iter().map(|grant| grant.until.since(now)).min().unwrap_or_default();
        // Zero would wait for ever.
        (left / 2).min(self.request_timeout / 10).max(Duration::from_millis(1))
    }

    fn verdict(
        &self,
        answer: Result<Value, RedisError>,
        acknowledged: &Result<u64, RedisError>,
    ) -> Result<(), BackendError> {
        let wanted = self.wanted;
        let failure = |error| self.node.failure(error).after_a_grant();
        match (answer, acknowledged) {
            (Ok(Value::Int(1)), Ok(count)) if *count >= u64::from(wanted) => Ok(()),
            (Ok(Value::Int(1)), Ok(count)) => {
                let server = self.node.server();
                let message = format!(
                    "{count} of the {wanted} replicas that `?replicas=` asks for have acknowledged the lock to Redis at {server}"
                );
                Err(BackendError::new(FailureKind::MaybeApplied, message)
                    .remedy("look after the replicas (`INFO replication`), or ask for fewer"))
            }
            (Ok(Value::Int(1)), Err(error)) => Err(failure(error.clone())),
            (Ok(_), _) => {
                let server = self.node.server();
                let message =
                    format!("the lock was gone from Redis at {server} before replicas had it");
                Err(BackendError::new(FailureKind::MaybeApplied, message).remedy(
                    "a failover passes by itself; if there was none, see who deletes locks",
                ))
            }
            (Err(error), _) => Err(failure(error)),
        }
    }
}

fn confirmation(by: By, keys: &[Key], owner: &[u8], ttl: Duration) -> Cmd {
    let mut call = CONFIRM.call(by, keys.len(), 2);
    for key in keys {
        call.arg(key.as_str());
    }
    call.arg(owner).arg(millis(ttl));
    call
}

#[cold]
fn silent(server: &str) -> BackendError {
    BackendError::new(
        FailureKind::MaybeApplied,
        format!("Redis at {server} did not say which replicas have the lock"),
    )
    .remedy("check that the server is up and reachable")
}

#[cold]
fn closed() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "the connection that asks for replicas is closed")
}
