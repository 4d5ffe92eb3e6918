//! The span of a call: its fields, its parent, what is inside it, and when it closes.

use std::time::Duration;

use lock_runtime::{ErrorKind, LockError, LockPool, distributed_lock};
use lock_tests::prelude::*;
use tracing::{Instrument, Level, info_span};

use crate::seen::{SeenSpan, Traced, all_spans, calls_of, watch};

#[distributed_lock(key = "order:<id>", pool = pool, ttl = "3s", wait = "200ms", guard = lock)]
async fn settle(pool: &LockPool, id: u64, takes: Duration) -> Result<u64, LockError> {
    info_span!("inside_the_body", id).in_scope(|| ());
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
    assert_eq!((call.name, call.level), ("lock", Level::INFO));
    assert_eq!(call.parent, Some(named("caller_of_settle").id));
    let is_inside =
        |span: &SeenSpan| span.name == "inside_the_body" && span.parent == Some(call.id);
    assert!(all_spans().iter().any(is_inside));
    let name = concat!(module_path!(), "::settle");
    let fence = fence.to_string();
    call.has(&[("lock", "order:<id>"), ("name", name), ("outcome", "released")]);
    call.has(&[("fence", &fence)]);
    assert!(call.number("held_ms") >= 30 && call.fields.contains_key("waited_ms"), "{call:?}");
    // The events of the call are in its span, which was still open.
    let traced = Traced::of("nested").await_event("released").await;
    for message in ["acquired", "released"] {
        assert_eq!(traced.one(message).scope.first(), Some(&call.id), "{message}");
    }
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

/// A release that is retried in the background does not keep the span open.
#[tokio::test]
async fn a_span_closes_with_its_call_although_the_release_goes_on() {
    use lock_runtime::backend::FailureKind;
    use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};

    watch();
    let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
    let pool = LockPool::with_backend(backend).connect().await.unwrap();
    lock_runtime::install("closes-early", pool.clone()).unwrap();
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
