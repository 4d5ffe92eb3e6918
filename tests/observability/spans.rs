//! The span of a call: its fields, its parent, what is inside it, and when it closes.

use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockError, LockPool, Progress, distributed_lock};
use lock_tests::RedisServer;
use lock_tests::prelude::*;
use tracing::{Instrument, Level, info_span};

use crate::faulty::faulty_pool;
use crate::seen::{SeenSpan, Traced, all_spans, calls_of, watch};

#[distributed_lock(key = "order:<id>", pool = pool, ttl = "3s", wait = "200ms", guard = lock)]
async fn settle(pool: &LockPool, id: u64, takes: Duration) -> Result<u64, LockError> {
    info_span!("inside_the_body", id).in_scope(|| ());
    if takes == ms(30) {
        // Its events are in the span only if they are delivered before its end.
        Traced::of("nested").await_event("acquired").await;
    }
    tokio::time::sleep(takes).await;
    Ok(lock.fence().unwrap().get())
}

#[distributed_lock(key = "order:<id>", pool = pool, reentrant = true)]
async fn again(pool: &LockPool, id: u64) -> Result<(), LockError> {
    Ok(())
}

async fn installed(name: &str) -> LockPool {
    watch();
    let pool = memory().await;
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}

#[track_caller]
fn named(name: &str) -> SeenSpan {
    all_spans().into_iter().find(|span| span.name == name).unwrap()
}

#[tokio::test]
async fn the_span_of_a_call_is_below_that_of_the_caller_and_around_the_body() {
    let pool = installed("nested").await;
    let caller = info_span!("caller_of_settle");
    let fence = settle(&pool, 7, ms(30)).instrument(caller).await.unwrap();
    let call = &calls_of("nested", 1).await[0];
    assert_eq!((call.name, call.level), ("lock", Level::DEBUG));
    assert_eq!(call.parent, Some(named("caller_of_settle").id));
    let is_inside =
        |span: &SeenSpan| span.name == "inside_the_body" && span.parent == Some(call.id);
    assert!(all_spans().iter().any(is_inside));
    let name = concat!(module_path!(), "::settle");
    let fence = fence.to_string();
    call.has(&[("lock", "order:<id>"), ("name", name), ("outcome", "released")]);
    call.has(&[("fence", &fence)]);
    assert!(call.number("held_ms") >= 30 && call.fields.contains_key("waited_ms"), "{call:?}");
    let traced = Traced::of("nested").await_event("released").await;
    assert_eq!(traced.one("acquired").scope.first(), Some(&call.id));
}

#[tokio::test]
async fn a_span_says_how_its_call_ended() {
    let pool = installed("endings").await;
    let guard = pool.lock("order:7").acquire().await.unwrap();
    assert!(settle(&pool, 7, Duration::ZERO).await.unwrap_err().is_conflict());
    assert!(tokio::time::timeout(ms(20), settle(&pool, 7, Duration::ZERO)).await.is_err());
    guard.release().await.unwrap();
    // Dropped in its body.
    assert!(tokio::time::timeout(ms(20), settle(&pool, 7, DEADLINE)).await.is_err());
    assert_eq!(pool.lock("").acquire().await.unwrap_err().kind(), ErrorKind::InvalidKey);
    drop(pool.lock("order:8").acquire().await.unwrap());
    let body = async {
        again(&pool, 9).await.unwrap();
        assert_eq!(
            pool.lock("order:9").acquire().await.unwrap_err().kind(),
            ErrorKind::WouldDeadlock
        );
    };
    pool.lock("order:9").template("order:<id>").run(body).await.unwrap();
    let short = pool.lock("order:10").ttl(ms(100)).renew(false);
    assert_eq!(short.run(std::future::pending::<()>()).await.unwrap_err().kind(), ErrorKind::Lost);
    let guard = pool.lock("order:11").acquire().await.unwrap();
    pool.shutdown(Duration::ZERO).await;
    drop(guard);
    assert_eq!(pool.lock("order:12").acquire().await.unwrap_err().kind(), ErrorKind::PoolClosed);

    let calls = calls_of("endings", 12).await;
    let outcomes: Vec<_> = calls.iter().map(|call| call.fields["outcome"].as_str()).collect();
    let expected = [
        "released",
        "conflict",
        "cancelled",
        "cancelled",
        "invalid_key",
        "released",
        "released",
        "passed",
        "would_deadlock",
        "lost",
        "pool_closed",
        "pool_closed",
    ];
    assert_eq!(outcomes, expected);
    // A call without a grant has no hold.
    for (call, outcome) in calls.iter().zip(expected) {
        let had_it = ["released", "passed", "lost", "pool_closed"].contains(&outcome);
        assert!(
            had_it || outcome == "cancelled" || !call.fields.contains_key("held_ms"),
            "{call:?}"
        );
    }
    assert!(calls[1].number("waited_ms") >= 200, "{:?}", calls[1]);
    assert!(calls[9].number("held_ms") < 10_000, "{:?}", calls[9]);
    assert!(!format!("{calls:?}").contains("order:1"), "a key");
}

