//! The store keeps `min_hold`, whatever happens to the process and to its renewals and releases.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::LockPool;
use lock_runtime::testing::{Fault, FaultPlan, FaultyBackend, Operation, open_backend};
use lock_tests::prelude::*;
use lock_tests::{RedisServer, eventually_async};
use tokio::time::sleep;

const TTL: Duration = ms(1500);
const HOLD: Duration = ms(60_000);

/// The limit of effects that come soon, on a busy machine.
const SOON: Duration = ms(20_000);

async fn faulty(url: &str) -> (LockPool, FaultPlan) {
    let (backend, faults) = FaultyBackend::new(open_backend(url).await.unwrap());
    (LockPool::with_backend(backend).ttl(TTL).connect().await.unwrap(), faults)
}

/// The remaining time of `key` on the server, in milliseconds.
fn left(server: &RedisServer, key: &str) -> i64 {
    server.cli(&["PTTL", key]).parse().unwrap()
}

/// Checks that most of the servers keep `key`. A node of a quorum that was late has no key.
#[track_caller]
fn is_kept(servers: &[RedisServer], key: &str, what: &str) {
    let left: Vec<_> = servers.iter().map(|server| left(server, key)).collect();
    let kept = left.iter().filter(|left| (30_000..=60_000).contains(*left)).count();
    assert!(kept * 2 > servers.len(), "{what}: {key} is kept for {left:?} ms");
}

/// Runs `test` at all stores at once.
async fn at_each(test: impl AsyncFn(&str, &[RedisServer])) {
    let [(a, one), (b, other), (c, quorum)] = stores();
    tokio::join!(test(&a, &one), test(&b, &other), test(&c, &quorum));
}

/// One server with and without scripts, and a quorum of three.
fn stores() -> [(String, Vec<RedisServer>); 3] {
    let one = |tail: &str| {
        let server = RedisServer::start();
        (format!("{}{tail}", server.url()), vec![server])
    };
    let nodes = [(); 3].map(|()| RedisServer::start());
    let urls = nodes.each_ref().map(RedisServer::url).join(",");
    [one(""), one("?scripts=off"), (format!("redlock://{urls}"), nodes.into())]
}

#[tokio::test]
async fn it_outlives_a_process_that_disappears() {
    at_each(async |url, servers| {
        let (pool, faults) = faulty(url).await;
        let guard = pool.lock("k").fencing(false).min_hold(HOLD).acquire().await.unwrap();
        let guards = [
            guard,
            pool.lock_all(["{k}:a", "{k}:b"])
                .fencing(false)
                .min_hold(HOLD)
                .acquire()
                .await
                .unwrap(),
        ];
        faults.always(Fault::LoseRequest);
        sleep(TTL * 2).await;
        for key in ["k", "{k}:a", "{k}:b"] {
            is_kept(servers, key, url);
        }
        assert!(guards.iter().all(|guard| !guard.is_held()), "the validity ends with the ttl");
    })
    .await;
}

#[tokio::test]
async fn renewals_keep_it_and_so_does_a_release_without_an_answer() {
    at_each(async |url, servers| {
        let (pool, faults) = faulty(url).await;
        let guard = pool.lock("k").fencing(false).min_hold(HOLD).acquire().await.unwrap();
        let renewed = async || faults.count(Operation::Renew) >= 3;
        eventually_async(SOON, "it is renewed", renewed).await;
        is_kept(servers, "k", &format!("{url} after renewals"));
        faults.always(Fault::LoseRequest);
        drop(guard);
        let released = async || faults.count(Operation::Release) >= 1;
        eventually_async(SOON, "the release is on its way", released).await;
        sleep(TTL * 2).await;
        is_kept(servers, "k", &format!("{url} after the release"));
        // Repeated releases do not end it either.
        faults.always(Fault::None);
        let tries = faults.count(Operation::Release);
        let repeated = async || faults.count(Operation::Release) > tries;
        eventually_async(SOON, "the release is repeated", repeated).await;
        let shut_down = pool.shutdown(SOON).await;
        assert_eq!(shut_down.abandoned, 0, "{url}");
        is_kept(servers, "k", url);
    })
    .await;
}

/// A store that serves the next renewal late, behind the release. The second plan counts what has arrived at the store.
async fn with_a_late_renewal(url: &str) -> (LockPool, FaultPlan, FaultPlan) {
    let (store, served) = FaultyBackend::new(open_backend(url).await.unwrap());
    let (store, faults) = FaultyBackend::new(store);
    let pool = LockPool::with_backend(store).ttl(HOLD).request_timeout(ms(500));
    faults.plan(Operation::Renew, Fault::DelayRequest(ms(2_500)));
    (pool.connect().await.unwrap(), faults, served)
}

