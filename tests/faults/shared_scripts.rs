//! Requests of one batch share a script, and each has its own outcome.

#![allow(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use lock_runtime::{Fence, LockError, LockGuard, LockPool};
use lock_tests::prelude::*;
use lock_tests::{RedisServer, eventually_async};
use tokio::task::JoinSet;

const COUNT: usize = 60;
const PASSWORD: &str = "shared";

/// A server with a user that may use keys of these patterns.
fn server(keys: &str) -> (RedisServer, String) {
    let server = RedisServer::builder()
        .config_line(&format!("user worker on >{PASSWORD} {keys} &* +@all"))
        .start();
    let url = format!("redis://worker:{PASSWORD}@127.0.0.1:{}", server.port());
    (server, url)
}

async fn connect(url: &str) -> LockPool {
    // No request fails for the time in which the server is paused.
    let builder = LockPool::builder(url).request_timeout(ms(10_000));
    builder.wait(ms(20_000)).connect().await.unwrap()
}

/// Every third lock has a key that the user may not have.
fn key(n: usize) -> String {
    if n.is_multiple_of(3) { format!("secret:{n}") } else { format!("order:{n}") }
}

/// Calls of scripts so far.
fn script_calls(server: &RedisServer) -> usize {
    let stats = server.cli(&["INFO", "commandstats"]);
    let calls = |name: &str| {
        let start = format!("cmdstat_{name}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    };
    calls("eval") + calls("evalsha")
}

/// Runs `requests` while `server` is paused until all are sent, so that they make batches.
async fn at_once<T: Send + 'static>(
    server: &RedisServer,
    requests: impl Iterator<Item = (usize, impl Future<Output = T> + Send + 'static)>,
) -> Vec<(usize, T)> {
    let sent = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    server.pause();
    for (n, request) in requests {
        let sent = Arc::clone(&sent);
        tasks.spawn(async move {
            // Nothing is awaited between this and the first poll of the request.
            sent.fetch_add(1, Relaxed);
            (n, request.await)
        });
    }
    while sent.load(Relaxed) < tasks.len() {
        tokio::task::yield_now().await;
    }
    server.resume();
    tasks.join_all().await
}

async fn acquire_all(
    server: &RedisServer,
    pool: &LockPool,
) -> Vec<(usize, Result<LockGuard, LockError>)> {
    at_once(server, (0..COUNT).map(|n| (n, pool.lock(key(n)).acquire()))).await
}

async fn release_all(
    server: &RedisServer,
    guards: Vec<(usize, LockGuard)>,
) -> Vec<(usize, Result<(), LockError>)> {
    at_once(server, guards.into_iter().map(|(n, guard)| (n, guard.release()))).await
}

fn granted(outcomes: Vec<(usize, Result<LockGuard, LockError>)>) -> Vec<(usize, LockGuard)> {
    outcomes.into_iter().map(|(n, outcome)| (n, outcome.unwrap())).collect()
}

#[tokio::test]
async fn fences_of_a_batch_differ_and_grow_from_batch_to_batch() {
    let (server, url) = server("~*");
    let pool = connect(&url).await;
    let mut last: Option<Fence> = None;
    for _ in 0..5 {
        let before = script_calls(&server);
        let guards = granted(acquire_all(&server, &pool).await);
        let acquires = script_calls(&server) - before;
        let fences: BTreeSet<_> = guards.iter().map(|(_, guard)| guard.fence().unwrap()).collect();
        assert_eq!(fences.len(), COUNT);
        assert!(fences.first().copied() > last, "{fences:?} after {last:?}");
        last = fences.last().copied();
        let before = script_calls(&server);
        for (n, released) in release_all(&server, guards).await {
            released.unwrap_or_else(|error| panic!("{n}: {error}"));
        }
        let releases = script_calls(&server) - before;
        assert!(acquires < COUNT / 2 && releases < COUNT / 2, "{acquires}, {releases}");
    }
    assert_eq!(server.cli(&["KEYS", "*"]), "lock_runtime:fence");
}

/// The counter is ahead of the server's clock, so it counts on by one for each grant.
#[tokio::test]
async fn fences_of_a_batch_differ_while_the_clock_lags() {
    let (server, url) = server("~*");
    let pool = connect(&url).await;
    let ahead = 8_000_000_000_000_000_u64;
    server.cli(&["SET", "lock_runtime:fence", &ahead.to_string()]);
    let guards = granted(acquire_all(&server, &pool).await);
    let fences: BTreeSet<_> = guards.iter().map(|(_, guard)| guard.fence().unwrap()).collect();
    assert_eq!(fences.len(), COUNT);
    assert!(fences.first().unwrap().get() > ahead);
    assert!(fences.last().unwrap().get() <= ahead + 2 * COUNT as u64, "{fences:?}");
}

#[tokio::test]
async fn a_forbidden_key_is_refused_alone() {
    let (server, url) = server("~order:* ~lock_runtime:*");
    let pool = connect(&url).await;
    let mut guards = Vec::new();
    for (n, outcome) in acquire_all(&server, &pool).await {
        match outcome {
            Ok(guard) => {
                assert!(!n.is_multiple_of(3), "{n} is forbidden");
                guards.push((n, guard));
            }
            Err(error) => {
                assert!(n.is_multiple_of(3), "{n}: {error}");
                assert!(error.to_string().contains("NOPERM"), "{error}");
            }
        }
    }
    assert_eq!(guards.len(), COUNT - COUNT / 3);
    for (n, released) in release_all(&server, guards).await {
        released.unwrap_or_else(|error| panic!("{n}: {error}"));
    }
    assert_eq!(server.cli(&["KEYS", "*"]), "lock_runtime:fence");
}

#[tokio::test]
async fn a_key_that_becomes_forbidden_is_the_only_one_that_is_not_released() {
    let (server, url) = server("~*");
    let pool = connect(&url).await;
    let guards = granted(acquire_all(&server, &pool).await);
    let rights = ["ACL", "SETUSER", "worker", "resetkeys", "~order:*", "~lock_runtime:*"];
    assert_eq!(server.cli(&rights), "OK");
    for (n, released) in release_all(&server, guards).await {
        match released {
            Ok(()) => assert!(!n.is_multiple_of(3), "{n} is forbidden"),
            Err(error) => {
                assert!(n.is_multiple_of(3), "{n}: {error}");
                assert!(error.to_string().contains("NOPERM"), "{error}");
            }
        }
    }
    assert_eq!(server.cli(&["KEYS", "order:*"]), "");
    assert_eq!(server.cli(&["ACL", "SETUSER", "worker", "allkeys"]), "OK");
    eventually_async(ms(10_000), "the others are released behind it", async || {
        server.cli(&["KEYS", "secret:*"]).is_empty()
    })
    .await;
}

/// Tries all locks once and at once, of which every third is held.
async fn every_third_is_refused(server: &RedisServer, pool: &LockPool) {
    let requests = (0..COUNT).map(|n| (n, pool.lock(key(n)).wait(ms(0)).acquire()));
    for (n, outcome) in at_once(server, requests).await {
        let outcome = outcome.map_err(|error| error.kind());
        let is_refused = matches!(outcome, Err(lock_runtime::ErrorKind::Conflict));
        assert_eq!(is_refused, n.is_multiple_of(3), "{n}: {outcome:?}");
    }
}

/// The script reads the remaining time of a held lock, which this user may not.
#[tokio::test]
async fn a_held_lock_of_unknown_expiry_is_refused_alone() {
    let server = RedisServer::builder()
        .config_line(&format!("user worker on >{PASSWORD} ~* &* +@all -pttl"))
        .start();
    let url = format!("redis://worker:{PASSWORD}@127.0.0.1:{}", server.port());
    let pool = connect(&url).await;
    for n in (0..COUNT).filter(|n| n.is_multiple_of(3)) {
        server.cli(&["SET", &key(n), "of another library"]);
    }
    every_third_is_refused(&server, &pool).await;
}

/// Each lock of a batch that another owner holds is reported with its remaining time, and the others are granted.
#[tokio::test]
async fn a_held_lock_is_refused_alone() {
    let (server, url) = server("~*");
    let pool = connect(&url).await;
    for n in (0..COUNT).filter(|n| n.is_multiple_of(3)) {
        server.cli(&["SET", &key(n), "of another library", "PX", "1500"]);
    }
    every_third_is_refused(&server, &pool).await;
    // With a wait they are acquired when the foreign leases end.
    drop(granted(acquire_all(&server, &pool).await));
}
