//! Signs of life for all leases of a pool, on one stream.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::backend::BackendError;
use crate::backend::etcd::grpc::{CallFailure, MessageReader, MessageSender};
use crate::backend::etcd::leases::{Leases, LifeSign, PoolLease};
use crate::backend::etcd::member::{Member, OpenCall};
use crate::backend::etcd::member_task::MemberLink;
use crate::backend::etcd::open_signs::{OpenSigns, SignOutcome, SignReply, StreamVerdict};
use crate::backend::etcd::protocol::lease::{self, LeaseAnswer};
use crate::backend::etcd::server_error::{CallStatus, closed, connection_lost, lease_denied};
use crate::base::clock::{Clock, Instant};

/// The most requests for signs that are taken over together.
const BATCH: usize = 256;

/// How often the task looks for leases that have had no sign for a while.
const LOOK: Duration = Duration::from_millis(100);

/// A look that comes later than this means that this process was stopped.
const LATEST_LOOK: Duration = Duration::from_millis(500);

struct SignRequest {
    lease: Arc<PoolLease>,
    reply: SignReply,
}

/// Sends signs of life. Dropping it ends the stream.
pub(crate) struct KeepAlives {
    requests: mpsc::UnboundedSender<SignRequest>,
    task: AbortHandle,
}

impl Drop for KeepAlives {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The answer to a sign of life that was requested.
pub(crate) struct AwaitedSign(oneshot::Receiver<Result<LifeSign, BackendError>>);

impl AwaitedSign {
    /// # Errors
    /// [`lease_ended`] if the lease no longer exists.
    pub(crate) async fn get(self) -> Result<LifeSign, BackendError> {
        self.0.await.unwrap_or_else(|_| Err(closed()))
    }
}

impl KeepAlives {
    /// `limit` is the time limit of a request.
    pub(crate) fn start(
        link: Arc<MemberLink>,
        leases: Arc<Leases>,
        clock: Clock,
        limit: Duration,
    ) -> Self {
        let (requests, asked) = mpsc::unbounded_channel();
        let task = KeepAliveTask { link, leases, clock, limit, requests: asked };
        Self { requests, task: tokio::spawn(task.run()).abort_handle() }
    }

    /// Requests a sign that is sent from now on.
    pub(crate) fn sign(&self, lease: &Arc<PoolLease>) -> AwaitedSign {
        let (reply, sign) = oneshot::channel();
        let _ = self.requests.send(SignRequest { lease: lease.clone(), reply });
        AwaitedSign(sign)
    }
}

struct KeepAliveTask {
    link: Arc<MemberLink>,
    leases: Arc<Leases>,
    clock: Clock,
    limit: Duration,
    requests: mpsc::UnboundedReceiver<SignRequest>,
}

/// A stream of a connection. Dropping it ends the stream.
struct SignStream {
    member: Arc<Member>,
    sender: MessageSender,
    reader: MessageReader,
}

impl SignStream {
    async fn open(member: &Arc<Member>) -> Result<Self, CallFailure> {
        let (sender, reader) = member.grpc.stream("/etcdserverpb.Lease/LeaseKeepAlive").await?;
        Ok(Self { member: member.clone(), sender, reader })
    }

    async fn next(&mut self) -> Result<LeaseAnswer, CallFailure> {
        let message = self.reader.message().await?;
        LeaseAnswer::read(&message).map_err(|_| CallFailure::Malformed)
    }

    fn send(
        &mut self,
        lease: Arc<PoolLease>,
        replies: Vec<SignReply>,
        now: Instant,
        open: &mut OpenSigns<OpenCall>,
    ) -> Result<(), CallFailure> {
        if !lease.takes_signs() {
            for reply in replies {
                let _ = reply.send(Err(lease_denied()));
            }
            return Ok(());
        }
        let id = lease.id;
        if open.add(lease, replies, now, || self.member.open_call()) {
            self.sender.send(&lease::of_lease(id))?;
        }
        Ok(())
    }
}

impl KeepAliveTask {
    async fn run(mut self) {
        let mut number = 0;
        loop {
            let Some(member) = self.next_member(number).await else { return };
            number = member.number;
            let mut open = OpenSigns::new(self.limit);
            let Err(failure) = self.exchange(&member, &mut open).await;
            let error = member.failed(failure);
            member.end(error.clone());
            open.fail(&error);
        }
    }

