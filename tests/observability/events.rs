//! The content of tracing events.

use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, Operation};
use lock_runtime::web::LockLayer;
use lock_runtime::{ErrorKind, LockError, LockPool, distributed_lock};
use lock_tests::RedisServer;
use lock_tests::prelude::*;
use tokio::sync::oneshot;
use tower::ServiceExt;
use tracing::Level;

use crate::faulty::faulty_pool;
use crate::seen::{Traced, watch};

#[distributed_lock(key = "order:<id>", pool = pool, ttl = "3s")]
async fn settle(pool: &LockPool, id: u64, takes: Duration) -> Result<(), LockError> {
    tokio::time::sleep(takes).await;
    Ok(())
}

#[tokio::test]
async fn acquire_renewal_and_release_are_traced() {
    let server = RedisServer::start();
    let pool = installed("traced", &server).await;
    settle(&pool, 7, ms(1_500)).await.unwrap();
    let traced = Traced::of("traced").await_event("released").await;
    let acquired = traced.one("acquired");
    let name = concat!(module_path!(), "::settle");
    acquired.has(&[("lock", "order:<id>"), ("name", name), ("pool", "traced")]);
    assert!(acquired.number("waited_ms") < 1_500);
    assert_eq!(acquired.fields.get("fence"), None, "none was requested");
    assert_eq!(acquired.level, Level::DEBUG);
    let renewed = traced.all("renewed");
    assert!(!renewed.is_empty(), "after 1 s of 1.5");
    renewed[0].has(&[("lock", "order:<id>"), ("name", name), ("pool", "traced")]);
    assert!((800..3_000).contains(&renewed[0].number("held_ms")), "{:?}", renewed[0]);
    let released = traced.one("released");
    released.has(&[("lock", "order:<id>"), ("name", name), ("was_held", "true")]);
    assert!((1_500..10_000).contains(&released.number("held_ms")), "{released:?}");
    for nothing in ["contended", "lost", "not renewed yet", "not released yet"] {
        assert_eq!(traced.all(nothing).len(), 0, "{nothing}");
    }
    // The value is not in the event.
    assert!(!traced.events.iter().any(|event| format!("{event:?}").contains("order:7")));
}

#[tokio::test]
async fn a_wait_is_traced() {
    let server = RedisServer::start();
    let pool = installed("waits", &server).await;
    server.cli(&["SET", "order:7", "another", "PX", "1500"]);
    let guard = pool
        .lock("order:7")
        .template("order:<id>")
        .ttl(ms(5_000))
        .wait(ms(20_000))
        .acquire()
        .await
        .unwrap();
    let fence = guard.fence().unwrap().to_string();
    guard.release().await.unwrap();
    let traced = Traced::of("waits").await_event("released").await;
    let contended = traced.one("contended");
    contended.has(&[("lock", "order:<id>"), ("pool", "waits")]);
    assert_eq!(contended.fields.get("name"), None, "no function");
    assert!((1..=1_500).contains(&contended.number("expires_in_ms")), "{contended:?}");
    let acquired = traced.one("acquired");
    acquired.has(&[("lock", "order:<id>"), ("fence", &fence)]);
    assert!((300..20_000).contains(&acquired.number("waited_ms")), "{acquired:?}");
}

/// The first answer of the store reports the holder, and the second one is the grant.
#[tokio::test]
async fn a_wait_that_ends_with_the_release_of_another_process_is_traced() {
    let server = RedisServer::start();
    let pool = installed("queued", &server).await;
    let other = LockPool::connect(&server.url()).await.unwrap();
    let held = other.lock("order:7").acquire().await.unwrap();
    let waiter = tokio::spawn(async move {
        let guard = pool.lock("order:7").wait(DEADLINE).acquire().await.unwrap();
        guard.release().await.unwrap();
        pool.lock("order:8").wait(Duration::ZERO).acquire().await.unwrap_err()
    });
    let traced = Traced::of("queued").await_event("contended").await;
    assert_eq!(traced.all("acquired").len(), 0);
    let also_held = other.lock("order:8").acquire().await.unwrap();
    held.release().await.unwrap();
    assert!(waiter.await.unwrap().is_conflict());
    let traced = traced.await_event("conflict").await;
    traced.one("acquired");
    // The single try too.
    assert_eq!(traced.all("contended").len(), 2);
    drop(also_held);
}