/// A body that blocks its thread over the end of its hold cannot be cancelled, and nothing has noticed the end before.
#[tokio::test]
async fn a_hold_that_ends_behind_its_limit_is_lost() {
    watch();
    let pool = LockPool::builder("memory://").on_current_runtime().connect().await.unwrap();
    lock_runtime::install("overruns", pool.clone()).unwrap();
    let limited = || pool.lock("order:7").max_hold(ms(100));
    let mut calls = 2;
    // On a busy machine, a hold may end before its body begins: lost too, and noticed.
    while let Err(error) = limited().run(async { std::thread::sleep(ms(150)) }).await {
        assert_eq!((error.kind(), error.progress()), (ErrorKind::Lost, Progress::NotStarted));
        calls += 1;
    }
    let guard = limited().acquire().await.unwrap();
    while guard.is_held() {
        std::thread::sleep(ms(1));
    }
    drop(guard);
    for call in calls_of("overruns", calls).await {
        call.has(&[("outcome", "lost")]);
        assert!(call.number("held_ms") >= 100, "{call:?}");
    }
    let traced = Traced::of("overruns").await_events("lost", calls).await;
    for lost in traced.all("lost") {
        lost.has(&[("reason", "max_hold")]);
    }
}

/// A release that is retried in the background does not keep the span open.
#[tokio::test]
async fn a_span_closes_with_its_call_although_the_release_goes_on() {
    watch();
    let (pool, faults) = faulty_pool("closes-early").await;
    let guard = pool.lock("order:7").ttl(ms(600_000)).acquire().await.unwrap();
    for _ in 0..100_000 {
        faults.plan(Operation::Release, Fault::Fail(FailureKind::NotApplied));
    }
    drop(guard);
    let call = &calls_of("closes-early", 1).await[0];
    call.has(&[("outcome", "released")]);
    Traced::of("closes-early").await_events("not released yet", 2).await;
    pool.shutdown(Duration::ZERO).await;
}

#[distributed_lock(key = "order:<id>", pool = pool)]
async fn fail_in_the_body(pool: &LockPool, id: u64) -> Result<(), LockError> {
    tokio::task::yield_now().await;
    panic!("in the body");
}

#[tokio::test]
async fn a_panic_is_an_outcome() {
    let pool = installed("panics").await;
    let body = pool.clone();
    let failed = tokio::spawn(async move { fail_in_the_body(&body, 1).await }).await;
    assert!(failed.unwrap_err().is_panic());
    let guarded = pool.clone();
    let failed = tokio::spawn(async move {
        let _guard = guarded.lock("order:2").acquire().await.unwrap();
        panic!("beside a guard");
    });
    assert!(failed.await.map(|(): ()| ()).unwrap_err().is_panic());
    for call in calls_of("panics", 2).await {
        call.has(&[("outcome", "panicked")]);
    }
}

#[tokio::test]
async fn a_body_that_is_dropped_is_inside_its_span() {
    struct Dropped;
    impl Drop for Dropped {
        fn drop(&mut self) {
            info_span!("in_a_destructor").in_scope(|| ());
        }
    }

    let pool = installed("dropped").await;
    let body = async {
        let _dropped = Dropped;
        std::future::pending::<()>().await;
    };
    let request = pool.lock("order:1").run(body);
    assert!(tokio::time::timeout(ms(20), request).await.is_err());
    let call = &calls_of("dropped", 1).await[0];
    call.has(&[("outcome", "cancelled")]);
    assert_eq!(named("in_a_destructor").parent, Some(call.id));
}

