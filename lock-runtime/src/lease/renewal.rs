//! Keeps leases alive while they are held, and ends belief in those that could not be kept.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{BackendError, DynBackend, FailureKind, LeaseStatus};
use crate::base::clock::{Clock, Instant};
use crate::exec::driver::Driver;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::exec::timer_queue::Deadlines;
use crate::lease::lease::{Beat, Lease, Loss};
use crate::lock::release::release;

/// One schedule for all leases of a pool. Leases that are due together are renewed in one round trip.
#[derive(Debug, Default)]
pub(crate) struct Watchdog(Deadlines<Arc<Lease>>);

/// What the watchdog works with.
pub(crate) struct Tools {
    pub(crate) store: Arc<dyn DynBackend>,
    pub(crate) clock: Clock,
    pub(crate) driver: Driver,
    pub(crate) request_timeout: Duration,
}

/// Leases due within this span of each other share a round trip.
const TICK: Duration = Duration::from_millis(2);

/// Where a lease is filed that is not.
const NOWHERE: Instant = Instant::from_nanos(0);

/// What a store needs for one renewal of many, at the most.
const EACH: Duration = Duration::from_micros(50);

/// Leases to be renewed together.
struct Batch {
    leases: Vec<Arc<Lease>>,
    /// Half of what is left to the one that ends first: the rest is for a second try.
    left: Duration,
}

impl Default for Batch {
    fn default() -> Self {
        Self { leases: Vec::new(), left: Duration::MAX }
    }
}

impl Batch {
    fn add(&mut self, lease: Arc<Lease>, left: Duration) {
        self.leases.push(lease);
        self.left = self.left.min(left);
    }
}

impl Watchdog {
    /// Begins to look after `lease`.
    pub(crate) fn watch(&self, lease: &Arc<Lease>) {
        if let Some(due) = lease.due() {
            self.file(lease, due);
        }
    }

    /// Stops looking after `lease`.
    pub(crate) fn forget(&self, lease: &Lease) {
        let filed_at = lease.filed_at();
        if filed_at != NOWHERE {
            self.0.remove(filed_at, lease.id);
        }
    }

    /// Has `lease` renewed at once: something may have happened to it.
    pub(crate) fn hurry(&self, lease: &Arc<Lease>, now: Instant) {
        if lease.hurry(now) {
            self.watch(lease);
        }
    }

    fn file(&self, lease: &Arc<Lease>, due: Instant) {
        // Should the lease be forgotten at this very moment, it is found to be over when it is due.
        let filed_at = lease.file_at(due);
        if filed_at != NOWHERE {
            self.0.remove(filed_at, lease.id);
        }
        self.0.file(due, lease.id, lease.clone());
    }

    /// Renews what is due. Runs on the driver for the life of the pool.
    pub(crate) async fn run(self: Arc<Self>, tools: Tools) {
        let tools = Arc::new(tools);
        loop {
            self.0.due(tools.clock).await;
            let now = tools.clock.now();
            let mut due = self.0.take_until(now + TICK);
            // Of a great many most are not in the processor's caches: it fetches best what lies together.
            due.sort_unstable_by_key(Arc::as_ptr);
            // A panic here would end all renewals of the pool. So it ends one beat, and each lease is looked at again.
            if panic_boundary::call(|| self.beat(&tools, &due, now)).is_err() {
                due.iter().for_each(|lease| self.watch(lease));
            }
        }
    }

    fn beat(self: &Arc<Self>, tools: &Arc<Tools>, due: &[Arc<Lease>], now: Instant) {
        // A lease that is soon to end has less request_timeout with the store than the others have. And one that was
        // not renewed last time may be so for a reason of its own, a server of a cluster that is silent.
        let mut batches: [Batch; 4] = Default::default();
        for lease in due {
            lease.file_at(NOWHERE);
            match lease.beat(now + TICK) {
                // Until it is answered or given up, the batch is what looks after the lease.
                Beat::Renew { last_call, in_doubt } => {
                    let left = last_call.since(now) / 2;
                    let in_haste = left < tools.request_timeout;
                    batches[2 * usize::from(in_doubt) + usize::from(in_haste)]
                        .add(lease.clone(), left);
                }
                Beat::Wait(due) => self.file(lease, due),
                Beat::Lost(loss) => events::lost(lease, loss),
                // The caller is told as it polls again.
                Beat::Unclaimed(engine) => drop(release(&engine, lease)),
                Beat::Over => {}
            }
        }
        // On their own, so that a store that does not answer stops nobody else's clock.
        for Batch { leases, left } in batches {
            if !leases.is_empty() {
                // A store needs time for each of a great many.
                let count = u32::try_from(leases.len()).unwrap_or(u32::MAX);
                let request_timeout =
                    tools.request_timeout.saturating_add(EACH.saturating_mul(count)).min(left);
                tools.driver.spawn(self.clone().renew(tools.clone(), leases, request_timeout));
            }
        }
    }

    async fn renew(
        self: Arc<Self>,
        tools: Arc<Tools>,
        batch: Vec<Arc<Lease>>,
        request_timeout: Duration,
    ) {
        let requests: Vec<_> = batch.iter().map(|lease| lease.to_store()).collect();
        let mut open =
            Unanswered { watchdog: &self, clock: tools.clock, leases: batch.into_iter() };
        let sent = tools.clock.now();
        let answer = timeout(request_timeout, tools.store.renew(&requests)).await;
        let now = tools.clock.now();
        let silence = || {
            Err(BackendError::new(
                FailureKind::MaybeApplied,
                "the store did not answer a renewal in time",
            ))
        };
        let mut outcomes = answer.unwrap_or_default().into_iter();
        // Not by value: a drop half-way reports the leases that are left.
        for lease in open.leases.by_ref() {
            match outcomes.next().unwrap_or_else(silence) {
                Ok(LeaseStatus::Held) => {
                    let every = lease.renew_every.unwrap_or(Duration::MAX);
                    lease.renewed(sent, every);
                    events::renewed(&lease);
                }
                Ok(LeaseStatus::NotHeld) => {
                    if lease.lose(Loss::Taken) {
                        events::lost(&lease, Loss::Taken);
                    }
                    // A holder that has let go meanwhile is waiting for this.
                    lease.not_there(now);
                }
                Err(error) => {
                    events::not_renewed(&lease, &error);
                    lease.not_renewed(now, error);
                }
            }
            self.watch(&lease);
        }
    }
}

/// Leases whose renewal is on its way. Dropped before the answer, as the driver's runtime ends or by a panic, it has
/// those that are left looked at again: none stays in the phase of a renewal that never ends.
struct Unanswered<'a> {
    watchdog: &'a Watchdog,
    clock: Clock,
    leases: std::vec::IntoIter<Arc<Lease>>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        for lease in self.leases.by_ref() {
            let error = BackendError::new(FailureKind::MaybeApplied, "a renewal was cut off");
            lease.not_renewed(self.clock.now(), error);
            self.watchdog.watch(&lease);
        }
    }
}
