//! The task that keeps a pool connected to one member of the cluster.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::backend::backoff::Backoff;
use crate::backend::coordination::first_server::first_to_serve;
use crate::backend::etcd::leases::Leases;
use crate::backend::etcd::member::Member;
use crate::backend::etcd::member_opener::{
    AttemptLimits, MemberOpener, PolledDriver, SHORTEST_TAKE_OVER, ServingMember, until_ended,
};
use crate::backend::etcd::protocol::transaction::{KeyOperation, Transaction};
use crate::backend::etcd::server_error::{closed, connection_lost};
use crate::backend::etcd::transport::MemberDialer;
use crate::backend::queue_events::QueueEvents;
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};

/// The longest pause after a member has refused the pool. All members refuse it for the same reason, and a login costs them time.
const LONGEST_REFUSAL: Duration = Duration::from_secs(30);

/// What ends with the pool.
#[derive(Default)]
pub(crate) struct LastRequests {
    /// Ended with all their keys.
    pub(crate) leases: Vec<i64>,
    /// Keys of leases that stay.
    pub(crate) keys: Vec<Vec<u8>>,
}

#[derive(Clone)]
enum MemberState {
    /// No member serves yet.
    Opening,
    Up(Arc<Member>),
    Down(BackendError),
}

/// The connection of a pool. Dropping it ends the connection.
pub(crate) struct MemberLink {
    state: watch::Receiver<MemberState>,
    end: mpsc::UnboundedSender<LastRequests>,
}

impl MemberLink {
    pub(crate) fn start(
        dialer: Arc<MemberDialer>,
        clock: Clock,
        events: Arc<QueueEvents>,
        leases: Arc<Leases>,
    ) -> Arc<Self> {
        let (state, known) = watch::channel(MemberState::Opening);
        let (end, last_requests) = mpsc::unbounded_channel();
        let member = dialer.members.random();
        let opener = MemberOpener::new(dialer, clock, leases);
        let task = MemberTask {
            opener,
            events,
            state,
            last_requests,
            ending: None,
            member,
            number: 0,
            took: None,
        };
        tokio::spawn(task.run());
        Arc::new(Self { state: known, end })
    }

    /// The connection, as soon as a member serves for the first time.
    ///
    /// # Errors
    /// The error of the last connection, while there is none.
    pub(crate) async fn member(&self) -> Result<Arc<Member>, BackendError> {
        let mut state = self.state.clone();
        let known = state.wait_for(|state| !matches!(state, MemberState::Opening)).await;
        match known.as_deref() {
            Ok(MemberState::Up(member)) => Ok(member.clone()),
            Ok(MemberState::Down(error)) => Err(error.clone().before_sending()),
            Ok(MemberState::Opening) | Err(_) => Err(closed()),
        }
    }

    /// The next connection after the one with this number. `None` if the pool is closed.
    pub(crate) async fn next_member(&self, after: u64) -> Option<Arc<Member>> {
        let is_next =
            |state: &MemberState| matches!(state, MemberState::Up(it) if it.number > after);
        match &*self.state.clone().wait_for(is_next).await.ok()? {
            MemberState::Up(member) => Some(member.clone()),
            MemberState::Opening | MemberState::Down(_) => None,
        }
    }

    /// Ends the connection after these last requests.
    pub(crate) fn begin_close(&self, last: LastRequests) {
        let _ = self.end.send(last);
    }

    /// Waits until the connection has ended.
    pub(crate) async fn closed(&self) {
        self.end.closed().await;
    }
}

struct MemberTask {
    opener: MemberOpener,
    events: Arc<QueueEvents>,
    state: watch::Sender<MemberState>,
    last_requests: mpsc::UnboundedReceiver<LastRequests>,
    /// Set when the pool is closed.
    ending: Option<LeasesEnding>,
    /// The member of the last connection.
    member: usize,
    /// The number of the last connection.
    number: u64,
    /// How long it took to open the last connection that served, without a login.
    took: Option<Duration>,
}

/// What is left to send. It is sent once more on the next connection if one ends without the answers.
struct LeasesEnding {
    requests: LastRequests,
    until: Instant,
}