/// Two tasks of one process, behind another one.
#[tokio::test]
async fn each_wait_in_the_process_queue_reports_the_holder_once() {
    let server = RedisServer::start();
    let pool = installed("in turn", &server).await;
    server.cli(&["SET", "order:7", "another", "PX", "60000"]);
    let waits = |wait| pool.lock("order:7").wait(wait).acquire();
    let first = tokio::spawn(waits(ms(1_000)));
    let traced = Traced::of("in turn").await_event("contended").await;
    let second = tokio::spawn(waits(DEADLINE));
    assert!(first.await.unwrap().unwrap_err().is_conflict());
    let traced = traced.await_events("contended", 2).await;
    server.cli(&["DEL", "order:7"]);
    second.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(traced.await_event("released").await.all("contended").len(), 2);
}

/// No lock is held, and none is requested.
#[tokio::test]
async fn the_store_of_an_idle_pool_is_reported_lost_and_back() {
    let server = RedisServer::start();
    drop(installed("idle", &server).await);
    server.kill();
    let traced = Traced::of("idle").await_event("the store is down").await;
    let down = traced.one("the store is down");
    assert_eq!(down.level, Level::WARN);
    assert!(!down.fields["error"].is_empty(), "{down:?}");
    server.restart();
    let traced = traced.await_event("the store is back").await;
    assert!(traced.one("the store is back").number("down_ms") >= 500);
    traced.one("the store is down");
}

/// Also the wait behind a task of the same process, which sends no request.
#[tokio::test]
async fn a_wait_in_the_process_queue_is_traced() {
    let server = RedisServer::start();
    let pool = installed("queue", &server).await;
    let (one, two) = tokio::join!(settle(&pool, 7, ms(250)), settle(&pool, 7, Duration::ZERO));
    one.and(two).unwrap();
    let traced = Traced::of("queue").await_events("released", 1).await;
    traced.one("handed off").has(&[("pool", "queue")]);
    let waits: Vec<u64> =
        traced.all("acquired").iter().map(|event| event.number("waited_ms")).collect();
    // The second one waits for the whole body of the first.
    assert!(waits[0] < waits[1] && (200..10_000).contains(&waits[1]), "{waits:?}");
}

#[tokio::test]
async fn a_loss_is_traced() {
    let server = RedisServer::start();
    let pool = installed("losses", &server).await;
    let guard = pool.lock("order:7").template("order:<id>").ttl(ms(3_000)).acquire().await.unwrap();
    server.cli(&["DEL", "order:7"]);
    assert!(guard.lost().await.is_lost());
    let traced = Traced::of("losses").await_event("lost").await;
    let lost = traced.one("lost");
    lost.has(&[("lock", "order:<id>"), ("pool", "losses"), ("reason", "taken")]);
    assert_eq!(lost.level, Level::WARN);
    assert!(lost.number("held_ms") < 10_000);
    drop(guard);
    Traced::of("losses")
        .await_event("released")
        .await
        .one("released")
        .has(&[("was_held", "false")]);
}

/// The events of both sides have one owner, by which they are found together.
#[tokio::test]
async fn a_release_by_force_cancels_the_body_and_is_traced_on_both_sides() {
    let server = RedisServer::start();
    let pool = installed("forced-holder", &server).await;
    let admin = installed("forced-admin", &server).await;
    let (enter, entered) = oneshot::channel();
    let request = pool.lock("order:7").template("order:<id>").ttl(ms(6_000));
    let body = tokio::spawn(request.run(async move {
        enter.send(()).unwrap();
        pending::<()>().await;
    }));
    within(DEADLINE, "the body begins", entered).await.unwrap();
    let holder = admin.inspect("order:7").await.unwrap().holder.unwrap();
    assert!(admin.force_release("order:7", &holder).await.unwrap());
    let error = joined("the end of the body", body).await.unwrap_err();
    assert!(error.is_lost() && error.body_started(), "{error}");
    let owner = holder.owner.unwrap().to_string();
    let traced = Traced::of("forced-holder").await_event("lost").await;
    // By its next renewal, and not at the end of the ttl.
    traced.one("lost").has(&[("lock", "order:<id>"), ("reason", "taken"), ("owner", &owner)]);
    let traced = Traced::of("forced-admin").await_event("released by force").await;
    let forced = traced.one("released by force");
    forced.has(&[("owner", &owner), ("was_held", "true")]);
    let (host, process) = forced.fields["by"].split_once('/').unwrap();
    assert!(!host.is_empty() && process == std::process::id().to_string(), "{forced:?}");
}

