//! A connection to a member, in service.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{oneshot, watch};

use crate::backend::etcd::combined::{CombiningQueue, TransactionBatch};
use crate::backend::etcd::grpc::{CallFailure, GrpcClient};
use crate::backend::etcd::protocol::transaction::{Transaction, TransactionAnswer};
use crate::backend::etcd::server_error::{
    CallStatus, connection_lost, is_without_space, login_wanted, malformed, unanswered,
};
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::Mutex;

/// A connection to a member. It ends once [`end`](Self::end) is called.
pub(crate) struct Member {
    /// Grows with each connection of the pool.
    pub(crate) number: u64,
    /// Host and port.
    pub(crate) name: String,
    pub(crate) grpc: GrpcClient,
    login: MemberLogin,
    clock: Clock,
    calls: Mutex<CallLog>,
    deletions: CombiningQueue,
    ended: watch::Sender<Option<BackendError>>,
}

/// Whether the calls of a connection carry a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberLogin {
    /// There is no login.
    Missing,
    /// There is a login, and the cluster wanted none.
    Unwanted,
    Token,
}

/// The cause of an error: the connection with this number has no valid token, and the next one logs in again.
#[derive(Debug)]
pub(crate) struct WithoutToken(pub(crate) u64);

impl fmt::Display for WithoutToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the connection has no valid token")
    }
}

impl Error for WithoutToken {}

/// The calls without an answer.
#[derive(Default)]
struct CallLog {
    last: u64,
    /// When each one was sent.
    open: BTreeMap<u64, Instant>,
    /// When the last answer to any of them came.
    answered: Option<Instant>,
}

impl CallLog {
    /// When the first call without an answer was sent. Numbers grow with time.
    fn oldest(&self) -> Option<Instant> {
        self.open.first_key_value().map(|(_, sent)| *sent)
    }
}

/// A failed call of a transaction.
pub(crate) enum TransactionFailure {
    /// The lease of a key is gone, and nothing was written.
    WithoutLease,
    Other(BackendError),
}

impl TransactionFailure {
    pub(crate) fn has_applied_nothing(&self) -> bool {
        match self {
            Self::WithoutLease => true,
            // The member checks its space before and after the transaction.
            Self::Other(error) => {
                error.kind() != FailureKind::MaybeApplied && !is_without_space(error)
            }
        }
    }
}

impl From<TransactionFailure> for BackendError {
    fn from(failure: TransactionFailure) -> Self {
        match failure {
            TransactionFailure::WithoutLease => super::server_error::lease_ended(),
            TransactionFailure::Other(error) => error,
        }
    }
}

impl Member {
    pub(crate) fn new(
        number: u64,
        name: String,
        grpc: GrpcClient,
        login: MemberLogin,
        clock: Clock,
    ) -> Arc<Self> {
        let (ended, _) = watch::channel(None);
        let (calls, deletions) = (Mutex::default(), CombiningQueue::default());
        Arc::new(Self { number, name, grpc, login, clock, calls, deletions, ended })
    }

    /// Ends the connection. The first reason counts.
    pub(crate) fn end(&self, error: BackendError) {
        self.ended.send_if_modified(|ended| {
            let is_first = ended.is_none();
            if is_first {
                *ended = Some(error);
            }
            is_first
        });
    }

    /// Why the connection has ended, as soon as it has.
    pub(crate) async fn ended(&self) -> BackendError {
        let mut ended = self.ended.subscribe();
        let reason = ended.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        reason.unwrap_or_else(|| connection_lost(&self.name, "it is closed"))
    }

