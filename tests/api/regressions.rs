//! Regressions.

use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{self, Fault, FaultPlan, FaultyBackend, Operation};
use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool};
use lock_tests::{RedisServer, eventually_async};

const KEY: &str = "order:42";

type Acquiring = tokio::task::JoinHandle<Result<LockGuard, LockError>>;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Two pools on one store in virtual time; the first one's requests may fail.
async fn pools(name: &str) -> (LockPool, FaultPlan, LockPool) {
    let url = format!("memory://{name}");
    let (store, faults) = FaultyBackend::new(testing::open_backend(&url).await.unwrap());
    let pool = LockPool::with_backend(store).on_current_runtime().connect().await.unwrap();
    let other = LockPool::with_backend(testing::open_backend(&url).await.unwrap());
    (pool, faults, other.on_current_runtime().connect().await.unwrap())
}

/// The clean-up after an unanswered attempt deleted the key that `min_hold` keeps.
#[tokio::test(start_paused = true)]
async fn min_hold_outlives_the_clean_up_of_an_unanswered_attempt() {
    let (pool, faults, other) = pools("min-hold").await;
    faults.plan(Operation::Acquire, Fault::LoseReply);
    let hold = Duration::from_secs(20);
    let guard = pool.lock(KEY).min_hold(hold).acquire().await.unwrap();
    assert!(faults.count(Operation::Acquire) > 1, "the first attempt is not answered");
    guard.release().await.unwrap();
    for _ in 0..18 {
        assert!(other.lock(KEY).try_acquire().await.unwrap().is_none());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(other.lock(KEY).try_acquire().await.unwrap().is_some());
}

/// The body was cancelled a tenth of the ttl before the end of the validity, also where `max_hold` was shorter.
#[tokio::test(start_paused = true)]
async fn a_short_max_hold_is_not_over_at_once() {
    let (pool, _, _) = pools("max-hold").await;
    let guard = pool.lock(KEY).max_hold(ms(300)).acquire().await.unwrap();
    tokio::time::sleep(ms(250)).await;
    assert!(guard.is_held());
    tokio::time::sleep(ms(60)).await;
    assert!(!guard.is_held());
    assert_eq!(guard.lost().await.kind(), ErrorKind::Lost);
}

/// A lost lease stayed at the head of the wait queue until its holder noticed the loss.
#[tokio::test(start_paused = true)]
async fn a_holder_that_does_not_notice_its_loss_is_not_waited_for() {
    let (pool, _, _) = pools("unnoticed").await;
    let stale = pool.lock(KEY).ttl(ms(500)).renew(false).acquire().await.unwrap();
    let next = pool.lock(KEY).wait(Duration::from_secs(2)).acquire().await.unwrap();
    assert!(next.is_held() && !stale.is_held());
    assert!(stale.release().await.unwrap_err().is_lost());
    next.verify().await.unwrap();
}

/// The caller got its answer before the next waiter was notified, and met its own permit at the next acquire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_lock_is_free_for_its_releaser() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    for round in 0..1_000 {
        let guard = pool.lock(KEY).try_acquire().await.unwrap();
        guard.unwrap_or_else(|| panic!("busy in round {round}")).release().await.unwrap();
    }
}

/// A delay of zero sent requests without a pause, on the thread that all pools share.
#[tokio::test]
async fn a_retry_delay_of_zero_is_refused() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let error = pool.lock(KEY).retry_delay(Duration::ZERO).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let pool = LockPool::builder("memory://").retry_delay(Duration::ZERO).connect().await;
    assert_eq!(pool.unwrap_err().kind(), ErrorKind::Config);
}

/// Renewals that took longer than a sixth of the ttl were discarded although they had succeeded.
#[tokio::test(start_paused = true)]
async fn a_slow_store_keeps_its_locks() {
    let (pool, faults, _) = pools("slow").await;
    let guard = pool.lock(KEY).ttl(Duration::from_secs(1)).acquire().await.unwrap();
    faults.always(Fault::DelayReply(ms(200)));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(guard.is_held());
}

