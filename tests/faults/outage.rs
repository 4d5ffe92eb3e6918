//! A store that is down: with `OnOutage::Fail` an acquire returns at once, and service returns with the store.

#![allow(clippy::disallowed_methods)]

use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::post;
use lock_runtime::{ErrorKind, LockError, LockPool, OnOutage, Progress};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{FaultProxy, RedisServer, eventually_async, http};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const SOON: Duration = ms(20_000);

async fn failing_fast(url: &str) -> LockPool {
    let pool = LockPool::builder(url).on_outage(OnOutage::Fail).wait(SOON * 3);
    pool.connect().await.unwrap()
}

/// Waits until an acquire is refused without a wait.
async fn until_refused(pool: &LockPool) {
    eventually_async(SOON, "an acquire is refused", async || {
        let error = pool.lock("probe").wait(Duration::ZERO).acquire().await.err();
        error.is_some_and(|error| error.to_string().contains("the store has been down for"))
    })
    .await;
}

async fn until_served(pool: &LockPool) {
    eventually_async(SOON, "the pool serves again", async || {
        pool.lock("probe").acquire().await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_killed_store_is_an_error_at_once_until_it_is_back() {
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    cycle(&pool, "k").await;
    for _ in 0..2 {
        server.kill();
        until_refused(&pool).await;
        for request in [pool.lock("k"), pool.lock_all(["k", "l"])] {
            let error = within(SOON, "a refusal", request.acquire()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Backend);
            assert_eq!(error.progress(), Progress::NotStarted);
        }
        server.restart();
        until_served(&pool).await;
        cycle(&pool, "k").await;
        pool.lock_all(["k", "l"]).acquire().await.unwrap().release().await.unwrap();
    }
}

/// The connection stays open, and no answer arrives.
#[tokio::test]
async fn a_frozen_store_is_an_error_at_once_until_it_goes_on() {
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    cycle(&pool, "k").await;
    server.pause();
    until_refused(&pool).await;
    server.resume();
    until_served(&pool).await;
}

/// Waiters that came before the outage: of one key, of several keys, and behind another task.
#[tokio::test]
async fn waiters_are_rejected_when_the_outage_is_seen() {
    let server = RedisServer::start();
    server.cli(&["SET", "taken", "another", "PX", "600000"]);
    let pool = failing_fast(&server.url()).await;
    let mut waiting = JoinSet::new();
    for keys in [vec!["taken"], vec!["taken"], vec!["free", "taken"]] {
        let request = pool.lock_all(keys);
        waiting.spawn(async move { request.acquire().await.map(drop) });
    }
    until_queued(&server, "taken", 1).await;
    server.kill();
    let rejected = within(SOON, "all are rejected", waiting.join_all()).await;
    for outcome in rejected {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Backend);
    }
}

#[tokio::test]
async fn a_short_cut_is_no_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = failing_fast(proxy.url()).await;
    // A busy machine may take longer than the tolerance for a new connection, but not each time.
    for _ in 0..20 {
        until_served(&pool).await;
        proxy.cut();
        // It waits for the new connection.
        if let Ok(guard) = pool.lock("k").acquire().await {
            return guard.release().await.unwrap();
        }
    }
    panic!("each cut was an outage");
}

#[tokio::test]
async fn without_the_setting_an_acquire_waits_for_the_store() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::builder(proxy.url()).wait(SOON).connect().await.unwrap();
    cycle(&pool, "k").await;
    proxy.refuse(true);
    proxy.cut();
    let waits = pool.lock("k");
    let waits = tokio::spawn(async move { waits.acquire().await.map(drop) });
    // Twice as long as the failures that make an outage.
    tokio::time::sleep(ms(1_000)).await;
    assert!(!waits.is_finished());
    proxy.refuse(false);
    joined("it is granted", waits).await.unwrap();
}

async fn settle(State(pool): State<LockPool>, Path(id): Path<u64>) -> Result<String, LockError> {
    pool.lock(format!("order:{id}")).run(async { id.to_string() }).await
}

/// Prints how long the responses of a web service took, for 200 requests a second. `LOCK_OUTAGE_SECONDS` is how long the
/// store is down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_during_an_outage_do_not_wait() {
    let seconds = std::env::var("LOCK_OUTAGE_SECONDS").map_or(2, |text| text.parse().unwrap());
    let server = RedisServer::start();
    let pool = failing_fast(&server.url()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = Router::new().route("/{id}", post(settle)).with_state(pool.clone());
    let serving = tokio::spawn(async move { axum::serve(listener, routes).await });
    assert_eq!(http::post(address, "/7").await.unwrap().0, 200);
    server.kill();
    let began = Instant::now();
    let (mut sending, mut ticks) = (JoinSet::new(), tokio::time::interval(ms(5)));
    while began.elapsed() < Duration::from_secs(seconds) {
        ticks.tick().await;
        let sent = Instant::now();
        sending.spawn(async move {
            let (status, head) = http::post(address, "/7").await.unwrap();
            assert!(status == 503 && head.contains("retry-after: 1"), "{head}");
            (sent - began, sent.elapsed())
        });
    }
    let answers = within(SOON, "all are answered", sending.join_all()).await;
    let mut late: Vec<_> = answers
        .into_iter()
        .filter_map(|(sent, took)| (sent >= Duration::from_secs(1)).then_some(took))
        .collect();
    late.sort();
    let (median, most) = (late[late.len() / 2], late[late.len() * 99 / 100]);
    server.restart();
    let restarted = Instant::now();
    eventually_async(SOON, "the service serves again", async || {
        http::post(address, "/7").await.unwrap().0 == 200
    })
    .await;
    println!(
        "p50 {median:?}, p99 {most:?} from the second second on; served again after {:?}",
        restarted.elapsed()
    );
    // Without the setting each waits for a minute.
    assert!(most < ms(10_000), "{most:?}");
    serving.abort();
}

/// A lease that is renewed in time outlives an outage; the refusal is about acquires alone.
#[tokio::test]
async fn a_held_lock_outlives_an_outage() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = failing_fast(proxy.url()).await;
    let guard = pool.lock("k").ttl(ms(60_000)).acquire().await.unwrap();
    proxy.hold(Direction::ToClient);
    until_refused(&pool).await;
    proxy.release_held();
    until_served(&pool).await;
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}
