//! Signs of life for all leases of a pool, on one stream.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::backend::BackendError;
use crate::backend::etcd::grpc::{CallFailure, MessageSender};
use crate::backend::etcd::leases::{Leases, LifeSign, PoolLease};
use crate::backend::etcd::member::{Member, OpenCall};
use crate::backend::etcd::member_task::MemberLink;
use crate::backend::etcd::protocol::lease::{self, LeaseAnswer};
use crate::backend::etcd::server_error::{closed, connection_lost, lease_ended};
use crate::base::clock::{Clock, Instant};

/// The most requests for signs that are taken over at once.
const BATCH: usize = 256;

/// How often leases are looked at that have had no sign for a while.
const LOOK: Duration = Duration::from_millis(100);

type SignReply = oneshot::Sender<Result<LifeSign, BackendError>>;

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
    /// [`lease_ended`] if there is no such lease any more.
    pub(crate) async fn get(self) -> Result<LifeSign, BackendError> {
        self.0.await.unwrap_or_else(|_| Err(closed()))
    }
}

impl KeepAlives {
    pub(crate) fn start(link: Arc<MemberLink>, leases: Arc<Leases>, clock: Clock) -> Self {
        let (requests, asked) = mpsc::unbounded_channel();
        let task = KeepAliveTask { link, leases, clock, requests: asked };
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
    requests: mpsc::UnboundedReceiver<SignRequest>,
}

/// A sign of life without an answer.
struct OpenSign {
    lease: Arc<PoolLease>,
    sent: Instant,
    call: OpenCall,
    replies: Vec<SignReply>,
}

impl KeepAliveTask {
    async fn run(mut self) {
        let mut number = 0;
        loop {
            let Some(member) = self.next_member(number).await else { return };
            number = member.number;
            let mut open = VecDeque::new();
            let failure = self.serve(&member, &mut open).await;
            let error = member.failed(failure);
            member.end(error.clone());
            for sign in open {
                for reply in sign.replies {
                    let _ = reply.send(Err(error.clone()));
                }
            }
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

    async fn serve(&mut self, member: &Arc<Member>, open: &mut VecDeque<OpenSign>) -> CallFailure {
        let opened = member.grpc.stream("/etcdserverpb.Lease/LeaseKeepAlive").await;
        let (mut sender, mut reader) = match opened {
            Ok(opened) => opened,
            Err(failure) => return failure,
        };
        let (mut due, mut requests) = (self.clock.now(), Vec::new());
        loop {
            tokio::select! {
                biased;
                message = reader.next() => {
                    let message = match message {
                        Ok(Some(message)) => message,
                        Ok(None) => return CallFailure::Broken("a stream has ended".to_owned()),
                        Err(failure) => return failure,
                    };
                    let Ok(answer) = LeaseAnswer::read(&message) else { return CallFailure::Malformed };
                    self.on_answer(&answer, open);
                }
                count = self.requests.recv_many(&mut requests, BATCH) => {
                    if count == 0 {
                        return CallFailure::Unsent("the pool is closed".to_owned());
                    }
                    if let Err(failure) = self.send(member, &mut sender, requests.drain(..), open) {
                        return failure;
                    }
                }
                () = self.clock.sleep_until(due) => {
                    let now = self.clock.now();
                    due = now + LOOK;
                    let leases = self.leases.all().into_iter().filter(|lease| is_due(lease, now));
                    let signs = leases.map(|lease| SignRequest { lease, reply: oneshot::channel().0 });
                    if let Err(failure) = self.send(member, &mut sender, signs, open) {
                        return failure;
                    }
                }
                error = member.ended() => return CallFailure::Broken(error.to_string()),
            }
        }
    }

    /// One sign for each lease, however many requests there are for it.
    fn send(
        &self,
        member: &Arc<Member>,
        sender: &mut MessageSender,
        requests: impl Iterator<Item = SignRequest>,
        open: &mut VecDeque<OpenSign>,
    ) -> Result<(), CallFailure> {
        let mut signs: HashMap<i64, (Arc<PoolLease>, Vec<SignReply>)> = HashMap::new();
        for SignRequest { lease, reply } in requests {
            signs.entry(lease.id).or_insert_with(|| (lease, Vec::new())).1.push(reply);
        }
        for (id, (lease, replies)) in signs {
            let (sent, call) = (self.clock.now(), member.open_call());
            open.push_back(OpenSign { lease, sent, call, replies });
            sender.send(&lease::of_lease(id))?;
        }
        Ok(())
    }

    fn on_answer(&self, answer: &LeaseAnswer, open: &mut VecDeque<OpenSign>) {
        // Answers come in the order of the signs.
        let Some(OpenSign { lease, sent, call, replies }) = open.pop_front() else { return };
        call.answered();
        let outcome = if answer.seconds > 0 && answer.id == lease.id {
            let sign = LifeSign { sent, term: answer.origin.term };
            lease.on_sign(sign);
            Ok(sign)
        } else {
            self.leases.end(&lease);
            Err(lease_ended())
        };
        for reply in replies {
            let _ = reply.send(outcome.clone());
        }
    }
}

fn is_due(lease: &PoolLease, now: Instant) -> bool {
    now.since(lease.last_sign().sent) >= lease.sign_interval(now)
}
