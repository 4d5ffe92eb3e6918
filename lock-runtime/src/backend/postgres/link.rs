//! A connection that is opened again when it ends, and the requests that wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use crate::backend::backoff::Backoff;
use crate::backend::postgres::batch::Batch;
use crate::backend::postgres::channel::{self, ChannelPayload, PROBE};
use crate::backend::postgres::server_error::failure;
use crate::backend::postgres::session::{Connector, OnPayload, ServerProcess, Session};
use crate::backend::postgres::sweep::sweep;
use crate::backend::queue_events::QueueEvents;
use crate::backend::sql::job::{Jobs, StoreJob, closed, no_answer, refuse_rest};
use crate::backend::sql::pending_jobs::PendingJobs;
use crate::backend::sql::reopen::reopened;
use crate::backend::sql::sender::{JobSender, Purpose};
use crate::backend::sql::sweep::RowSweep;
use crate::backend::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::mutex::Mutex;

/// How long a connection is idle before it is checked.
const IDLE_CHECK: Duration = Duration::from_secs(5);

/// How long a notification of the pool to itself may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a pooler is not probed again that has passed on no notification. A busy one may have been too late.
const PROBE_INTERVAL: Duration = Duration::from_secs(60);

/// No moment.
const NEVER: u64 = u64::MAX;

/// What the connections of a pool share.
pub(crate) struct PoolState {
    pub(crate) connector: Connector,
    pub(crate) events: Arc<QueueEvents>,
    pub(crate) clock: Clock,
    /// The channel on which notifications arrive, or nothing.
    channel: Mutex<String>,
    /// When a pooler in front of the server has passed on no notification, in the clock's nanoseconds.
    unnotified_at: AtomicU64,
}

impl PoolState {
    pub(crate) fn new(connector: Connector, events: Arc<QueueEvents>, clock: Clock) -> Self {
        let (channel, unnotified_at) = (Mutex::default(), AtomicU64::new(NEVER));
        Self { connector, events, clock, channel, unnotified_at }
    }

    /// Has `session` listen, if notifications may arrive there.
    async fn listen(&self, session: &Session, probed: &Notify) -> Result<(), BackendError> {
        let now = self.clock.now();
        let unnotified_at = self.unnotified_at.load(Ordering::Relaxed);
        let is_known = unnotified_at != NEVER
            && now.since(Instant::from_nanos(unnotified_at)) < PROBE_INTERVAL;
        let channel = if is_known && !session.is_direct {
            String::new()
        } else {
            // A pooler that passes on no notification takes the time of the probe, too.
            let limit = self.connector.limits.connect.saturating_add(PROBE_TIMEOUT);
            let listening = listen(&self.connector, session, probed);
            let channel = timeout(limit, listening).await.unwrap_or_else(|_| Err(no_answer()))?;
            let at = if channel.is_empty() { now.as_nanos() } else { NEVER };
            self.unnotified_at.store(at, Ordering::Relaxed);
            channel
        };
        *self.channel.lock() = channel;
        Ok(())
    }
}

/// Connects. After the first success, the connection is reopened whenever it ends.
pub(crate) async fn connect(
    state: &Arc<PoolState>,
    purpose: Purpose,
) -> Result<JobSender, BackendError> {
    let (jobs, inbox) = mpsc::unbounded_channel();
    let session = open(state, purpose, None).await?;
    let mut link = LinkTask::new(state.clone(), purpose, inbox);
    let task = tokio::spawn(async move {
        link.run(session).await;
        refuse_rest(&mut link.inbox);
    });
    Ok(JobSender::new(jobs, task.abort_handle()))
}

struct LinkTask {
    state: Arc<PoolState>,
    purpose: Purpose,
    inbox: UnboundedReceiver<StoreJob>,
    pending: PendingJobs,
    sweep: RowSweep,
}

impl LinkTask {
    fn new(state: Arc<PoolState>, purpose: Purpose, inbox: UnboundedReceiver<StoreJob>) -> Self {
        let forget_after = state.connector.database.params.forget_after;
        let sweep = RowSweep::new(forget_after, state.clock.now());
        let pending = PendingJobs::new(state.clock, state.connector.limits.request);
        Self { state, purpose, inbox, pending, sweep }
    }

    async fn run(&mut self, mut session: Session) {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        loop {
            let up_since = self.state.clock.now();
            let Some((error, answered)) = self.serve(&mut session).await else { return };
            self.pending.fail(&error);
            if self.purpose == Purpose::Upkeep {
                self.state.channel.lock().clear();
            }
            let lost = session.is_direct.then_some(session.process);
            drop(session);
            self.state.events.disconnected(&error);
            backoff.ended(answered.since(up_since));
            let (state, purpose, inbox) = (&self.state, self.purpose, &mut self.inbox);
            let again = || open(state, purpose, lost);
            let next = reopened(inbox, &state.events, &mut backoff, error, again).await;
            let Some(next) = next else { return };
            session = next;
            if self.purpose == Purpose::Upkeep {
                // Notifications were missed.
                self.state.events.resync();
            }
        }
    }