/// Also a call without a template keeps its key out.
#[tokio::test]
async fn ends_without_a_grant_are_traced() {
    watch();
    let pool = LockPool::builder("memory://").max_waiters(1).connect().await.unwrap();
    lock_runtime::install("ends", pool.clone()).unwrap();
    let holder = pool.lock("order:7").acquire().await.unwrap();
    let waits = pool.lock("order:7").template("order:<id>").wait(ms(200)).acquire().await;
    assert_eq!(waits.unwrap_err().kind(), ErrorKind::Conflict);
    // Gives up while it waits.
    let given_up = pool.lock("order:7").wait(DEADLINE).acquire();
    assert!(tokio::time::timeout(ms(20), given_up).await.is_err());
    let mut queued = pin!(pool.lock("order:7").wait(DEADLINE).acquire());
    assert!(poll_once(queued.as_mut()).await.is_none());
    for _ in 0..100 {
        let error = pool.lock("order:7").acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::QueueFull);
    }
    drop(holder);
    assert_eq!(pool.lock("").acquire().await.unwrap_err().kind(), ErrorKind::InvalidKey);
    let traced = Traced::of("ends").await_event("not acquired").await;
    let conflict = traced.all("conflict")[0];
    conflict.has(&[("lock", "order:<id>"), ("pool", "ends")]);
    assert!((200..20_000).contains(&conflict.number("waited_ms")), "{conflict:?}");
    traced.all("cancelled")[0].has(&[("lock", "unnamed")]);
    let full = traced.all("queue full");
    assert!((1..20).contains(&full.len()), "one a second: {full:#?}");
    assert_eq!((full[0].level, full[0].number("rejected")), (Level::WARN, 1));
    let refused = traced.one("not acquired");
    refused.has(&[("lock", "unnamed")]);
    assert!(refused.fields["error"].contains("empty"), "{refused:?}");
    assert!(!format!("{:?}", traced.events).contains("order:7"));
}

/// The holder that a shutdown cancels learns of it, and so does the log.
#[tokio::test]
async fn a_shutdown_that_cancels_is_traced() {
    watch();
    let pool = memory().await;
    lock_runtime::install("closes", pool.clone()).unwrap();
    let guard = pool.lock("order:7").acquire().await.unwrap();
    pool.shutdown(Duration::ZERO).await;
    assert_eq!(guard.lost().await.kind(), ErrorKind::PoolClosed);
    let traced = Traced::of("closes").await_event("lost").await;
    traced.one("lost").has(&[("reason", "pool_closed"), ("lock", "unnamed")]);
}

#[tokio::test]
async fn failures_are_traced() {
    watch();
    let (pool, faults) = faulty_pool("trouble").await;
    // Before the acquire, which meets neither: a renewal may come before the next line.
    faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
    faults.plan(Operation::Release, Fault::Fail(FailureKind::NotApplied));
    let guard = pool.lock("order:7").template("order:<id>").ttl(ms(3_000)).acquire().await.unwrap();
    let traced = Traced::of("trouble").await_event("renewed").await;
    let missed = traced.one("not renewed yet");
    missed.has(&[("lock", "order:<id>"), ("pool", "trouble"), ("error", "a planned failure")]);
    assert_eq!(missed.level, Level::WARN);
    guard.release().await.unwrap();
    let traced = Traced::of("trouble").await_event("released").await;
    traced.one("not released yet").has(&[("lock", "order:<id>"), ("error", "a planned failure")]);
}

/// The hold ends before the linger, and so does its time.
#[tokio::test]
async fn a_linger_is_traced() {
    let server = RedisServer::start();
    let pool = installed("lingers", &server).await;
    let request = pool.lock("order:7").linger(ms(1_500)).ttl(ms(20_000));
    let began = tokio::time::Instant::now();
    request.run(async { tokio::time::sleep(ms(100)).await }).await.unwrap();
    let hold = u64::try_from(began.elapsed().as_millis()).unwrap();
    let traced = Traced::of("lingers").await_event("released").await;
    let lingers = traced.one("lingers");
    assert_eq!(lingers.level, Level::DEBUG);
    assert!((100..=hold).contains(&lingers.number("held_ms")), "{lingers:?}");
    assert!(!traced.one("released").fields.contains_key("held_ms"), "no hold ends there");
}