    /// For how long there have been calls without an answer to any of them.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        let log = self.calls.lock();
        let Some(oldest) = log.oldest() else { return Duration::ZERO };
        now.since(log.answered.map_or(oldest, |answered| answered.max(oldest)))
    }

    /// How long the oldest call has been without an answer.
    pub(crate) fn oldest_call(&self, now: Instant) -> Duration {
        self.calls.lock().oldest().map_or(Duration::ZERO, |oldest| now.since(oldest))
    }

    /// Records a call until the returned value is dropped.
    pub(crate) fn open_call(self: &Arc<Self>) -> OpenCall {
        let mut log = self.calls.lock();
        log.last += 1;
        let number = log.last;
        log.open.insert(number, self.clock.now());
        drop(log);
        OpenCall { member: self.clone(), number }
    }

    /// One message and its answer. An error that another connection may not have ends this one.
    pub(crate) async fn call(
        self: &Arc<Self>,
        method: &str,
        message: &[u8],
    ) -> Result<Bytes, BackendError> {
        self.try_call(method, message).await.map_err(|failure| self.failed(failure))
    }

    /// Like [`call`](Self::call), with the status of a refusal.
    pub(crate) async fn try_call(
        self: &Arc<Self>,
        method: &str,
        message: &[u8],
    ) -> Result<Bytes, CallFailure> {
        let open = self.open_call();
        let answer = tokio::select! {
            biased;
            answer = self.grpc.call(method, message) => answer,
            error = self.ended() => Err(CallFailure::Broken(error.to_string())),
        };
        if matches!(answer, Ok(_) | Err(CallFailure::Refused(_))) {
            open.answered();
        }
        answer
    }

    /// The error of a failed call. It ends the connection if another connection may be served.
    #[cold]
    pub(crate) fn failed(&self, failure: CallFailure) -> BackendError {
        let (error, ends) = match failure {
            CallFailure::Refused(status)
                if self.login == MemberLogin::Unwanted && status.is_without_login() =>
            {
                (login_wanted().because(WithoutToken(self.number)), true)
            }
            CallFailure::Refused(status) if status.is_without_token() => {
                (status.into_error().because(WithoutToken(self.number)), true)
            }
            CallFailure::Refused(status) => status.into_end(),
            CallFailure::Unsent(why) => (connection_lost(&self.name, &why).before_sending(), true),
            CallFailure::Broken(why) => (connection_lost(&self.name, &why), true),
            CallFailure::Malformed => (malformed(), true),
        };
        if ends {
            self.end(error.clone());
        }
        error
    }

    pub(crate) async fn transact(
        self: &Arc<Self>,
        transaction: &Transaction,
    ) -> Result<TransactionAnswer, TransactionFailure> {
        match self.try_call("/etcdserverpb.KV/Txn", &transaction.encoded()).await {
            Ok(answer) => TransactionAnswer::read(&answer)
                .map_err(|_| TransactionFailure::Other(self.failed(CallFailure::Malformed))),
            Err(CallFailure::Refused(status)) if CallStatus::is_without_lease(&status) => {
                Err(TransactionFailure::WithoutLease)
            }
            Err(failure) => Err(TransactionFailure::Other(self.failed(failure))),
        }
    }

    /// Like [`transact`](Self::transact), for a transaction that only reads and deletes. It is sent even if the caller is gone.
    pub(crate) async fn delete(
        self: &Arc<Self>,
        deletion: Transaction,
    ) -> Result<TransactionAnswer, BackendError> {
        let (reply, answer) = oneshot::channel();
        if let Some(batch) = self.deletions.push(deletion, reply) {
            tokio::spawn(self.clone().send_deletions(batch));
        }
        answer.await.unwrap_or_else(|_| Err(unanswered()))
    }

    async fn send_deletions(self: Arc<Self>, mut batch: TransactionBatch) {
        loop {
            let deletions = batch.transaction();
            match self.send_deletion(&deletions).await {
                // One of them may be the reason.
                Err(error) if error.kind() == FailureKind::Rejected && !batch.is_single() => {
                    for mut single in batch.one_by_one(deletions) {
                        let deletion = single.transaction();
                        single.answer(self.send_deletion(&deletion).await);
                    }
                }
                answer => batch.answer(answer),
            }
            match self.deletions.next() {
                Some(next) => batch = next,
                None => return,
            }
        }
    }

    async fn send_deletion(
        self: &Arc<Self>,
        deletion: &Transaction,
    ) -> Result<TransactionAnswer, BackendError> {
        let reason = self.ended.borrow().clone();
        match reason {
            // Whatever the reason is, the deletion was not refused.
            Some(error) => Err(connection_lost(&self.name, error.message()).before_sending()),
            None => self.transact(deletion).await.map_err(BackendError::from),
        }
    }
}

/// A call without an answer.
pub(crate) struct OpenCall {
    member: Arc<Member>,
    number: u64,
}

impl OpenCall {
    pub(crate) fn answered(self) {
        let now = self.member.clock.now();
        self.member.calls.lock().answered = Some(now);
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.member.calls.lock().open.remove(&self.number);
    }
}
