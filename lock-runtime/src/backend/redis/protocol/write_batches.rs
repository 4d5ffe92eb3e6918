//! Owned writes that need a transaction, several in one.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::redis::protocol::cas_commands::{KeyWrite, OwnedWrite};
use crate::backend::redis::protocol::wait_queue;
use crate::backend::redis::protocol::watch_transaction::{
    MAX_TRIES, Observed, TxnResult, WatchTransaction,
};
use crate::backend::{BackendError, FailureKind, LeaseRef};

/// Writes per transaction. The server runs one transaction at a time.
const MAX_WRITES: usize = 256;

/// Collects writes while a transaction is running and sends them in the next one. Otherwise each write would wait for the
/// two round trips of all writes before it.
///
/// Owns the task that runs the transactions, so a caller that is dropped does not interrupt one. Drop ends the task.
pub(super) struct WriteBatches {
    queue: mpsc::UnboundedSender<PendingWrite>,
    task: AbortHandle,
}

struct PendingWrite {
    lease: LeaseRef,
    write: KeyWrite,
    all_or_none: bool,
    reply: oneshot::Sender<Result<bool, BackendError>>,
}

impl WriteBatches {
    pub(super) fn new(transaction: Arc<WatchTransaction>, request_timeout: Duration) -> Self {
        let (queue, pending) = mpsc::unbounded_channel();
        let task = tokio::spawn(run(transaction, request_timeout, pending)).abort_handle();
        Self { queue, task }
    }

    /// Queues `write`. The reply is `false` if a key was not held; there is none if the task has ended.
    pub(super) fn submit(
        &self,
        write: &OwnedWrite<'_>,
    ) -> oneshot::Receiver<Result<bool, BackendError>> {
        let (reply, answer) = oneshot::channel();
        let OwnedWrite { lease, write, all_or_none } = *write;
        // Fails after the end of the task, and then drops the sender of the reply.
        let _ = self.queue.send(PendingWrite { lease: lease.clone(), write, all_or_none, reply });
        answer
    }

    pub(super) fn close(&self) {
        self.task.abort();
    }
}

impl Drop for WriteBatches {
    fn drop(&mut self) {
        self.close();
    }
}

async fn run(
    transaction: Arc<WatchTransaction>,
    request_timeout: Duration,
    mut pending: mpsc::UnboundedReceiver<PendingWrite>,
) {
    let mut batch = Vec::new();
    while pending.recv_many(&mut batch, MAX_WRITES).await > 0 {
        let writes: Vec<_> = batch
            .iter()
            .map(|PendingWrite { lease, write, all_or_none, .. }| OwnedWrite {
                lease,
                write: *write,
                all_or_none: *all_or_none,
            })
            .collect();
        let outcomes = write_all(&transaction, request_timeout, &writes).await;
        for (pending, outcome) in batch.drain(..).zip(outcomes) {
            let _ = pending.reply.send(outcome);
        }
    }
}

/// Makes all writes in one transaction, or, if that keeps failing, in several.
async fn write_all(
    transaction: &Arc<WatchTransaction>,
    request_timeout: Duration,
    writes: &[OwnedWrite<'_>],
) -> Vec<Result<bool, BackendError>> {
    for _ in 0..MAX_TRIES {
        // A new connection has the time limit of connections.
        if let Err(error) = transaction.prepare().await {
            return writes.iter().map(|_| Err(error.clone())).collect();
        }
        let tried = timeout(request_timeout, try_write_all(transaction, writes)).await;
        match tried.unwrap_or_else(|_| Err(silent())) {
            Ok(Some(outcomes)) => return outcomes,
            Ok(None) => {}
            // The rejection of one write rejects the whole transaction.
            Err(error) if writes.len() > 1 && error.kind() == FailureKind::Rejected => break,
            Err(error) => return writes.iter().map(|_| Err(error.clone())).collect(),
        }
    }
    if let [_] = writes {
        return vec![Err(BackendError::new(
            FailureKind::NotApplied,
            "the key changed during each attempt to write it",
        )
        .remedy("another client writes to the keys of locks; give locks a prefix of their own"))];
    }
    let (left, right) = writes.split_at(writes.len() / 2);
    let mut outcomes = Box::pin(write_all(transaction, request_timeout, left)).await;
    outcomes.extend(Box::pin(write_all(transaction, request_timeout, right)).await);
    outcomes
}

/// `None` if a key changed meanwhile.
async fn try_write_all(
    transaction: &WatchTransaction,
    writes: &[OwnedWrite<'_>],
) -> Result<Option<Vec<Result<bool, BackendError>>>, BackendError> {
    let keys: Vec<_> = writes.iter().flat_map(|write| write.lease.keys.iter()).collect();
    let mut plans = Vec::with_capacity(writes.len());
    let decide = |observed: &[Observed]| {
        let (mut observed, mut commands) = (observed.iter(), Vec::new());
        for write in writes {
            let before = commands.len();
            let mut outcome = Ok(true);
            for (key, observed) in write.lease.keys.iter().zip(&mut observed) {
                match observed {
                    Observed::Held { by, .. } if wait_queue::is_of(by, &write.lease.owner) => {
                        commands.push(write.write.command(key));
                    }
                    Observed::Failed(error) => outcome = Err(error.clone()),
                    Observed::Held { .. } | Observed::Free | Observed::WrongType(_) => {
                        outcome = outcome.and(Ok(false));
                    }
                }
            }
            if write.all_or_none && !matches!(outcome, Ok(true)) {
                commands.truncate(before);
            }
            plans.push((outcome, commands.len() - before));
        }
        commands
    };
    let TxnResult::Written(answers) = transaction.run(&keys, decide).await? else {
        return Ok(None);
    };
    let mut answers = answers.into_iter();
    let outcome = |(outcome, count): (Result<bool, BackendError>, usize)| {
        // A key on which the write has no effect has just expired.
        let done = answers.by_ref().take(count).filter(|answer| *answer == Value::Int(1)).count();
        outcome.map(|all_held| all_held && done == count)
    };
    Ok(Some(plans.into_iter().map(outcome).collect()))
}

#[cold]
fn silent() -> BackendError {
    BackendError::new(FailureKind::MaybeApplied, "Redis did not answer a transaction in time")
        .remedy("check that the server is up and reachable; the transaction can change only the keys of its own owner token")
}