    /// The next connection. Requests that come before it fail.
    async fn next_member(&mut self, after: u64) -> Option<Arc<Member>> {
        let link = self.link.clone();
        let mut next = std::pin::pin!(link.next_member(after));
        loop {
            tokio::select! {
                biased;
                next = &mut next => return next,
                request = self.requests.recv() => {
                    let error = match link.member().await {
                        // It is about to be replaced.
                        Ok(member) => connection_lost(&member.name, "another one is opened"),
                        Err(error) => error,
                    };
                    let _ = request?.reply.send(Err(error.before_sending()));
                }
            }
        }
    }

    async fn exchange(
        &mut self,
        member: &Arc<Member>,
        open: &mut OpenSigns<OpenCall>,
    ) -> Result<Infallible, CallFailure> {
        let mut stream = SignStream::open(member).await?;
        let (mut due, mut requests) = (self.clock.now(), Vec::new());
        loop {
            tokio::select! {
                biased;
                answer = stream.next() => {
                    let answer = match answer {
                        Err(CallFailure::Refused(status)) if status.is_denied() => {
                            self.deny_refused(member, open, status).await?;
                            stream = self.reopen(member, open).await?;
                            continue;
                        }
                        answer => answer?,
                    };
                    let answered = open.on_answer(&answer, self.clock.now(), OpenCall::answered);
                    match answered.map_err(|_| CallFailure::Malformed)? {
                        SignOutcome::Taken => {}
                        SignOutcome::Wanted(lease, replies) => {
                            stream.send(lease, replies, self.clock.now(), open)?;
                        }
                        SignOutcome::Ended(lease) => self.leases.end(&lease),
                    }
                }
                count = self.requests.recv_many(&mut requests, BATCH) => {
                    if count == 0 {
                        return Err(CallFailure::Unsent("the pool is closed".to_owned()));
                    }
                    let now = self.clock.now();
                    for (lease, replies) in by_lease(requests.drain(..)) {
                        stream.send(lease, replies, now, open)?;
                    }
                }
                () = self.clock.sleep_until(due) => {
                    let now = self.clock.now();
                    // Answers may be there that this process has not read.
                    let was_stopped = now.since(due) >= LATEST_LOOK;
                    due = now + LOOK;
                    match open.verdict(now) {
                        _ if was_stopped => {}
                        StreamVerdict::InTime => {}
                        StreamVerdict::Reopen => {
                            stream = self.reopen(member, open).await?;
                        }
                        StreamVerdict::Leave => {
                            let why = "it does not forward signs of life to a leader";
                            return Err(CallFailure::Broken(why.to_owned()));
                        }
                    }
                    self.leases.abandon_unused();
                    for lease in self.leases.all() {
                        if !open.is_open(&lease) && is_due(&lease, now) {
                            stream.send(lease, Vec::new(), now, open)?;
                        }
                    }
                }
                error = member.ended() => return Err(CallFailure::Broken(error.to_string())),
            }
        }
    }

    /// Another stream, on which all open signs are sent again.
    async fn reopen(
        &self,
        member: &Arc<Member>,
        open: &mut OpenSigns<OpenCall>,
    ) -> Result<SignStream, CallFailure> {
        let mut stream = SignStream::open(member).await?;
        for id in open.begin_anew(self.clock.now()) {
            stream.sender.send(&lease::of_lease(id))?;
        }
        Ok(stream)
    }

    /// The member has ended the stream because the user lacks the right to a key of some lease.
    ///
    /// # Errors
    /// If no lease is the reason.
    async fn deny_refused(
        &self,
        member: &Arc<Member>,
        open: &mut OpenSigns<OpenCall>,
        status: CallStatus,
    ) -> Result<(), CallFailure> {
        self.leases.deny_refused(member).await;
        // Some may have been denied before their signs were sent.
        if open.refuse_denied() { Ok(()) } else { Err(CallFailure::Refused(status)) }
    }
}

/// One sign for each lease, however many requests there are for it.
fn by_lease(
    requests: impl Iterator<Item = SignRequest>,
) -> impl Iterator<Item = (Arc<PoolLease>, Vec<SignReply>)> {
    let mut signs: HashMap<i64, (Arc<PoolLease>, Vec<SignReply>)> = HashMap::new();
    for SignRequest { lease, reply } in requests {
        signs.entry(lease.id).or_insert_with(|| (lease, Vec::new())).1.push(reply);
    }
    signs.into_values()
}

fn is_due(lease: &PoolLease, now: Instant) -> bool {
    now.since(lease.last_sign().sent) >= lease.sign_interval(now)
}
