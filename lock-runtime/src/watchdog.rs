//! Keeps leases alive while they are held, and ends belief in those that could not be kept.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::{BackendError, Failure, Held, Store};
use crate::clock::{Clock, Instant};
use crate::driver::Driver;
use crate::lease::{Beat, Lease, Loss};
use crate::{jitter, observe};

/// One schedule for all leases of a pool. Leases that are due together are renewed in one round trip.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    schedule: Mutex<Schedule>,
    /// Wakes the task when a lease becomes the next one.
    sooner: Notify,
}

type Schedule = BTreeMap<(Instant, u64), Arc<Lease>>;

/// What the watchdog works with.
pub(crate) struct Tools {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Clock,
    pub(crate) driver: Driver,
    pub(crate) patience: Duration,
}

/// Leases due within this span of each other share a round trip.
const TICK: Duration = Duration::from_millis(2);

impl Watchdog {
    /// Begins to look after `lease`.
    pub(crate) fn watch(&self, lease: &Arc<Lease>) {
        if let Some(due) = lease.due() {
            self.file(lease, due);
        }
    }

    /// Stops looking after `lease`.
    pub(crate) fn forget(&self, lease: &Lease) {
        let mut schedule = self.schedule();
        let filed_at = Instant::from_nanos(lease.filed_at.load(Ordering::Relaxed));
        schedule.remove(&(filed_at, lease.id));
    }

    fn file(&self, lease: &Arc<Lease>, due: Instant) {
        let mut schedule = self.schedule();
        let filed_at = lease.filed_at.swap(due.as_nanos(), Ordering::Relaxed);
        schedule.remove(&(Instant::from_nanos(filed_at), lease.id));
        let is_next = schedule.first_key_value().is_none_or(|(next, _)| due < next.0);
        schedule.insert((due, lease.id), lease.clone());
        if is_next {
            self.sooner.notify_one();
        }
    }

    fn take_due(&self, by: Instant) -> Vec<Arc<Lease>> {
        let mut schedule = self.schedule();
        let later = schedule.split_off(&(by, u64::MAX));
        std::mem::replace(&mut *schedule, later).into_values().collect()
    }

    /// Renews what is due. Runs on the driver for the life of the pool.
    pub(crate) async fn run(self: Arc<Self>, tools: Tools) {
        let tools = Arc::new(tools);
        loop {
            let next = self.schedule().first_key_value().map(|(&(due, _), _)| due);
            match next {
                None => self.sooner.notified().await,
                Some(due) => tokio::select! {
                    () = tools.clock.sleep_until(due) => self.tick(&tools),
                    () = self.sooner.notified() => {}
                },
            }
        }
    }

    fn tick(self: &Arc<Self>, tools: &Arc<Tools>) {
        let now = tools.clock.now();
        let mut batch = Vec::new();
        for lease in self.take_due(now + TICK) {
            match lease.beat(now + TICK) {
                Beat::Renew(look_again) => {
                    self.file(&lease, look_again);
                    batch.push(lease);
                }
                Beat::Wait(due) => self.file(&lease, due),
                Beat::Lost(loss) => observe::lost(&lease, loss),
                Beat::Over => {}
            }
        }
        if !batch.is_empty() {
            // On its own, so that a store that does not answer stops nobody else's clock.
            tools.driver.spawn(self.clone().renew(tools.clone(), batch));
        }
    }

    async fn renew(self: Arc<Self>, tools: Arc<Tools>, batch: Vec<Arc<Lease>>) {
        let requests: Vec<_> = batch.iter().map(|lease| lease.to_renew()).collect();
        let patience = batch.iter().map(|lease| retry_pause(lease)).min().unwrap_or_default();
        let sent = tools.clock.now();
        let answer =
            tokio::time::timeout(patience.min(tools.patience), tools.store.renew(&requests)).await;
        let now = tools.clock.now();
        let silence = || {
            Err(BackendError::new(Failure::Unknown, "the store did not answer a renewal in time"))
        };
        let mut outcomes = answer.unwrap_or_default().into_iter();
        for lease in &batch {
            match outcomes.next().unwrap_or_else(silence) {
                Ok(Held::Yes) => {
                    lease.renewed(sent, jitter::around(renew_every(lease), lease.id));
                    observe::renewed(lease);
                }
                Ok(Held::No) => {
                    if lease.lose(Loss::Taken) {
                        observe::lost(lease, Loss::Taken);
                    }
                    // A holder that has let go meanwhile is waiting for this.
                    lease.renewed(sent, Duration::MAX);
                }
                Err(error) => {
                    observe::not_renewed(lease, &error);
                    lease.not_renewed(now, retry_pause(lease) / 4);
                }
            }
            self.watch(lease);
        }
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn renew_every(lease: &Lease) -> Duration {
    lease.policy.renew_every.unwrap_or(Duration::MAX)
}

/// How long an unanswered renewal is waited for before the next one is sent: short enough that several
/// fit between the first and the end of belief.
fn retry_pause(lease: &Lease) -> Duration {
    let ttl = lease.policy.ttl.get();
    (ttl / 6).min(renew_every(lease)).max(Duration::from_millis(5))
}
