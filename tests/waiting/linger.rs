//! A lock that stays with its process behind a hold, for the next call.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_runtime::testing::{Fault, FaultPlan, Operation};
use lock_runtime::{ErrorKind, LockError, LockPool, LockRequest, Wait, distributed_lock};
use lock_tests::poll::drop_at_every_poll;
use lock_tests::prelude::*;
use lock_tests::runtimes::current_thread;
use lock_tests::{Monitor, RedisServer, eventually_async};
use tokio::task::JoinSet;

const KEY: &str = "k";
const TTL: Duration = ms(60_000);
const LINGER: Duration = ms(50);
/// Longer than any test.
const LONG: Duration = ms(60_000);

fn lingering(pool: &LockPool, linger: Duration) -> LockRequest {
    pool.lock(KEY).linger(linger)
}

/// A pool on virtual time, the number of requests to its store, and another pool on the same store.
async fn pools(name: &str) -> (LockPool, FaultPlan, LockPool) {
    let url = format!("memory://linger-{name}");
    let (pool, faults) = on_virtual_time(&url, |builder| builder.ttl(TTL)).await;
    let (other, _) = on_virtual_time(&url, |builder| builder.ttl(TTL)).await;
    (pool, faults, other)
}

async fn is_free(pool: &LockPool) -> bool {
    match pool.lock(KEY).try_acquire().await.unwrap() {
        Some(guard) => {
            guard.release().await.unwrap();
            true
        }
        None => false,
    }
}

fn requests(faults: &FaultPlan) -> [usize; 2] {
    [Operation::Acquire, Operation::Release].map(|operation| faults.count(operation))
}

