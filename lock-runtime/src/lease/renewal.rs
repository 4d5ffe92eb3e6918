//! Renews leases before they expire.
//!
//! Leases that are due within 2 ms of each other share one request. Leases that are close to expiry, and leases whose
//! last renewal failed, are sent in batches of their own. So a silent server does not delay healthy leases.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::timeout;

use crate::backend::{DynBackend, LeaseStatus, TIME_PER_REQUEST};
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::{Clock, Instant};
use crate::base::loss::Loss;
use crate::base::measurement::{Measurement, RenewalResult};
use crate::exec::driver::Driver;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::exec::throttle::Throttle;
use crate::exec::timer_queue::TimerQueue;
use crate::lease::lease::Lease;
use crate::lease::lease_state::Expedited;
use crate::lease::renewal_action::RenewalAction;

/// The leases of a pool, by the time of their next renewal.
#[derive(Debug, Default)]
pub(crate) struct RenewalScheduler(TimerQueue<Arc<Lease>>);

/// What the scheduler works with.
pub(crate) struct RenewalConfig {
    pub(crate) backend: Arc<dyn DynBackend>,
    pub(crate) clock: Clock,
    pub(crate) driver: Driver,
    pub(crate) request_timeout: Duration,
    /// The most leases of one request.
    pub(crate) most_together: usize,
    /// Releases a lease that no task will: it was not picked up, or was lost while the lock lingered.
    pub(crate) end_hold: EndHold,
    /// Receives the outcome of each request, with the moment when it was sent.
    pub(crate) on_outcome: OnOutcome,
    /// Bounds the warnings about renewals that fail.
    pub(crate) failures: Throttle,
}

/// Receives whether the store has answered.
pub(crate) type OnOutcome = Box<dyn Fn(Instant, Result<(), &BackendError>) + Send + Sync>;

/// Ends the hold of a lease.
pub(crate) type EndHold = Box<dyn Fn(&Arc<Lease>) + Send + Sync>;

impl fmt::Debug for RenewalConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenewalConfig").finish_non_exhaustive()
    }
}

/// Leases due within this span of each other share a request.
const TICK: Duration = Duration::from_millis(2);

/// The position of a lease that is not scheduled.
const UNSCHEDULED: Instant = Instant::ORIGIN;

/// Leases that are renewed by one request.
struct RenewalBatch {
    unanswered: Unanswered,
    /// Half of the remaining time of the lease that expires first. The other half is for a second try. During that try the
    /// answer to the first one still counts.
    time_limit: Duration,
}

impl RenewalBatch {
    fn new(renewals: &Arc<RenewalScheduler>, clock: Clock) -> Self {
        let (renewals, leases) = (renewals.clone(), Vec::new());
        let unanswered = Unanswered { renewals, clock, leases, is_sent: false };
        Self { unanswered, time_limit: Duration::MAX }
    }

    fn add(&mut self, lease: Arc<Lease>, time_limit: Duration) {
        self.unanswered.leases.push(lease);
        self.time_limit = self.time_limit.min(time_limit);
    }
}

impl RenewalScheduler {
    /// Schedules the next renewal of `lease`, if it needs one.
    pub(crate) fn schedule(&self, lease: &Arc<Lease>) {
        if let Some(due) = lease.due() {
            self.insert(lease, due);
        }
    }

    /// Removes `lease`.
    pub(crate) fn cancel(&self, lease: &Lease) {
        let scheduled_at = lease.schedule_at(UNSCHEDULED);
        if scheduled_at != UNSCHEDULED {
            self.0.remove(scheduled_at, lease.id);
        }
    }

    /// Schedules the next renewal of `lease`, which has taken over the grant of `former`. A timer that is due early enough is
    /// replaced, so that the waiting task is not woken.
    pub(crate) fn transfer(&self, former: &Lease, lease: &Arc<Lease>) {
        let Some(due) = lease.due() else { return self.cancel(former) };
        // Each lease has a timer of its own: the driver may be about to schedule the former one, after an answer.
        let scheduled_at = former.schedule_at(UNSCHEDULED);
        if scheduled_at != UNSCHEDULED && scheduled_at <= due {
            // A lease that is cancelled at this moment is found to be over when it is due.
            lease.schedule_at(scheduled_at);
            if self.0.replace(scheduled_at, former.id, lease.id, lease.clone()).is_ok() {
                return;
            }
        } else if scheduled_at != UNSCHEDULED {
            self.0.remove(scheduled_at, former.id);
        }
        self.insert(lease, due);
    }