/// Reads were answered during the outage of a test.
#[tokio::test(start_paused = true)]
async fn a_fault_of_all_requests_is_that_of_reads_too() {
    let (pool, faults, _) = pools("reads").await;
    let guard = pool.lock(KEY).acquire().await.unwrap();
    guard.verify().await.unwrap();
    faults.always(Fault::Fail(FailureKind::NotApplied));
    let outage = |outcome: Result<(), LockError>| {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Backend);
    };
    outage(guard.verify().await);
    outage(pool.health().await.map(drop));
    outage(pool.inspect(KEY).await.map(drop));
    outage(pool.list("*", 10).await.map(drop));
    faults.always(Fault::None);
    guard.release().await.unwrap();
}

/// The undo of an unanswered request freed the key that `lock_delay` keeps.
#[tokio::test(start_paused = true)]
async fn lock_delay_outlives_the_clean_up_of_an_unanswered_attempt() {
    let (pool, faults, other) = pools("lock-delay").await;
    faults.plan(Operation::Acquire, Fault::LoseReply);
    let request = pool.lock(KEY).ttl(ms(1_000)).lock_delay(ms(20_000)).max_hold(ms(300));
    let guard = request.acquire().await.unwrap();
    assert!(faults.count(Operation::Acquire) > 1, "the first attempt is not answered");
    tokio::time::sleep(ms(400)).await;
    assert!(guard.release().await.unwrap_err().is_lost());
    for _ in 0..19 {
        assert!(other.lock(KEY).try_acquire().await.unwrap().is_none());
        tokio::time::sleep(ms(1_000)).await;
    }
    tokio::time::sleep(ms(4_000)).await;
    assert!(other.lock(KEY).try_acquire().await.unwrap().is_some());
}

/// No body has run under it, and the key was kept for its `min_hold`.
#[tokio::test(start_paused = true)]
async fn a_grant_that_no_caller_has_picked_up_has_no_min_hold() {
    async fn of(name: &str, end: impl AsyncFnOnce(&LockPool, &Acquiring)) -> Acquiring {
        let (pool, faults, other) = pools(name).await;
        faults.plan(Operation::Acquire, Fault::DelayReply(ms(40)));
        let acquire = tokio::spawn(pool.lock(KEY).min_hold(ms(60_000)).acquire());
        tokio::time::sleep(ms(20)).await;
        end(&pool, &acquire).await;
        tokio::time::sleep(ms(1_000)).await;
        assert!(other.lock(KEY).try_acquire().await.unwrap().is_some(), "{name}");
        acquire
    }
    let dropped = of("unpicked-drop", async |_, acquire| acquire.abort()).await;
    assert!(dropped.await.unwrap_err().is_cancelled());
    let shut_down = of("unpicked-shutdown", async |pool, _| {
        pool.shutdown(ms(10)).await;
    });
    assert_eq!(shut_down.await.await.unwrap().unwrap_err().kind(), ErrorKind::PoolClosed);
}

/// A grant for ten minutes of a request whose task has left meanwhile.
async fn unused_grant(pool: &LockPool, faults: &FaultPlan, other: &LockPool) {
    let held = other.lock(KEY).acquire().await.unwrap();
    let acquire = tokio::spawn(pool.lock(KEY).ttl(ms(600_000)).wait(ms(20_000)).acquire());
    tokio::time::sleep(ms(100)).await;
    assert_eq!(faults.count(Operation::Acquire), 2, "it is in the queue");
    faults.plan(Operation::Acquire, Fault::DelayReply(ms(200)));
    held.release().await.unwrap();
    tokio::time::sleep(ms(100)).await;
    assert_eq!(faults.count(Operation::Acquire), 3, "it is granted");
    acquire.abort();
    assert!(acquire.await.unwrap_err().is_cancelled());
}

