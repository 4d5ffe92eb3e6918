//! A connection that is opened again when it ends, and the requests that wait for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::backend::BackendError;
use crate::backend::backoff::Backoff;
use crate::backend::mysql::batch::{MysqlBatch, script_limit};
use crate::backend::mysql::look::Looks;
use crate::backend::mysql::pool_state::MysqlPoolState;
use crate::backend::mysql::session::{MysqlSession, MysqlSessionIdentity};
use crate::backend::mysql::sweep::sweep;
use crate::backend::sql::job::{Jobs, StoreJob, closed, no_answer, refuse_rest};
use crate::backend::sql::locked_rows::LockedRows;
use crate::backend::sql::pending_jobs::PendingJobs;
use crate::backend::sql::reopen::reopened;
use crate::backend::sql::sender::{JobSender, Purpose};
use crate::backend::sql::sweep::RowSweep;
use crate::base::clock::Instant;

/// Between two checks of a connection and of its server.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Connects. After the first success, the connection is reopened whenever it ends.
pub(crate) async fn connect(
    state: &Arc<MysqlPoolState>,
    purpose: Purpose,
) -> Result<JobSender, BackendError> {
    let (jobs, inbox) = mpsc::unbounded_channel();
    let session = open(state, purpose, &MysqlSessionIdentity::default()).await?;
    let mut link = MysqlLink::new(state.clone(), purpose, inbox);
    let task = tokio::spawn(async move {
        link.run(session).await;
        refuse_rest(&mut link.inbox);
    });
    Ok(JobSender::new(jobs, task.abort_handle()))
}

struct MysqlLink {
    state: Arc<MysqlPoolState>,
    purpose: Purpose,
    inbox: UnboundedReceiver<StoreJob>,
    locked: LockedRows,
    pending: PendingJobs,
    sweep: RowSweep,
    looks: Looks,
}

/// Why a connection was left.
enum Left {
    /// The pool is closed.
    Closed,
    /// The connection has ended. Its last batch was answered at that time.
    Ended(BackendError, Instant),
}

impl MysqlLink {
    fn new(
        state: Arc<MysqlPoolState>,
        purpose: Purpose,
        inbox: UnboundedReceiver<StoreJob>,
    ) -> Self {
        let now = state.clock.now();
        let sweep = RowSweep::new(state.connector.database.params.forget_after, now);
        let pending = PendingJobs::new(state.clock, state.connector.limits.request);
        Self {
            state,
            purpose,
            inbox,
            locked: LockedRows::default(),
            pending,
            sweep,
            looks: Looks::new(now),
        }
    }

    async fn run(&mut self, mut session: MysqlSession) {
        let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        loop {
            let up_since = self.state.clock.now();
            let (error, answered) = match self.serve(&mut session).await {
                Left::Closed => return session.close().await,
                Left::Ended(error, answered) => (error, answered),
            };
            self.pending.fail(&error);
            if self.purpose == Purpose::Upkeep {
                self.state.channel().clear();
                self.state.watch_list().leave_queues(self.state.clock.now());
            }
            let lost = session.identity.clone();
            drop(session);
            self.state.events.disconnected(&error);
            backoff.ended(answered.since(up_since));
            let (state, purpose, inbox) = (&self.state, self.purpose, &mut self.inbox);
            let again = || open(state, purpose, &lost);
            let next = reopened(inbox, &state.events, &mut backoff, error, again).await;
            let Some(next) = next else { return };
            session = next;
            if self.purpose == Purpose::Upkeep {
                // Nothing was looked at meanwhile.
                self.state.events.resync();
            }
        }
    }

    /// Sends requests until the connection ends.
    async fn serve(&mut self, session: &mut MysqlSession) -> Left {
        let mut answered = self.state.clock.now();
        let mut check_at = answered + CHECK_EVERY;
        let mut jobs = Vec::new();
        let state = self.state.clone();
        let is_upkeep = self.purpose == Purpose::Upkeep;
        loop {
            let next_look = self.next_look();
            let wake_at = [Some(self.sweep.due()).filter(|_| is_upkeep), next_look];
            let wake_at = wake_at.into_iter().flatten().fold(check_at, Instant::min);
            tokio::select! {
                biased;
                count = self.inbox.recv_many(&mut jobs, usize::MAX) => {
                    if count == 0 {
                        return Left::Closed;
                    }
                }
                () = std::future::ready(()), if !self.pending.is_empty() => {}
                () = state.watched.notified(), if is_upkeep => continue,
                () = state.clock.sleep_until(wake_at) => {}
            }
            let now = state.clock.now();
            if now >= check_at {
                // A connection may have ended silently, and its server may have become a replica.
                jobs.push(StoreJob::Probe(oneshot::channel().0));
                check_at = now + CHECK_EVERY;
                state.watch_list().prune(now);
            }
            let jobs = Jobs::of(jobs.drain(..));
            let closes = jobs.closes;
            let mut batch = MysqlBatch::new(session, &state, &mut self.locked);
            batch.run(jobs, &mut self.pending).await;
            if is_upkeep && self.sweep.due() <= now {
                sweep(&mut self.sweep, &mut batch).await;
            }
            if next_look.is_some_and(|due| due <= now) {
                self.looks.run(&mut batch).await;
            }
            if closes {
                self.pending.fail(&closed());
                return Left::Closed;
            }
            if let Some(error) = batch.take_broken() {
                return Left::Ended(error, answered);
            }
            answered = state.clock.now();
        }
    }

    fn next_look(&self) -> Option<Instant> {
        let interval = match self.purpose {
            Purpose::Upkeep => self.state.watch_list().interval(),
            Purpose::Claims => None,
        };
        interval.map(|interval| self.looks.due(interval))
    }
}

/// Opens a connection for `purpose`, after the end of the session `lost`.
async fn open(
    state: &Arc<MysqlPoolState>,
    purpose: Purpose,
    lost: &MysqlSessionIdentity,
) -> Result<MysqlSession, BackendError> {
    let mut session = state.connector.open().await?;
    // Longer than an answer there may take.
    let patience = script_limit(state.connector.limits) + Duration::from_millis(500);
    let limit = state.connector.limits.connect.max(2 * patience);
    let ended = timeout(limit, session.end_session(lost, &state.clock, patience)).await;
    ended.unwrap_or_else(|_| Err(no_answer()))?;
    if purpose == Purpose::Upkeep {
        state.channel().clone_from(&session.identity.name);
    }
    Ok(session)
}