    /// Renews `lease` immediately: its key may have been deleted or taken over. `false` if it has a successor, which has to be
    /// renewed in its place.
    pub(crate) fn expedite(&self, lease: &Arc<Lease>, now: Instant) -> bool {
        match lease.expedite(now) {
            Expedited::Due => self.schedule(lease),
            Expedited::NotDue => {}
            Expedited::Transferred => return false,
        }
        true
    }

    fn insert(&self, lease: &Arc<Lease>, due: Instant) {
        // A lease that is cancelled at this moment is found to be over when it is due.
        let scheduled_at = lease.schedule_at(due);
        if scheduled_at != UNSCHEDULED {
            self.0.remove(scheduled_at, lease.id);
        }
        self.0.insert(due, lease.id, lease.clone());
    }

    /// Renews leases when they are due. Runs on the driver for the life of the pool.
    pub(crate) async fn run(self: Arc<Self>, config: RenewalConfig) {
        let config = Arc::new(config);
        loop {
            self.0.due(config.clock).await;
            let now = config.clock.now();
            let mut due = self.0.take_until(now + TICK);
            // Neighbours in memory share cache lines, which counts with very many leases.
            due.sort_unstable_by_key(Arc::as_ptr);
            // A panic ends one tick and not the renewals of the pool. Each lease is scheduled again.
            if panic_boundary::call(|| self.tick(&config, &due, now)).is_err() {
                due.iter().for_each(|lease| self.schedule(lease));
            }
        }
    }

    fn tick(self: &Arc<Self>, config: &Arc<RenewalConfig>, due: &[Arc<Lease>], now: Instant) {
        // A lease close to expiry has less time for a request than others. A lease whose last renewal failed may be on a
        // silent server of a cluster.
        let empty = |_| RenewalBatch::new(self, config.clock);
        let mut batches: [_; 4] = std::array::from_fn(empty);
        for lease in due {
            lease.schedule_at(UNSCHEDULED);
            match lease.poll_renewal(now + TICK) {
                // The batch schedules the lease again when it is answered or given up.
                RenewalAction::Renew { cancel_at, in_doubt } => {
                    let time_limit = cancel_at.since(now) / 2;
                    let is_urgent = time_limit < config.request_timeout;
                    batches[2 * usize::from(in_doubt) + usize::from(is_urgent)]
                        .add(lease.clone(), time_limit);
                }
                RenewalAction::Wait(due) => self.insert(lease, due),
                RenewalAction::Lost => end_without_holder(config, lease),
                // The caller gets an error at its next poll.
                RenewalAction::OfferExpired => (config.end_hold)(lease),
                RenewalAction::Over => {}
            }
        }
        // A task per batch: a silent store does not stop the clock of other batches.
        for RenewalBatch { mut unanswered, time_limit } in batches {
            let count = u32::try_from(unanswered.leases.len()).unwrap_or(u32::MAX);
            let for_all = config.request_timeout.saturating_add(TIME_PER_REQUEST * count);
            let limits = [time_limit.min(for_all), time_limit.saturating_mul(2)];
            while !unanswered.leases.is_empty() {
                let rest = unanswered.split_off(config.most_together);
                config.driver.spawn(self.clone().renew(config.clone(), unanswered, limits));
                unanswered = rest;
            }
        }
    }

    /// Sends one request for all leases. After the first limit it counts as failed, and at the second one, when the first lease
    /// expires, it is dropped. A store that is slow confirms many leases between the two.
    async fn renew(
        self: Arc<Self>,
        config: Arc<RenewalConfig>,
        mut unanswered: Unanswered,
        [limit, late_limit]: [Duration; 2],
    ) {
        let leases = &unanswered.leases;
        let requests: Vec<_> = leases.iter().map(|lease| lease.to_store()).collect();
        let sent = config.clock.now();
        unanswered.is_sent = true;
        let mut call = pin!(config.backend.renew(&requests));
        if let Ok(outcomes) = timeout(limit, &mut call).await {
            return self.on_answer(&config, unanswered, sent, outcomes, None);
        }
        // A lease that ends meanwhile is not kept alive, nor is its span.
        let leases: Vec<_> = unanswered.leases.iter().map(Arc::downgrade).collect();
        self.on_answer(&config, unanswered, sent, Vec::new(), Some(sent + late_limit));
        if let Ok(outcomes) = timeout(late_limit - limit, call).await {
            self.on_late_answer(&config, &leases, sent, outcomes);
        }
    }