/// In an outage very many requests fail at once. The queue of events has room for other events.
#[tokio::test]
async fn failures_of_many_locks_are_few_warnings() {
    watch();
    let (pool, faults) = faulty_pool("many-failures").await;
    let mut guards = Vec::new();
    for id in 0..100 {
        guards.push(pool.lock(format!("order:{id}")).ttl(ms(3_000)).acquire().await.unwrap());
    }
    faults.always(Fault::Fail(FailureKind::NotApplied));
    let traced = Traced::of("many-failures").await_events("not renewed yet", 300).await;
    let few = |traced: &Traced, message: &str| {
        let all = traced.all(message);
        let warnings: Vec<_> = all.iter().filter(|event| event.level == Level::WARN).collect();
        assert!((1..20).contains(&warnings.len()), "one a second: {warnings:#?}");
        let counted: u64 = warnings.iter().map(|event| event.number("failed")).sum();
        let all = all.len() as u64;
        assert!((1..=all).contains(&counted), "{counted} of {all}");
    };
    few(&traced, "not renewed yet");
    drop(guards);
    let traced = traced.await_events("not released", 100).await;
    few(&traced, "not released yet");
    few(&traced, "not released");
}

/// The store is up, and every acquire fails.
#[tokio::test]
async fn a_store_that_refuses_writes_is_reported() {
    let server = RedisServer::start();
    let pool = installed("refuses", &server).await;
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    for _ in 0..50 {
        assert!(pool.lock("order:7").acquire().await.unwrap_err().is_backend());
    }
    let traced = Traced::of("refuses").await_event("the store refuses requests").await;
    let refused = traced.all("the store refuses requests");
    assert!((1..20).contains(&refused.len()), "one a second: {refused:#?}");
    assert_eq!((refused[0].level, refused[0].number("failed")), (Level::WARN, 1));
    assert!(refused[0].fields["error"].contains("OOM"), "{refused:?}");
    assert_eq!(traced.all("the store is down").len(), 0);
}

/// It answers every connection with an error, which is no end of an outage.
#[tokio::test]
async fn a_store_with_another_password_is_down() {
    let server = RedisServer::start();
    let pool = installed("password", &server).await;
    server.cli(&["CONFIG", "SET", "requirepass", "another"]);
    for kind in ["normal", "pubsub"] {
        server.cli(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
    }
    let traced = Traced::of("password").await_event("the store is down").await;
    let error = pool.lock("order:7").acquire().await.unwrap_err();
    assert!(error.is_backend(), "{error}");
    assert_eq!(traced.all("the store is back").len(), 0);
    server.cli(&["CONFIG", "SET", "requirepass", ""]);
    let traced = traced.await_event("the store is back").await;
    traced.one("the store is down");
    pool.lock("order:7").acquire().await.unwrap().release().await.unwrap();
}

/// Its key is computed, and so not in the template.
#[tokio::test]
async fn a_locked_route_can_have_a_template() {
    watch();
    let pool = memory().await;
    lock_runtime::install("routes", pool.clone()).unwrap();
    let tenant = |head: &axum::http::request::Parts| format!("tenant:{}", head.uri.path());
    let lock = LockLayer::new(tenant).pool(&pool).template("tenant:<path>").wait(Duration::ZERO);
    let routes = Router::new().route("/a", get(async || ())).layer(lock);
    let _held = pool.lock("tenant:/a").acquire().await.unwrap();
    let request = Request::get("/a").body(Body::empty()).unwrap();
    let response = routes.oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::CONFLICT);
    let traced = Traced::of("routes").await_event("answered with an error").await;
    for message in ["conflict", "answered with an error"] {
        traced.one(message).has(&[("lock", "tenant:<path>")]);
    }
}

/// A pool with a name that selects its events.
async fn installed(name: &str, server: &RedisServer) -> LockPool {
    watch();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    lock_runtime::install(name, pool.clone()).unwrap();
    pool
}