#[distributed_lock(key = "k", pool = pool, linger = "50ms")]
async fn annotated(pool: LockPool) -> Result<(), LockError> {
    tokio::task::yield_now().await;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn one_grant_serves_calls_that_follow_each_other() {
    let (pool, faults, other) = pools("calls").await;
    for _ in 0..20 {
        annotated(pool.clone()).await.unwrap();
        tokio::time::sleep(LINGER / 2).await;
    }
    assert_eq!(requests(&faults), [1, 0]);
    assert!(!is_free(&other).await);
    assert!(matches!(&pool.snapshot().held[..], [lock] if lock.lingers));
    tokio::time::sleep(LINGER / 2 + ms(2)).await;
    assert!(is_free(&other).await, "the linger is over");
    assert_eq!(requests(&faults), [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn each_holder_has_a_fence_of_its_own() {
    let (pool, faults, other) = pools("fences").await;
    let mut fences = Vec::new();
    for _ in 0..300 {
        let guard = lingering(&pool, LINGER).acquire().await.unwrap();
        fences.push(guard.fence().unwrap());
        guard.release().await.unwrap();
    }
    assert!(fences.windows(2).all(|pair| pair[0] < pair[1]), "{fences:?}");
    // A grant comes with numbers for 128 holders.
    assert_eq!(requests(&faults), [3, 2]);
    tokio::time::sleep(LINGER + ms(2)).await;
    assert!(cycle(&other, KEY).await > fences.pop());
}

#[tokio::test(start_paused = true)]
async fn a_pool_may_let_all_its_locks_linger() {
    let (pool, faults) = on_virtual_time("memory://", |builder| builder.linger(LINGER)).await;
    for _ in 0..3 {
        pool.lock(KEY).acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!(requests(&faults), [1, 0]);
    // What cannot linger, or shall not.
    for request in [
        pool.lock("other").max_hold(ms(1_000)),
        pool.lock("other").renew(false),
        pool.lock("other").linger(Duration::ZERO),
        pool.lock_all(["one", "other"]),
    ] {
        let before = requests(&faults)[1];
        request.acquire().await.unwrap().release().await.unwrap();
        assert_eq!(requests(&faults)[1], before + 1);
    }
}

/// Another ttl, another interval of renewals, several keys: the lease does not fit, and is released for them.
#[tokio::test(start_paused = true)]
async fn a_call_that_cannot_take_the_lease_waits_for_its_release_alone() {
    let (pool, faults, _other) = pools("unfit").await;
    let mut expected = 0;
    for single_try in [false, true] {
        for request in [
            || |pool: &LockPool| pool.lock(KEY).ttl(ms(5_000)),
            || |pool: &LockPool| pool.lock(KEY).renew(ms(1_000)),
            || |pool: &LockPool| pool.lock_all([KEY, "other"]),
        ] as [fn() -> fn(&LockPool) -> LockRequest; 3]
        {
            lingering(&pool, LONG).acquire().await.unwrap().release().await.unwrap();
            let mut request = request()(&pool);
            if single_try {
                request = request.wait(Duration::ZERO);
            }
            let began = tokio::time::Instant::now();
            request.acquire().await.unwrap().release().await.unwrap();
            assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
            expected += 2;
            assert_eq!(faults.count(Operation::Release), expected);
        }
    }
}

/// It waits for the release, and not for the other key.
#[tokio::test(start_paused = true)]
async fn a_single_try_that_ends_a_linger_sends_one_request() {
    let (pool, faults, other) = pools("single-try").await;
    let held = other.lock("other").acquire().await.unwrap();
    lingering(&pool, LONG).acquire().await.unwrap().release().await.unwrap();
    let (began, before) = (tokio::time::Instant::now(), requests(&faults)[0]);
    assert!(pool.lock_all([KEY, "other"]).try_acquire().await.unwrap().is_none());
    assert!(began.elapsed() < ms(5), "{:?}", began.elapsed());
    assert_eq!(requests(&faults)[0], before + 1);
    held.release().await.unwrap();
}

/// A request for several keys is in the queue of another key when the lock begins to linger.
#[tokio::test(start_paused = true)]
async fn a_request_for_several_keys_ends_a_linger_that_it_meets_later() {
    let (pool, _faults, _other) = pools("several").await;
    let [first, second] =
        [pool.lock(KEY).acquire().await.unwrap(), pool.lock("other").acquire().await.unwrap()];
    let several = tokio::spawn(pool.lock_all([KEY, "other"]).wait(Wait::Forever).acquire());
    tokio::time::sleep(ms(100)).await;
    first.release().await.unwrap();
    lingering(&pool, LONG).acquire().await.unwrap().release().await.unwrap();
    let began = tokio::time::Instant::now();
    second.release().await.unwrap();
    joined("several keys", several).await.unwrap().release().await.unwrap();
    assert!(began.elapsed() < ms(2_500), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_releases_locks_that_linger_at_once() {
    let (pool, faults, other) = pools("shutdown").await;
    lingering(&pool, LONG).acquire().await.unwrap().release().await.unwrap();
    let began = tokio::time::Instant::now();
    let report = pool.shutdown(ms(10_000)).await;
    assert!(began.elapsed() < ms(100), "{:?}", began.elapsed());
    assert_eq!((report.released, report.abandoned), (1, 0));
    assert_eq!(requests(&faults), [1, 1]);
    assert!(is_free(&other).await);
    // A hold that ends during the shutdown does not linger.
    let (pool, _faults, other) = pools("shutdown").await;
    let guard = lingering(&pool, LONG).acquire().await.unwrap();
    let stopping = tokio::spawn(async move { pool.shutdown(ms(10_000)).await });
    tokio::time::sleep(ms(10)).await;
    guard.release().await.unwrap();
    assert_eq!(joined("the shutdown", stopping).await.abandoned, 0);
    assert!(is_free(&other).await);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_lost_while_it_lingers_is_not_taken() {
    let (pool, faults, other) = pools("lost").await;
    let first = lingering(&pool, LONG).acquire().await.unwrap();
    let fence = first.fence();
    first.release().await.unwrap();
    // No renewal is confirmed, until the lease is over at the store too.
    faults.always(Fault::LoseRequest);
    tokio::time::sleep(TTL + ms(10)).await;
    let taken = other.lock(KEY).acquire().await.unwrap();
    faults.always(Fault::None);
    let error = lingering(&pool, LONG).wait(Duration::ZERO).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    let between = taken.fence();
    taken.release().await.unwrap();
    let guard = lingering(&pool, LONG).acquire().await.unwrap();
    assert!(fence < between && between < guard.fence());
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_dropped_leaves_the_lock_to_the_next_one() {
    let (pool, faults, other) = pools("dropped").await;
    lingering(&pool, LONG).acquire().await.unwrap().release().await.unwrap();
    drop_at_every_poll(
        async || lingering(&pool, LONG).acquire().await,
        async |_| {
            let guard = lingering(&pool, LONG).wait(Duration::ZERO).acquire().await.unwrap();
            guard.release().await.unwrap();
        },
    )
    .await;
    assert_eq!(requests(&faults), [1, 0]);
    assert!(!is_free(&other).await);
}

#[tokio::test]
async fn options_that_exclude_it_are_named() {
    let pool = memory().await;
    for (request, words) in [
        (lingering(&pool, LINGER).max_hold(ms(1_000)), "`linger` and `max_hold` exclude"),
        (lingering(&pool, LINGER).min_hold(ms(1_000)), "`linger` and `min_hold` exclude"),
        (lingering(&pool, LINGER).renew(false), "`linger` and `renew = false` exclude"),
        (lingering(&pool, ms(60_001)), "longer than a minute"),
        (pool.lock_all([KEY, "other"]).linger(LINGER), "`linger` is for one key"),
    ] {
        let error = request.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(words), "{error}");
    }
    let error = LockPool::builder("memory://").linger(ms(60_001)).connect().await.unwrap_err();
    assert!(error.to_string().contains("longer than a minute"), "{error}");
}

#[tokio::test]
async fn a_pool_that_is_dropped_releases_its_lock_at_the_end_of_the_linger() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lingering(&pool, ms(2_500)).acquire().await.unwrap().release().await.unwrap();
    drop(pool);
    assert_ne!(server.cli(&["GET", KEY]), "");
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn calls_that_follow_each_other_send_no_command() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).ttl(ms(600_000)).connect().await.unwrap();
    let monitor = Monitor::start(&server);
    for _ in 0..100 {
        let request = lingering(&pool, LONG).fencing(false);
        request.acquire().await.unwrap().release().await.unwrap();
    }
    let commands = by_clients(monitor.settled());
    let names: Vec<_> = commands.iter().map(lock_tests::monitor::Ran::name).collect();
    assert_eq!(names, ["SET"]);
}

/// The store tells the process that another one waits: it has the lock long before the linger is over.
#[tokio::test]
async fn another_process_ends_a_linger() {
    let server = RedisServer::start();
    let [one, other] = [patient(server.url(), TTL).await, patient(server.url(), TTL).await];
    let fence = cycle(&other, KEY).await;
    let mut last = fence;
    for _ in 0..5 {
        for pool in [&one, &other] {
            let began = Instant::now();
            let guard = lingering(pool, LONG).acquire().await.unwrap();
            assert!(began.elapsed() < LONG / 4, "{:?}", began.elapsed());
            assert!(guard.fence() > last);
            last = guard.fence();
            guard.release().await.unwrap();
        }
    }
    for pool in [one, other] {
        assert_eq!(pool.shutdown(ms(100)).await.abandoned, 0);
    }
    until_nothing_is_left(&server).await;
}

/// It is in no queue, so nothing tells of it.
#[tokio::test]
async fn another_client_has_the_lock_when_the_linger_is_over() {
    let server = RedisServer::start();
    let pool = patient(server.url(), TTL).await;
    let released = Instant::now();
    lingering(&pool, ms(400)).acquire().await.unwrap().release().await.unwrap();
    eventually_async(DEADLINE, "the key is free", async || {
        server.cli(&["SET", KEY, "foreign", "NX"]) == "OK"
    })
    .await;
    assert!(released.elapsed() >= ms(400), "{:?}", released.elapsed());
}

/// Tasks of two processes, some of which let the lock linger for longer than the test: at most one is inside, and the
/// fences grow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_that_linger_exclude_all_others() {
    const TASKS: usize = 8;
    const EACH: usize = 50;
    let server = RedisServer::start();
    let pools = [patient(server.url(), TTL).await, patient(server.url(), TTL).await];
    let inside = Arc::new(tokio::sync::Mutex::new(None));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (pool, inside) = (pools[task % 2].clone(), inside.clone());
        tasks.spawn(async move {
            for round in 0..EACH {
                let linger = [LONG, LINGER, ms(1), Duration::ZERO][(task / 2 + round) % 4];
                let guard = lingering(&pool, linger).acquire().await.unwrap();
                let mut last = inside.try_lock().expect("one holder at a time");
                assert!(guard.fence() > *last, "{:?} behind {last:?}", guard.fence());
                *last = guard.fence();
                tokio::task::yield_now().await;
                drop(last);
                guard.release().await.unwrap();
            }
        });
    }
    within(2 * DEADLINE, "all holds", async {
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
    })
    .await;
    for pool in pools {
        assert_eq!(pool.shutdown(ms(1_000)).await.abandoned, 0);
    }
    until_nothing_is_left(&server).await;
}

/// A pool keeps its store in memory, with what is locked there.
#[test]
fn a_pool_with_a_lock_that_lingers_ends_with_its_runtime() {
    let connect = || LockPool::builder("memory://ends-with-its-runtime").on_current_runtime();
    let runtime = current_thread();
    runtime.block_on(async {
        let pool = connect().connect().await.unwrap();
        pool.lock("kept").min_hold(LONG).run(async {}).await.unwrap();
        lingering(&pool, LONG).run(async {}).await.unwrap();
    });
    drop(runtime);
    current_thread().block_on(async {
        let next = connect().connect().await.unwrap();
        assert!(next.lock("kept").try_acquire().await.unwrap().is_some());
    });
}