    /// The answer to a renewal that was counted as failed, and is not counted again. Only a confirmation says something that
    /// the next renewal does not find.
    fn on_late_answer(
        &self,
        config: &RenewalConfig,
        leases: &[Weak<Lease>],
        sent: Instant,
        outcomes: Vec<Result<LeaseStatus, BackendError>>,
    ) {
        if BackendError::of_all(&outcomes).is_ok() {
            (config.on_outcome)(sent, Ok(()));
        }
        for (lease, outcome) in leases.iter().zip(outcomes) {
            let Some(lease) = lease.upgrade() else { continue };
            if matches!(outcome, Ok(LeaseStatus::Held)) && lease.on_late_answer(sent) {
                events::renewed(lease.origin(), || lease.held_for());
                self.schedule(&lease);
            }
        }
    }

    /// What is known at the first time limit about the renewal that was sent at `sent`: its `outcomes`. Without them,
    /// the answer is awaited until `awaited_until`.
    fn on_answer(
        &self,
        config: &RenewalConfig,
        mut unanswered: Unanswered,
        sent: Instant,
        mut outcomes: Vec<Result<LeaseStatus, BackendError>>,
        awaited_until: Option<Instant>,
    ) {
        let now = config.clock.now();
        let silence = || {
            Err(BackendError::new(
                FailureKind::MaybeApplied,
                "the store did not answer a renewal in time",
            ))
        };
        outcomes.resize_with(unanswered.leases.len(), silence);
        (config.on_outcome)(sent, BackendError::of_all(&outcomes));
        // From the end: a drop half-way reports this lease and the rest.
        for outcome in outcomes.into_iter().rev() {
            let Some(lease) = unanswered.leases.last() else { break };
            match outcome {
                Ok(LeaseStatus::Held) => {
                    let interval = lease.renew_every.unwrap_or(Duration::MAX);
                    lease.on_renewed(sent, interval);
                    lease.metrics.record(Measurement::Renewal(RenewalResult::Renewed));
                    events::renewed(lease.origin(), || lease.held_for());
                }
                Ok(LeaseStatus::NotHeld) => {
                    lease.metrics.record(Measurement::Renewal(RenewalResult::NotHeld));
                    lease.lose(Loss::Taken);
                    // A release of this lease may wait for the answer.
                    lease.on_not_held(now);
                    end_without_holder(config, lease);
                }
                Err(error) => {
                    lease.metrics.record(Measurement::Renewal(RenewalResult::Failed));
                    // No warning for a hold that has ended meanwhile.
                    if lease.is_held() {
                        let failed = config.failures.report(now);
                        events::not_renewed(lease.origin(), failed, lease.valid_for(), &error);
                    }
                    lease.on_renewal_failed(now, awaited_until.unwrap_or(now), error);
                }
            }
            self.schedule(lease);
            unanswered.leases.pop();
        }
    }
}

/// A lost lease is released by its holder, if it has one.
fn end_without_holder(config: &RenewalConfig, lease: &Arc<Lease>) {
    if lease.withdraw_if_unclaimed() {
        (config.end_hold)(lease);
    }
}

/// Leases in the phase of a renewal. Dropped before the answer, by a panic or because the driver's runtime ends, it reports a
/// failed renewal for the rest. So no lease stays in the phase of a renewal that never ends.
struct Unanswered {
    renewals: Arc<RenewalScheduler>,
    clock: Clock,
    leases: Vec<Arc<Lease>>,
    is_sent: bool,
}

