//! Regressions.

use std::time::Duration;

use lock_runtime::testing::{self, Fault, FaultPlan, FaultyBackend, Operation};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::RedisServer;

const KEY: &str = "order:42";

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
