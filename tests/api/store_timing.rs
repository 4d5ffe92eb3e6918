//! What a pool does if a store's notification precedes its answer, or if the answer is late.

#![allow(clippy::disallowed_methods)]

use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, LeaseRef,
    LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, WaitMode, Warning,
};
use lock_runtime::testing::{self, Fault, FaultyBackend, Operation};
use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, PoolBuilder};
use lock_tests::prelude::*;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const MINUTE: Duration = Duration::from_secs(60);

/// A store with one lock.
#[derive(Clone)]
struct Store(Arc<State>);

struct State {
    behaviour: Behaviour,
    notifier: OnceLock<Notifier>,
    acquires: AtomicUsize,
    releases: AtomicUsize,
    /// The number of leases of each renewal.
    renewed: Mutex<Vec<usize>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Behaviour {
    /// The first request is refused, and the lock is freed before the refusal is returned.
    FreedMeanwhile,
    /// Each request is queued, after this time.
    QueuesAfter(Duration),
    /// Acquires are granted, and releases never answered.
    SilentAtReleases,
    /// Acquires are never answered.
    SilentAtAcquires,
    /// Acquires are granted, and one call renews two leases at most.
    RenewsInPairs,
    /// Acquires fail, and may be applied all the same, in parts or as a whole.
    MayApply { in_parts: bool },
}
use Behaviour::{
    FreedMeanwhile, MayApply, QueuesAfter, RenewsInPairs, SilentAtAcquires, SilentAtReleases,
};

fn store(behaviour: Behaviour) -> (Store, PoolBuilder) {
    let (notifier, acquires, releases, renewed) = Default::default();
    let store = Store(Arc::new(State { behaviour, notifier, acquires, releases, renewed }));
    let builder = LockPool::with_backend(store.clone()).on_current_runtime();
    (store, builder.request_timeout(ms(1_000)))
}

impl Store {
    fn releases(&self) -> usize {
        self.0.releases.load(Ordering::Relaxed)
    }
}

impl Backend for Store {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.wait_queue = matches!(self.0.behaviour, QueuesAfter(_));
        if self.0.behaviour == RenewsInPairs {
            capabilities.most_renewals = 2;
        }
        capabilities.applied_in_parts = self.0.behaviour == MayApply { in_parts: true };
        capabilities.paced = matches!(self.0.behaviour, SilentAtReleases | SilentAtAcquires);
        capabilities
    }