/// Its undo was given up a minute after it was sent.
#[tokio::test(start_paused = true)]
async fn an_unused_grant_is_undone_after_an_outage_that_is_shorter_than_its_ttl() {
    let (pool, faults, other) = pools("unused").await;
    unused_grant(&pool, &faults, &other).await;
    faults.always(Fault::Fail(FailureKind::MaybeApplied));
    tokio::time::sleep(ms(70_000)).await;
    faults.always(Fault::None);
    tokio::time::sleep(ms(5_000)).await;
    assert!(other.lock(KEY).try_acquire().await.unwrap().is_some());
}

/// The store keeps the longer of two ttls of one owner, and the release was given up after the shorter one.
#[tokio::test(start_paused = true)]
async fn a_release_is_repeated_until_earlier_grants_of_its_owner_are_forgotten() {
    let (pool, faults, other) = pools("earlier").await;
    unused_grant(&pool, &faults, &other).await;
    let next = pool.lock(KEY).ttl(ms(1_000)).renew(false).wait(ms(20_000)).acquire();
    let guard = next.await.unwrap();
    faults.always(Fault::Fail(FailureKind::NotApplied));
    assert!(guard.release().await.unwrap_err().is_backend());
    tokio::time::sleep(ms(1_500)).await;
    faults.always(Fault::None);
    tokio::time::sleep(ms(3_000)).await;
    assert!(other.lock(KEY).try_acquire().await.unwrap().is_some());
}

/// The pause between two tries had grown beyond what was left.
#[tokio::test(start_paused = true)]
async fn a_release_is_confirmed_if_the_store_is_back_before_its_time_limit() {
    let (pool, faults, _) = pools("back-in-time").await;
    let guard = pool.lock(KEY).acquire().await.unwrap();
    faults.always(Fault::Fail(FailureKind::NotApplied));
    let release = tokio::spawn(guard.release());
    // Two request timeouts of a second are the limit.
    tokio::time::sleep(ms(1_750)).await;
    faults.always(Fault::None);
    release.await.unwrap().unwrap();
}

/// A shutdown waited for a task that had its error and did not poll.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_not_polled_does_not_hold_up_a_shutdown() {
    let (pool, _, _) = pools("unpolled").await;
    let guard = pool.lock(KEY).acquire().await.unwrap();
    let mut parked = Box::pin(pool.lock(KEY).wait(ms(30_000)).acquire());
    tokio::select! {
        biased;
        _ = &mut parked => panic!("the lock is held"),
        () = tokio::time::sleep(ms(10)) => {}
    }
    let stopping = tokio::spawn({
        let pool = pool.clone();
        async move { pool.shutdown(ms(60_000)).await }
    });
    tokio::time::sleep(ms(100)).await;
    guard.release().await.unwrap();
    let stopped = tokio::time::timeout(ms(1_000), stopping).await;
    assert_eq!(stopped.expect("nothing is held or under way").unwrap().abandoned, 0);
    assert_eq!(parked.await.unwrap_err().kind(), ErrorKind::PoolClosed);
}

/// A release without any answer had granted the lock to the next waiter of its process, which had gone on by then.
#[tokio::test]
async fn the_successor_of_an_unanswered_release_is_undone() {
    let server = RedisServer::start();
    let (store, faults) = FaultyBackend::new(testing::open_backend(&server.url()).await.unwrap());
    let pool = LockPool::with_backend(store).request_timeout(ms(200)).connect().await.unwrap();
    let guard = pool.lock(KEY).ttl(ms(1_000)).renew(false).acquire().await.unwrap();
    let request = pool.lock(KEY).ttl(ms(60_000)).wait(ms(30_000));
    let waiting = tokio::spawn(request.acquire());
    eventually_async(ms(10_000), "it waits", async || pool.snapshot().waiting.len() == 1).await;
    faults.plan(Operation::Release, Fault::LoseReply);
    faults.always(Fault::LoseRequest);
    drop(guard);
    // Longer than the first ttl: the release is given up.
    tokio::time::sleep(ms(1_600)).await;
    faults.always(Fault::None);
    let guard = tokio::time::timeout(ms(15_000), waiting).await.expect("it is granted");
    guard.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.cli(&["GET", KEY]), "(nil)");
}