/// A reentrant call that goes on without the body around it.
#[tokio::test]
async fn a_call_outside_of_the_body_that_holds_the_lock_is_lost() {
    let pool = installed("outside").await;
    let inner = pool.lock("order:1").reentrant(true).template("inner");
    let mut inner = Box::pin(inner.run(std::future::pending::<()>()));
    pool.lock("order:1")
        .run(async { assert!(poll_once(inner.as_mut()).await.is_none()) })
        .await
        .unwrap();
    assert_eq!(inner.await.unwrap_err().kind(), ErrorKind::Lost);
    let calls = calls_of("outside", 2).await;
    calls[0].has(&[("outcome", "released")]);
    calls[1].has(&[("outcome", "lost"), ("lock", "inner")]);
}

/// The store reports it, and no renewal before.
#[tokio::test]
async fn a_loss_that_the_release_finds_is_told() {
    let server = RedisServer::start();
    watch();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lock_runtime::install("found", pool.clone()).unwrap();
    let request = || pool.lock("order:1").ttl(ms(600_000));
    let guard = request().acquire().await.unwrap();
    server.cli(&["DEL", "order:1"]);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    // The result of a body stands.
    request()
        .run(async {
            server.cli(&["DEL", "order:1"]);
        })
        .await
        .unwrap();
    for call in calls_of("found", 2).await {
        call.has(&[("outcome", "lost")]);
    }
    let traced = Traced::of("found").await_events("lost", 2).await;
    for lost in traced.all("lost") {
        lost.has(&[("reason", "found_at_release")]);
        assert_eq!(lost.level, Level::WARN);
    }
}

#[tokio::test]
async fn a_release_that_is_not_confirmed_is_told() {
    watch();
    let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
    let pool = LockPool::with_backend(backend).request_timeout(ms(100)).connect().await.unwrap();
    lock_runtime::install("unconfirmed", pool.clone()).unwrap();
    // Releases that failed are repeated, and each of them takes a fault.
    for _ in 0..20 {
        faults.plan(Operation::Release, Fault::Fail(FailureKind::Rejected));
    }
    let guard = pool.lock("order:1").acquire().await.unwrap();
    assert!(guard.release().await.unwrap_err().is_backend());
    pool.lock("order:2").run(async {}).await.unwrap();
    for call in calls_of("unconfirmed", 2).await {
        call.has(&[("outcome", "unconfirmed")]);
    }
}

#[tokio::test]
async fn a_grant_that_is_not_picked_up_is_no_conflict() {
    let pool = installed("unclaimed").await;
    let held = pool.lock("order:1").acquire().await.unwrap();
    let mut waits = Box::pin(pool.lock("order:1").ttl(ms(3_000)).wait(ms(200)).acquire());
    assert!(poll_once(waits.as_mut()).await.is_none());
    held.release().await.unwrap();
    // Granted, and given back.
    Traced::of("unclaimed").await_events("acquired", 2).await;
    Traced::of("unclaimed").await_events("released", 2).await;
    assert_eq!(waits.await.unwrap_err().kind(), ErrorKind::Conflict);
    let traced = Traced::of("unclaimed").await_event("not acquired").await;
    assert!(traced.all("conflict").is_empty(), "{traced:?}", traced = traced.events);
    let calls = calls_of("unclaimed", 2).await;
    calls[1].has(&[("outcome", "unclaimed")]);
    assert!(!calls[1].fields.contains_key("held_ms"), "{calls:?}");
}

/// Its holder may look at it much later.
#[tokio::test]
async fn the_hold_of_a_lost_guard_ends_with_the_loss() {
    let pool = installed("outlived").await;
    let guard = pool.lock("order:1").ttl(ms(1_000)).renew(false).acquire().await.unwrap();
    assert!(guard.lost().await.is_lost());
    let lost = Traced::of("outlived").await_event("lost").await;
    let held = lost.one("lost").number("held_ms");
    tokio::time::sleep(ms(1_500)).await;
    drop(guard);
    let call = &calls_of("outlived", 1).await[0];
    call.has(&[("outcome", "lost")]);
    assert!(call.number("held_ms") < held + 1_400, "{held}: {call:?}");
}