    /// Sends requests until the connection ends, and returns the error and when the last batch was answered. `None` if the
    /// pool is closed.
    async fn serve(&mut self, session: &mut Session) -> Option<(BackendError, Instant)> {
        let mut answered = self.state.clock.now();
        let mut jobs = Vec::new();
        let server = self.state.connector.server();
        loop {
            let idle_until = answered + IDLE_CHECK;
            let wake_at = match self.purpose {
                Purpose::Claims => idle_until,
                Purpose::Upkeep => idle_until.min(self.sweep.due()),
            };
            tokio::select! {
                biased;
                ended = &mut session.ended => {
                    return Some((ended.unwrap_or_else(|_| no_answer()), answered));
                }
                count = self.inbox.recv_many(&mut jobs, usize::MAX) => {
                    if count == 0 {
                        return None;
                    }
                }
                () = std::future::ready(()), if !self.pending.is_empty() => {}
                () = self.state.clock.sleep_until(wake_at) => {
                    // A connection that has ended silently receives no notifications, and the server ends an idle one.
                    jobs.push(StoreJob::Probe(oneshot::channel().0));
                }
            }
            let state = self.state.clone();
            let jobs = Jobs::of(jobs.drain(..));
            let closes = jobs.closes;
            let channel = state.channel.lock().clone();
            let (connector, events, clock) = (&state.connector, &state.events, state.clock);
            let batch = Batch::new(session, connector, &server, events, channel, clock);
            batch.run(jobs, &mut self.pending).await;
            if self.purpose == Purpose::Upkeep && self.sweep.due() <= state.clock.now() {
                sweep(&mut self.sweep, &batch).await;
            }
            if closes {
                self.pending.fail(&closed());
                return None;
            }
            if let Some(error) = batch.broken() {
                return Some((error.clone(), answered));
            }
            answered = self.state.clock.now();
        }
    }
}

/// Opens a connection for `purpose`, after the end of the one to the server process `lost`.
async fn open(
    state: &Arc<PoolState>,
    purpose: Purpose,
    lost: Option<ServerProcess>,
) -> Result<Session, BackendError> {
    let probed = Arc::new(Notify::new());
    let on_payload: OnPayload = match purpose {
        Purpose::Claims => Arc::new(|_: &str| {}),
        Purpose::Upkeep => on_payload(state.events.clone(), probed.clone()),
    };
    let session = state.connector.open(on_payload).await?;
    let limits = state.connector.limits;
    if let Some(lost) = lost.filter(|_| session.is_direct) {
        // Longer than a statement there may take.
        let patience = 2 * limits.request + Duration::from_millis(500);
        let limit = limits.connect.max(patience);
        let ended = session.end_process(lost, state.clock, (patience, limit));
        timeout(limit + patience, ended).await.unwrap_or_else(|_| Err(no_answer()))?;
    }
    if purpose == Purpose::Upkeep {
        state.listen(&session, &probed).await?;
    }
    Ok(session)
}

/// Passes notifications on.
fn on_payload(events: Arc<QueueEvents>, probed: Arc<Notify>) -> OnPayload {
    Arc::new(move |payload| match ChannelPayload::parse(payload) {
        Some(ChannelPayload::HeadOfQueue { key, owner, available_in }) => {
            events.head_of_queue(&key, owner, available_in);
        }
        Some(ChannelPayload::Contended { key }) => events.contended(&key),
        Some(ChannelPayload::Probe) => probed.notify_one(),
        None => {}
    })
}

/// Listens on a new channel, and returns its name, or nothing if no notification arrives there. A pooler accepts the
/// statement and passes none.
async fn listen(
    connector: &Connector,
    session: &Session,
    probed: &Notify,
) -> Result<String, BackendError> {
    let name = channel::name(session.process.id)
        .map_err(|error| BackendError::new(FailureKind::NotApplied, error.to_string()))?;
    let client = &session.client;
    client.batch_execute(&format!("LISTEN {name}")).await.map_err(failure)?;
    let notify = format!("NOTIFY {name}, '{PROBE}'");
    if session.is_direct {
        client.batch_execute(&notify).await.map_err(failure)?;
        probed.notified().await;
        return Ok(name);
    }
    // By another connection: a pooler passes on what arrives while a statement of this one runs.
    let other = connector.open(Arc::new(|_: &str| {})).await?;
    other.client.batch_execute(&notify).await.map_err(failure)?;
    if timeout(PROBE_TIMEOUT, probed.notified()).await.is_ok() {
        return Ok(name);
    }
    client.batch_execute(&format!("UNLISTEN {name}")).await.map_err(failure)?;
    Ok(String::new())
}
