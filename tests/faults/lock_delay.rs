//! `lock_delay` keeps a lock closed behind a holder that was lost, and costs nothing behind one that has released.

use std::time::Duration;

use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool};
use lock_tests::late_writes::{DELAY, StoppedHolder, rounds};
use lock_tests::prelude::*;
use lock_tests::{Quorum, RedisServer, eventually, eventually_async, lock_delays};

const SOON: Duration = ms(20_000);

/// The remaining time of the lock on the server, in milliseconds.
fn left(server: &RedisServer) -> i64 {
    server.cli(&["PTTL", "k"]).parse().unwrap()
}

async fn stopped(server: &RedisServer, delay: Duration) -> StoppedHolder {
    StoppedHolder::start(env!("CARGO_BIN_EXE_late-writer"), &server.url(), "k", delay).await
}

#[tokio::test]
async fn a_holder_that_resumes_within_it_writes_before_the_next_grant() {
    for _ in 0..rounds() {
        let server = RedisServer::start();
        let stopped = stopped(&server, DELAY).await;
        eventually(SOON, "the ttl is over", || left(&server) < millis(DELAY));
        stopped.resume().await;
        assert!(!stopped.waiter.is_finished(), "the lock was granted before the late write");
        stopped.end().await;
    }
}

#[tokio::test]
async fn without_it_the_same_holder_writes_behind_the_next_grant() {
    let server = RedisServer::start();
    let mut stopped = stopped(&server, Duration::ZERO).await;
    let next = (&mut stopped.waiter).await.unwrap().unwrap();
    assert!(!stopped.has_written());
    stopped.resume().await;
    assert!(next.is_held(), "another holder is active while the first one writes");
}

#[tokio::test]
async fn a_release_frees_at_once() {
    let server = RedisServer::start();
    let one = LockPool::connect(&server.url()).await.unwrap();
    let other = LockPool::connect(&server.url()).await.unwrap();
    let guard = one.lock("k").lock_delay(ms(60_000)).acquire().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(left(&server), -2, "no key is left");
    let guard = other.lock("k").wait(Duration::ZERO).acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn it_delays_the_next_grant_behind_a_loss_on_every_store() {
    let (server, quorum) = (RedisServer::start(), Quorum::start(3));
    let (one, several) = (server.url(), quorum.url());
    tokio::join!(
        lock_delays::delay_the_next_grant("memory://lock_delays"),
        lock_delays::delay_the_next_grant(&one),
        lock_delays::delay_the_next_grant(&several),
    );
}

#[tokio::test]
async fn a_hold_that_is_ended_by_its_limit_counts_as_lost() {
    let server = RedisServer::start();
    for url in [server.url(), "memory://".to_owned(), format!("{}?scripts=off", server.url())] {
        let store = open_backend(&url).await.unwrap();
        let pool = LockPool::with_backend(store).connect().await.unwrap();
        let lock =
            || pool.lock("k").fencing(false).ttl(ms(200)).lock_delay(ms(60_000)).max_hold(ms(100));
        let guard = lock().acquire().await.unwrap();
        eventually_async(SOON, "the hold is over", async || !guard.is_held()).await;
        assert!(guard.release().await.is_err_and(|error| error.is_lost()));
        let next = pool.lock("k").fencing(false).wait(ms(300)).acquire().await.unwrap_err();
        assert!(next.is_conflict(), "{url}: {next}");
        server.cli(&["DEL", "k"]);
    }
}

/// A body that blocks its thread is not cancelled, and the tasks of the pool do not run meanwhile.
#[tokio::test]
#[allow(clippy::disallowed_methods)]
async fn a_body_and_a_guard_that_end_behind_their_limit_count_as_lost() {
    let builder = LockPool::builder("memory://").on_current_runtime();
    let pool = builder.connect().await.unwrap();
    let lock = |key| {
        let request = pool.lock(key).fencing(false).ttl(ms(30_000)).lock_delay(ms(60_000));
        request.max_hold(ms(100))
    };
    lock("body").run(async { std::thread::sleep(ms(150)) }).await.unwrap();
    let guard = lock("guard").acquire().await.unwrap();
    while guard.is_held() {
        std::thread::sleep(ms(1));
    }
    drop(guard);
    for key in ["body", "guard"] {
        let next = pool.lock(key).fencing(false).wait(ms(300)).acquire().await.unwrap_err();
        assert!(next.is_conflict(), "{key}: {next}");
    }
}

#[tokio::test]
async fn more_than_a_minute_and_a_reentrant_call_are_refused() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let refused = async |error: Result<LockGuard, LockError>, says: &str| {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(says), "{error}");
    };
    let long = pool.lock("k").lock_delay(ms(60_001)).acquire().await;
    refused(long, "longer than a minute").await;
    let reentrant = pool.lock("k").lock_delay(ms(1)).reentrant(true).acquire().await;
    refused(reentrant, "`lock_delay` and `reentrant` exclude each other").await;
}

fn millis(span: Duration) -> i64 {
    i64::try_from(span.as_millis()).unwrap()
}