impl Unanswered {
    /// Keeps the first `count` leases, and returns the others.
    fn split_off(&mut self, count: usize) -> Self {
        let leases = self.leases.split_off(self.leases.len().min(count));
        Self { renewals: self.renewals.clone(), clock: self.clock, leases, is_sent: self.is_sent }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        for lease in self.leases.drain(..) {
            let kind =
                if self.is_sent { FailureKind::MaybeApplied } else { FailureKind::NotApplied };
            let error = BackendError::new(kind, "a renewal was cut off");
            let now = self.clock.now();
            lease.on_renewal_failed(now, now, error);
            self.renewals.schedule(&lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::memory::Memory;
    use crate::lease::lease::tests::{lease_with, successor};

    fn scheduled(renewals: &RenewalScheduler) -> Vec<u64> {
        let all = renewals.0.take_until(Instant::NEVER);
        all.iter().map(|lease| lease.id).collect()
    }

    #[test]
    fn the_lease_of_a_hand_off_takes_the_timer_of_the_former_one() {
        let (renewals, former) = (RenewalScheduler::default(), lease_with(1));
        renewals.schedule(&former);
        let next = successor(&former);
        renewals.transfer(&former, &next);
        renewals.cancel(&former);
        assert_eq!(scheduled(&renewals), [2]);
        renewals.schedule(&next);
        renewals.cancel(&next);
        assert!(scheduled(&renewals).is_empty());
    }

    /// The renewal of a key that may have changed is due immediately, also for the next holder.
    #[test]
    fn an_expedited_renewal_has_one_timer_and_stays_expedited_across_a_hand_off() {
        let (renewals, lease) = (RenewalScheduler::default(), lease_with(1));
        let now = Clock::Boot.now();
        let due_now = || {
            let due = renewals.0.take_until(now);
            due.iter().map(|lease| lease.id).collect::<Vec<_>>()
        };
        renewals.schedule(&lease);
        assert!(due_now().is_empty());
        renewals.expedite(&lease, now);
        assert_eq!((due_now(), scheduled(&renewals)), (vec![1], vec![]));
        // Expedited, and not scheduled yet.
        let former = lease_with(3);
        renewals.schedule(&former);
        assert_eq!(former.expedite(now), Expedited::Due);
        let next = successor(&former);
        renewals.transfer(&former, &next);
        assert_eq!((due_now(), scheduled(&renewals)), (vec![4], vec![]));
    }

    #[test]
    fn a_hand_off_keeps_a_timer_that_is_early_enough() {
        let (renewals, former) = (RenewalScheduler::default(), lease_with(1));
        renewals.schedule(&former);
        assert_eq!(scheduled(&renewals), [1]);
        let early = Clock::Boot.now();
        renewals.insert(&former, early);
        let next = successor(&former);
        renewals.transfer(&former, &next);
        let due = renewals.0.take_until(early);
        assert_eq!(due.iter().map(|lease| lease.id).collect::<Vec<_>>(), [2]);
    }

    fn config(clock: Clock) -> Arc<RenewalConfig> {
        Arc::new(RenewalConfig {
            backend: Arc::new(Memory::open("", clock).unwrap()),
            clock,
            driver: Driver::current().unwrap(),
            request_timeout: Duration::from_secs(1),
            most_together: 1,
            end_hold: Box::new(|_| panic!("planned")),
            on_outcome: Box::new(|_, _| {}),
            failures: Throttle::default(),
        })
    }

    /// As if the driver ended before it runs the task of the renewal.
    #[tokio::test]
    async fn a_renewal_that_is_not_sent_is_due_again_and_leaves_nothing_behind() {
        let (clock, renewals) = (Clock::Boot, Arc::<RenewalScheduler>::default());
        let lease = lease_with(1);
        assert!(lease.pick_up());
        let ttl = lease.ttl.get();
        let action = lease.poll_renewal(clock.now() + ttl / 2);
        assert!(matches!(action, RenewalAction::Renew { .. }));
        let mut batch = RenewalBatch::new(&renewals, clock);
        batch.add(lease.clone(), ttl);
        drop(renewals.clone().renew(config(clock), batch.unanswered, [ttl; 2]));
        assert!(lease.due().is_some_and(|due| due < clock.now() + ttl / 4), "{lease:?}");
        assert_eq!((scheduled(&renewals), lease.late_renewals_until()), (vec![1], None));
    }

    #[tokio::test]
    async fn a_panic_in_a_tick_leaves_no_renewal_in_flight() {
        let (clock, config) = (Clock::Boot, config(Clock::Boot));
        let renewals = Arc::<RenewalScheduler>::default();
        let (renewed, ended) = (lease_with(1), lease_with(2));
        let ttl = renewed.ttl.get();
        assert!(matches!(renewed.poll_renewal(clock.now() + ttl / 2), RenewalAction::Renew { .. }));
        renewed.on_renewed(clock.now() + ttl / 2, ttl / 4);
        assert!(renewed.pick_up());
        // The validity of one lease is over, and a renewal of the other is due.
        let leases = [renewed.clone(), ended];
        let later = clock.now() + ttl;
        assert!(panic_boundary::call(|| renewals.tick(&config, &leases, later)).is_err());
        assert!(renewed.due().is_some_and(|due| due < clock.now() + ttl / 4), "{renewed:?}");
        assert_eq!(scheduled(&renewals), [1]);
    }

    /// The driver has the answer to a renewal of the former lease, and has read when the next one is due.
    #[test]
    fn a_hand_off_keeps_its_timer_while_the_driver_schedules_the_former_lease() {
        for is_first in [true, false] {
            let (renewals, former) = (RenewalScheduler::default(), lease_with(1));
            let due = former.due().unwrap();
            let next = successor(&former);
            assert_eq!(next.due(), Some(due));
            if is_first {
                renewals.insert(&former, due);
            }
            renewals.transfer(&former, &next);
            if !is_first {
                renewals.insert(&former, due);
            }
            renewals.cancel(&former);
            assert_eq!(scheduled(&renewals), [2], "{is_first}");
        }
    }
}