    fn subscribe(&self, notifier: Notifier) {
        let _ = self.0.notifier.set(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        self.0.acquires.fetch_add(requests.len(), Ordering::Relaxed);
        let mut outcomes = Vec::new();
        for request in requests {
            if let MayApply { .. } = self.0.behaviour {
                outcomes.push(Err(BackendError::new(FailureKind::MaybeApplied, "cut off")));
                continue;
            }
            outcomes.push(Ok(match self.0.behaviour {
                FreedMeanwhile if request.attempt == 0 => {
                    let notifier = self.0.notifier.get().expect("the pool has subscribed");
                    notifier.key_changed(request.keys[0].as_str());
                    let wait_mode = WaitMode::Watch { retry_after: MINUTE };
                    AcquireOutcome::contended_until(None, wait_mode)
                }
                QueuesAfter(time) => {
                    sleep(time).await;
                    let wait_mode = WaitMode::Queued { retry_after: MINUTE };
                    AcquireOutcome::contended_until(None, wait_mode)
                }
                SilentAtAcquires => pending().await,
                FreedMeanwhile | SilentAtReleases | RenewsInPairs | MayApply { .. } => {
                    AcquireOutcome::acquired(None)
                }
            }));
        }
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.0.renewed.lock().unwrap().push(leases.len());
        leases.iter().map(|_| Ok(LeaseStatus::Held)).collect()
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        self.0.releases.fetch_add(1, Ordering::Relaxed);
        if self.0.behaviour == SilentAtReleases {
            pending::<()>().await;
        }
        requests.iter().map(|_| Ok(ReleaseOutcome::Freed)).collect()
    }

    async fn is_held(&self, _: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(LeaseStatus::Held)
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}

/// At a quorum, one node may have a vote that arrives after a majority has removed the others.
#[tokio::test(start_paused = true)]
async fn an_acquire_that_may_be_applied_in_parts_is_undone_until_its_ttl_is_over() {
    for in_parts in [false, true] {
        let (store, builder) = store(MayApply { in_parts });
        let pool = builder.ttl(ms(30_000)).connect().await.unwrap();
        let error = pool.lock("k").fencing(false).try_acquire().await.unwrap_err();
        assert!(error.is_backend(), "{error}");
        sleep(ms(29_000)).await;
        let releases = store.releases();
        assert_eq!(releases > 25, in_parts, "{releases} releases");
        assert!(in_parts || releases == 1, "the first one has ended the only grant");
        sleep(ms(5_000)).await;
        let releases = store.releases();
        sleep(ms(60_000)).await;
        assert_eq!(store.releases(), releases, "the undo is over");
    }
}

#[tokio::test(start_paused = true)]
async fn a_notification_that_precedes_the_refusal_counts() {
    let (_, builder) = store(FreedMeanwhile);
    let pool = builder.connect().await.unwrap();
    let began = Instant::now();
    let _guard = pool.lock("order:42").fencing(false).wait(MINUTE / 2).acquire().await.unwrap();
    assert!(began.elapsed() < ms(100), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_over_at_its_first_answer_leaves_the_queue_of_the_store_at_once() {
    for is_dropped in [true, false] {
        let (store, builder) = store(QueuesAfter(ms(30)));
        let pool = builder.connect().await.unwrap();
        let wait = if is_dropped { MINUTE } else { ms(10) };
        let acquire = pool.lock("order:42").fencing(false).wait(wait).acquire();
        let ended = timeout(if is_dropped { ms(10) } else { MINUTE }, acquire).await;
        assert_eq!(ended.is_err(), is_dropped);
        sleep(ms(1_000)).await;
        assert_eq!(store.releases(), 1, "dropped: {is_dropped}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_at_a_paced_store_has_its_result_after_two_request_timeouts() {
    let (store, builder) = store(SilentAtReleases);
    let pool = builder.connect().await.unwrap();
    let guard = pool.lock("order:42").fencing(false).acquire().await.unwrap();
    let began = Instant::now();
    let error = guard.release().await.unwrap_err();
    assert!(error.is_backend(), "{error}");
    assert!((ms(2_000)..ms(2_100)).contains(&began.elapsed()), "{:?}", began.elapsed());
    // The call itself has more time.
    assert_eq!(store.releases(), 1);
    sleep(MINUTE / 6).await;
    assert!(store.releases() > 1, "it is repeated");
}

const TASKS: usize = 1_000;

/// Tasks that each acquire so many keys of their own, at a paced store that does not answer.
async fn acquiring(
    keys: usize,
    wait: Duration,
) -> (Store, LockPool, JoinSet<Result<LockGuard, LockError>>) {
    let (store, builder) = store(SilentAtAcquires);
    let pool = builder.connect().await.unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let keys = (0..keys).map(|key| format!("{task}:{key}"));
        tasks.spawn(pool.lock_all(keys).fencing(false).wait(wait).acquire());
    }
    (store, pool, tasks)
}

/// For one key and for several: the requests that are not sent use up no time of the store.
#[tokio::test(start_paused = true)]
async fn acquires_wait_in_the_process_for_room_at_a_paced_store() {
    const ROOM: usize = 256;
    for keys in [1, 2] {
        let (store, _pool, tasks) = acquiring(keys, ms(500)).await;
        sleep(ms(400)).await;
        let sent = store.0.acquires.load(Ordering::Relaxed);
        assert!((ROOM / 2..=ROOM).contains(&sent), "{sent} requests of {keys} keys");
        let all = tasks.join_all().await;
        let errors = all.into_iter().map(|acquired| acquired.unwrap_err());
        let in_process = errors.filter(|error| {
            assert!(error.is_backend(), "{error}");
            error.to_string().contains("ahead of this one")
        });
        assert_eq!(in_process.count(), TASKS - sent, "{keys} keys");
    }
}

/// For one key and for several. What is in flight is awaited; what was not sent is neither sent nor awaited.
#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_the_wait_for_room_at_a_paced_store() {
    for keys in [1, 2] {
        let (store, pool, mut tasks) = acquiring(keys, MINUTE).await;
        sleep(ms(100)).await;
        let sent = store.0.acquires.load(Ordering::Relaxed);
        let shutdown = pool.shutdown(Duration::ZERO);
        let unsent = async {
            for _ in sent..TASKS {
                let error = tasks.join_next().await.unwrap().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PoolClosed, "{error}");
            }
        };
        let (ended, _) = tokio::join!(timeout(ms(50), unsent), shutdown);
        assert!(ended.is_ok(), "{} of {TASKS} of {keys} keys, {sent} sent", tasks.len());
        assert_eq!(store.0.acquires.load(Ordering::Relaxed), sent, "{keys} keys");
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_has_no_more_leases_than_the_store_confirms_together() {
    const LEASES: usize = 20;
    let (store, builder) = store(RenewsInPairs);
    let pool = builder.ttl(MINUTE).connect().await.unwrap();
    let mut guards = Vec::new();
    for n in 0..LEASES {
        let request = pool.lock(format!("order:{n}")).fencing(false).renew(ms(20_000));
        guards.push(request.acquire().await.unwrap());
    }
    // Leases that are renewed in one interval are due at a few moments.
    sleep(ms(20_000)).await;
    let renewed = store.0.renewed.lock().unwrap().clone();
    assert_eq!(renewed.iter().sum::<usize>(), LEASES, "{renewed:?}");
    assert_eq!(renewed.iter().max(), Some(&2), "{renewed:?}");
}

#[tokio::test(start_paused = true)]
async fn the_retries_of_a_release_end_with_the_pool() {
    let memory = testing::open_backend("memory://retries").await.unwrap();
    let (store, faults) = FaultyBackend::new(memory);
    let pool = LockPool::with_backend(store).on_current_runtime().connect().await.unwrap();
    let guard = pool.lock("order:42").acquire().await.unwrap();
    faults.always(Fault::Fail(FailureKind::NotApplied));
    drop(guard);
    sleep(ms(500)).await;
    assert!(faults.count(Operation::Release) > 1, "it is repeated");
    let report = pool.shutdown(Duration::ZERO).await;
    assert_eq!(report.abandoned, 1);
    let count = faults.count(Operation::Release);
    sleep(ms(10_000)).await;
    assert_eq!(faults.count(Operation::Release), count);
}
