//! `testing::with_pool`: tests of annotated functions on the default pool, in one process at the same time.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::testing::with_pool;
use lock_runtime::{ErrorKind, LockError, LockPool, Progress, distributed_lock};
use lock_tests::prelude::*;
use lock_tests::runtimes::current_thread;
use lock_tests::{RedisServer, in_own_process};

use crate::granting_store::GrantsAlways;

#[distributed_lock(key = "order:<id>", ttl = "30s", wait = "0s")]
async fn settle(id: u64) -> Result<u64, LockError> {
    tokio::task::yield_now().await;
    Ok(id)
}

/// Holds the lock for an hour, which is longer than its `max_hold`.
#[distributed_lock(key = "report:<id>", max_hold = "10s")]
async fn report(id: u64) -> Result<u64, LockError> {
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    Ok(id)
}

/// What the tests of a service do, each with the same keys.
async fn whole_service(pool: LockPool, is_paused: bool) {
    with_pool("default", pool.clone(), async {
        let other = pool.lock("order:42").acquire().await.unwrap();
        assert!(settle(42).await.unwrap_err().is_conflict());
        assert!(tokio::spawn(settle(42)).await.unwrap().unwrap_err().is_conflict());
        assert_eq!(settle(43).await.unwrap(), 43);
        other.release().await.unwrap();
        assert_eq!(tokio::spawn(settle(42)).await.unwrap().unwrap(), 42);
        if is_paused {
            assert!(report(1).await.unwrap_err().is_lost());
        }
    })
    .await;
}

macro_rules! parallel {
    ($($real:ident $paused:ident)*) => {$(
        #[tokio::test]
        async fn $real() {
            whole_service(LockPool::connect("memory://").await.unwrap(), false).await;
        }

        #[tokio::test(start_paused = true)]
        async fn $paused() {
            let pool = LockPool::builder("memory://").on_current_runtime().connect().await;
            whole_service(pool.unwrap(), true).await;
        }
    )*};
}

parallel! {
    real_01 paused_01 real_02 paused_02 real_03 paused_03 real_04 paused_04 real_05 paused_05
    real_06 paused_06 real_07 paused_07 real_08 paused_08 real_09 paused_09 real_10 paused_10
    real_11 paused_11 real_12 paused_12 real_13 paused_13 real_14 paused_14 real_15 paused_15
    real_16 paused_16 real_17 paused_17 real_18 paused_18 real_19 paused_19 real_20 paused_20
    real_21 paused_21 real_22 paused_22 real_23 paused_23 real_24 paused_24 real_25 paused_25
}

#[tokio::test(start_paused = true)]
async fn a_pool_on_the_driver_is_refused_under_a_paused_clock() {
    let error = LockPool::connect("memory://").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("`LockPool::builder(url).on_current_runtime()"), "{error}");
    tokio::time::resume();
    LockPool::connect("memory://").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_server_is_refused_under_a_paused_clock() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).on_current_runtime();
    let error = pool.connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("leave `start_paused` out"), "{error}");
    tokio::time::resume();
    LockPool::builder(server.url()).on_current_runtime().connect().await.unwrap();
}

#[tokio::test]
async fn a_pool_of_the_process_is_refused_where_a_test_has_its_own() {
    with_pool("scoped", memory().await, async {
        let error = lock_runtime::install("scoped", memory().await).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("`testing::with_pool`"), "{error}");
    })
    .await;
    lock_runtime::install("scoped", memory().await).unwrap();
}

/// In virtual time, the body would take a minute.
#[tokio::test(start_paused = true)]
async fn the_grace_of_a_server_is_virtual_under_a_paused_clock() {
    let pool = LockPool::builder("memory://").on_current_runtime().connect().await.unwrap();
    let request = async |_| pool.lock("k").run(tokio::time::sleep(ms(60_000))).await;
    let began = tokio::time::Instant::now();
    let served = with_pool("default", pool.clone(), async {
        lock_runtime::serve_until(async {}, ms(3_000), request).await.unwrap()
    })
    .await;
    let error = served.output.unwrap().unwrap_err();
    assert_eq!((error.kind(), error.progress()), (ErrorKind::PoolClosed, Progress::Unfinished));
    let took = began.elapsed();
    assert!((ms(3_000)..ms(5_000)).contains(&took), "{took:?}");
}