impl MemberTask {
    async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        let mut connected = match self.open_first().await {
            Some(Ok(connected)) => connected,
            // No pool is made.
            Some(Err(error)) => return self.down(&error),
            None => return,
        };
        loop {
            let ServingMember { member, driver, took } = connected;
            let up_since = self.opener.clock.now();
            self.state.send_replace(MemberState::Up(member.clone()));
            if self.took.replace(took).is_some() {
                // There was a connection before.
                self.events.resync();
            }
            let Some(error) = self.serve(&member, driver).await else { return };
            member.end(error.clone());
            self.down(&error);
            backoff.ended(self.opener.clock.now().since(up_since));
            self.member = self.opener.dialer.members.other_than(self.member);
            let Some(next) = self.open(&mut backoff).await else { return };
            connected = next;
        }
    }

    fn down(&self, error: &BackendError) {
        self.state.send_replace(MemberState::Down(error.clone()));
        self.events.disconnected(error);
    }

    /// Connects to the first member that serves. Requests wait for it. `None` if the pool is closed.
    async fn open_first(&mut self) -> Option<Result<ServingMember, BackendError>> {
        self.number += 1;
        let MemberOpener { dialer, clock, .. } = &self.opener;
        let members = (self.member, dialer.members.count());
        let open = |member, left| self.opener.open(AttemptLimits::first(left), member, self.number);
        let opened = tokio::select! {
            opened = first_to_serve(members, dialer.limits.connect, *clock, open) => opened,
            _ = self.last_requests.recv() => return None,
        };
        Some(opened.map(|(member, connected)| {
            self.member = member;
            connected
        }))
    }

    /// Connects to one member after another until one serves. Requests fail meanwhile. `None` if the pool is closed, and there is
    /// nothing to end, or no time left for it.
    async fn open(&mut self, backoff: &mut Backoff) -> Option<ServingMember> {
        let members = self.opener.dialer.members.count();
        let (clock, limit) = (self.opener.clock, self.opener.dialer.limits.request);
        let mut refusals = Backoff::new(Duration::from_millis(500), LONGEST_REFUSAL);
        let (mut tried, mut pause) = (0, backoff.next());
        loop {
            self.number += 1;
            let limits = AttemptLimits::next(self.attempt_limit(tried));
            let attempt = async {
                sleep(pause).await;
                self.opener.open(limits, self.member % members, self.number).await
            };
            let outcome = {
                let mut attempt = pin!(attempt);
                loop {
                    let until = self.ending.as_ref().map(|ending| ending.until);
                    tokio::select! {
                        outcome = &mut attempt => break outcome,
                        last = self.last_requests.recv(), if until.is_none() => {
                            let until = clock.now() + limit;
                            self.ending = Some(LeasesEnding { requests: last?, until });
                        }
                        () = clock.sleep_until_due(until) => return None,
                    }
                }
            };
            let error = match outcome {
                Ok(connected) => return Some(connected),
                Err(failure) => failure.error,
            };
            self.down(&error);
            self.member += 1;
            tried += 1;
            pause = if error.kind() == FailureKind::Rejected {
                refusals.next()
            } else if tried % members == 0 {
                backoff.next()
            } else {
                Duration::ZERO
            };
        }
    }

    /// How long the next attempt may take. After a connection has ended, leases run out, and a member without an answer must not
    /// use up their time. So each of several members first gets a multiple of the time that the last connection took.
    fn attempt_limit(&self, tried: usize) -> Duration {
        let members = self.opener.dialer.members.count();
        let connect = self.opener.dialer.limits.connect;
        match self.took {
            Some(took) if members > 1 && tried < members => {
                took.saturating_mul(4).max(SHORTEST_TAKE_OVER).min(connect)
            }
            _ => connect,
        }
    }

    /// Moves bytes until the connection ends. `None` if the pool is closed.
    async fn serve(
        &mut self,
        member: &Arc<Member>,
        mut driver: PolledDriver,
    ) -> Option<BackendError> {
        let limit = self.opener.dialer.limits.request;
        // Once a quarter of the time limit, so that silence is found in time.
        let watching = async {
            let mut checked = self.opener.clock.now();
            loop {
                sleep(limit / 4).await;
                let now = self.opener.clock.now();
                let was_stopped = now.since(checked) >= limit / 2;
                checked = now;
                // There may be answers that this process has not read.
                if was_stopped {
                    continue;
                }
                // A change that was lost with its leader has no answer for seven seconds, while other calls are answered.
                if member.silence(now) >= limit || member.oldest_call(now) >= 2 * limit {
                    return connection_lost(&member.name, "it does not answer");
                }
            }
        };
        if self.ending.is_none() {
            let last = tokio::select! {
                biased;
                why = &mut driver => return Some(connection_lost(&member.name, &why)),
                error = watching => return Some(error),
                error = member.ended() => return Some(error),
                last = self.last_requests.recv() => last,
            };
            let until = self.opener.clock.now() + limit;
            self.ending = Some(LeasesEnding { requests: last?, until });
        }
        let LeasesEnding { requests, until } = self.ending.as_ref()?;
        let left = until.since(self.opener.clock.now());
        let lost = |why: String| connection_lost(&member.name, &why);
        let ended =
            timeout(left, until_ended(end(member.clone(), requests), &mut driver, lost)).await;
        // The next connection sends them once more.
        ended.ok()?.err()
    }
}

/// The last requests of a pool, all sent at the same time.
///
/// # Errors
/// Some may not have been executed.
async fn end(member: Arc<Member>, requests: &LastRequests) -> Result<(), BackendError> {
    /// The servers' default limit is 128.
    const AT_ONCE: usize = 100;
    let mut ending = JoinSet::new();
    for keys in requests.keys.chunks(AT_ONCE) {
        let deletes = keys.iter().map(|key| KeyOperation::Delete { key: key.clone() });
        let (member, deletes) = (member.clone(), Transaction::of(deletes.collect()));
        ending.spawn(async move {
            member.transact(&deletes).await.map(drop).map_err(BackendError::from)
        });
    }
    for lease in requests.leases.iter().copied() {
        let member = member.clone();
        ending.spawn(async move { Leases::revoke(&member, lease).await });
    }
    let mut outcome = Ok(());
    while let Some(ended) = ending.join_next().await {
        match ended.unwrap_or(Ok(())) {
            // What is refused is not sent once more.
            Err(error) if error.kind() != FailureKind::Rejected => outcome = Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    outcome
}