/// Waits until the renewal has arrived, and until `key` is free behind it, long before the end of the ttl.
async fn until_free_behind_the_renewal(
    (faults, served): (&FaultPlan, &FaultPlan),
    servers: &[RedisServer],
    key: &str,
) {
    assert_eq!(served.count(Operation::Renew), 0, "released before it");
    let has_arrived = async || served.count(Operation::Renew) == 1;
    eventually_async(SOON, "the renewal arrives", has_arrived).await;
    let releases = faults.count(Operation::Release);
    let repeated = async || faults.count(Operation::Release) > releases + 1;
    eventually_async(SOON, "the release is repeated", repeated).await;
    let is_free = async || servers.iter().all(|server| server.cli(&["EXISTS", key]) == "0");
    eventually_async(SOON, "it ends", is_free).await;
}

#[tokio::test]
async fn a_renewal_that_arrives_after_the_release_does_not_extend_it() {
    at_each(async |url, servers| {
        let (pool, faults, served) = with_a_late_renewal(url).await;
        let request = pool.lock("k").fencing(false).renew(ms(500)).min_hold(ms(4_000));
        let guard = request.acquire().await.unwrap();
        let sent = async || faults.count(Operation::Renew) == 1;
        eventually_async(SOON, "a renewal is sent", sent).await;
        guard.release().await.unwrap();
        until_free_behind_the_renewal((&faults, &served), servers, "k").await;
    })
    .await;
}

/// Nodes of a quorum restore a lock that they have lost.
#[tokio::test]
async fn a_renewal_that_arrives_after_the_release_does_not_restore_a_lock_of_a_quorum() {
    let [_, _, (url, nodes)] = stores();
    let (pool, faults, served) = with_a_late_renewal(&url).await;
    let guard = pool.lock("k").fencing(false).renew(ms(500)).acquire().await.unwrap();
    let sent = async || faults.count(Operation::Renew) == 1;
    eventually_async(SOON, "a renewal is sent", sent).await;
    guard.release().await.unwrap();
    until_free_behind_the_renewal((&faults, &served), &nodes, "k").await;
}

/// No body has run under it.
#[tokio::test]
async fn a_grant_that_never_reached_its_caller_is_freed_at_once() {
    at_each(async |url, servers| {
        let (pool, faults) = faulty(url).await;
        let request = |wait: Duration| {
            pool.lock("k").fencing(false).min_hold(HOLD).ttl(ms(20_000)).wait(wait)
        };
        faults.plan(Operation::Acquire, Fault::LoseReply);
        let error = request(Duration::ZERO).acquire().await.unwrap_err();
        assert!(error.is_backend(), "{url}: {error}");
        let is_free = async || servers.iter().all(|server| server.cli(&["EXISTS", "k"]) == "0");
        eventually_async(SOON, "it is given back", is_free).await;
        let guard = request(SOON).acquire().await;
        let guard = guard.unwrap_or_else(|error| panic!("{url}: {error}"));
        guard.release().await.unwrap();
        is_kept(servers, "k", url);
    })
    .await;
}

/// A hand-off sends no request, so the store would not know the `min_hold` of the next holder.
#[tokio::test]
async fn the_next_holder_of_the_process_has_its_own_min_hold() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).ttl(ms(20_000)).local_handoff_limit(SOON).connect();
    let pool = pool.await.unwrap();
    let first = pool.lock("k").acquire().await.unwrap();
    let next = tokio::spawn(pool.lock("k").min_hold(HOLD).wait(SOON).acquire());
    let behind = tokio::spawn(pool.lock("k").wait(SOON).acquire());
    sleep(ms(100)).await;
    first.release().await.unwrap();
    let next = next.await.unwrap().unwrap();
    assert!(left(&server, "k") > 30_000, "from the grant on");
    next.release().await.unwrap();
    assert!(left(&server, "k") > 30_000, "and behind it");
    behind.abort();
}

/// The first waiter is gone when the answer comes; the next one has another `min_hold`.
#[tokio::test(start_paused = true)]
async fn a_grant_goes_to_the_next_waiter_only_with_its_own_min_hold() {
    let url = "memory://a_grant_goes_to_the_next_waiter_only_with_its_own_min_hold";
    let (store, faults) = FaultyBackend::new(open_backend(url).await.unwrap());
    let pool = LockPool::with_backend(store).ttl(TTL).on_current_runtime();
    let (pool, other) = (pool.connect().await.unwrap(), LockPool::builder(url).ttl(TTL));
    let other = other.on_current_runtime().connect().await.unwrap();
    let held = other.lock("k").acquire().await.unwrap();
    let first = tokio::spawn(pool.lock("k").wait(SOON).acquire());
    sleep(ms(10)).await;
    let next = tokio::spawn(pool.lock("k").min_hold(HOLD).wait(SOON).acquire());
    sleep(ms(10)).await;
    let asked = faults.count(Operation::Acquire);
    faults.plan(Operation::Acquire, Fault::DelayReply(ms(200)));
    held.release().await.unwrap();
    sleep(ms(100)).await;
    assert_eq!(faults.count(Operation::Acquire), asked + 1, "requested for the first");
    first.abort();
    let next = next.await.unwrap().unwrap();
    faults.always(Fault::LoseRequest);
    sleep(HOLD / 2).await;
    assert!(!next.is_held(), "the validity ends with the ttl");
    let taken = other.lock("k").try_acquire().await.unwrap();
    assert!(taken.is_none(), "the store keeps it");
}