#[tokio::test]
async fn the_innermost_pool_counts() {
    let (outer, inner) = (memory().await, memory().await);
    let _held = outer.lock("order:42").acquire().await.unwrap();
    with_pool("default", outer.clone(), async {
        assert!(settle(42).await.unwrap_err().is_conflict());
        with_pool("default", inner.clone(), async {
            settle(42).await.unwrap();
            // A task is not in the scope: the innermost of the runtime counts.
            tokio::spawn(settle(42)).await.unwrap().unwrap();
        })
        .await;
        assert!(settle(42).await.unwrap_err().is_conflict());
        assert!(tokio::spawn(settle(42)).await.unwrap().unwrap_err().is_conflict());
    })
    .await;
}

#[tokio::test]
async fn several_pools_at_once_need_a_scope_for_each_task() {
    let (one, two) = (memory().await, memory().await);
    let _held = one.lock("order:42").acquire().await.unwrap();
    let both_are_in = std::sync::Arc::new(tokio::sync::Barrier::new(2));
    let test = async |pool: LockPool, is_held: bool| {
        with_pool("default", pool.clone(), async {
            both_are_in.wait().await;
            assert_eq!(settle(42).await.is_err(), is_held);
            let outside = tokio::spawn(settle(42)).await.unwrap().unwrap_err();
            assert_eq!(outside.kind(), ErrorKind::Config);
            assert!(outside.to_string().contains("with_pool"), "{outside}");
            let inside = tokio::spawn(with_pool("default", pool, settle(42))).await.unwrap();
            assert_eq!(inside.is_err(), is_held);
            both_are_in.wait().await;
        })
        .await;
    };
    tokio::join!(test(one.clone(), true), test(two, false));
}

#[tokio::test]
async fn a_name_without_a_pool_of_the_test_is_that_of_the_process() {
    let (of_process, of_test) = (memory().await, memory().await);
    lock_runtime::install("of-process", of_process.clone()).unwrap();
    with_pool("of-test", of_test, async {
        assert!(lock_runtime::pool("of-process").is_some());
        assert!(lock_runtime::pool("of-test").is_some());
    })
    .await;
    assert!(lock_runtime::pool("of-test").is_none());
    of_process.shutdown(Duration::ZERO).await;
}

#[tokio::test]
async fn a_shutdown_of_the_innermost_pool_leaves_the_outer_one() {
    let (outer, inner) = (memory().await, memory().await);
    with_pool("default", outer, async {
        with_pool("default", inner.clone(), lock_runtime::shutdown(Duration::ZERO)).await;
        assert_eq!(
            inner.lock("order:42").acquire().await.unwrap_err().kind(),
            ErrorKind::PoolClosed
        );
        settle(42).await.unwrap();
    })
    .await;
}

/// A part of a store. It looks for a pool when it is dropped.
struct LooksAtItsEnd;

impl Drop for LooksAtItsEnd {
    fn drop(&mut self) {
        assert!(lock_runtime::pool("looks-at-its-end").is_some());
    }
}

#[test]
fn the_code_of_a_pool_that_is_replaced_may_look_for_pools() {
    let test = "::the_code_of_a_pool_that_is_replaced_may_look_for_pools";
    in_own_process(&[module_path!(), test].concat(), || {
        let (ended, has_ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let first = LockPool::with_backend(GrantsAlways(LooksAtItsEnd)).on_current_runtime();
            let first = current_thread().block_on(first.connect()).unwrap();
            lock_runtime::install("looks-at-its-end", first).unwrap();
            let next = current_thread().block_on(memory());
            lock_runtime::install("looks-at-its-end", next).unwrap();
            ended.send(()).unwrap();
        });
        has_ended.recv_timeout(DEADLINE).unwrap();
    });
}

#[test]
fn a_pool_of_a_runtime_that_has_ended_may_be_replaced() {
    let install = async || {
        let pool = LockPool::builder("memory://").on_current_runtime().connect().await.unwrap();
        lock_runtime::install("of-a-runtime", pool)
    };
    current_thread().block_on(install()).unwrap();
    current_thread().block_on(async {
        install().await.unwrap();
        assert_eq!(install().await.unwrap_err().kind(), ErrorKind::Config);
    });
}
