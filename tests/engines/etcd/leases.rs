//! Leases of the pool: expiry, renewals, and the end of a process.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_runtime::backend::{AcquireOutcome, AcquireRequest, Backend, Owner, ReleaseRequest};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Key, LockPool};
use lock_tests::etcd::url_at;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{EtcdServer, FaultProxy, eventually_async};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::conformance::{owners, until_nothing_is_left, until_queued};

/// The connection is silent for longer than the lease: the holder knows before another owner has the lock.
#[tokio::test]
async fn an_expired_lease_loses_its_locks_in_time() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let pool = LockPool::builder(url_at(proxy.port(), &root)).request_timeout(ms(300));
    let pool = pool.ttl(ms(1_000)).connect().await.unwrap();
    let other = patient(server.url_of(&root), ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(server, &root, "order:1", 2).await;
    proxy.hold(Direction::ToServer);
    proxy.hold(Direction::ToClient);
    let error = within(DEADLINE, "the loss", guard.lost()).await;
    let lost = Instant::now();
    assert_eq!(error.kind(), ErrorKind::Lost);
    let (acquired, theirs) = joined("the waiter", waiting).await;
    assert!(acquired > lost, "{:?} too early", lost.saturating_duration_since(acquired));
    proxy.release_held();
    drop(guard);
    let next = tokio::spawn(pool.lock("order:1").wait(DEADLINE).acquire());
    until_queued(server, &root, "order:1", 2).await;
    assert!(!next.is_finished());
    theirs.release().await.unwrap();
    joined("the pool with another lease", next).await.unwrap().release().await.unwrap();
    until_nothing_is_left(server, &root).await;
}

/// The server is silent for less than the lease, and for longer than a request.
#[tokio::test]
async fn a_short_silence_loses_nothing() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let builder = LockPool::builder(url_at(proxy.port(), &root)).request_timeout(ms(300));
    let pool = builder.ttl(ms(20_000)).connect().await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    proxy.hold(Direction::ToServer);
    let error = pool.lock("order:2").wait(ms(600)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    proxy.release_held();
    eventually_async(DEADLINE, "it answers", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    until_nothing_is_left(server, &root).await;
}

/// An operator ends the lease of the pool: all its locks are lost, and the next ones have another lease.
#[tokio::test]
async fn the_end_of_a_lease_is_told_at_once() {
    let (server, root) = EtcdServer::shared();
    let pool = patient(server.url_of(&root), ms(30_000)).await;
    let waiter = patient(server.url_of(&root), ms(30_000)).await;
    for round in 0..3 {
        let guards = [pool.lock("order:1").acquire().await, pool.lock("order:2").acquire().await];
        let guards = guards.map(Result::unwrap);
        // Its place in the queue is that of another lease.
        let waiting = acquire_in_task(&waiter, "order:1");
        until_queued(server, &root, "order:1", 2).await;
        let lease = server.queue(&root, "order:1")[0].lease;
        let ended = Instant::now();
        server.revoke(lease);
        for guard in guards {
            let error = within(DEADLINE, "the loss", guard.lost()).await;
            assert!(error.is_lost(), "{error}");
        }
        assert!(ended.elapsed() < ms(2_000) + NOISE, "{round}: {:?}", ended.elapsed());
        joined("the waiter", waiting).await.1.release().await.unwrap();
        // etcd issue 11456: the lease of a waiter ends while it waits.
        let guard = waiter.lock("order:1").acquire().await.unwrap();
        let waiting = acquire_in_task(&pool, "order:1");
        until_queued(server, &root, "order:1", 2).await;
        server.revoke(server.queue(&root, "order:1")[1].lease);
        until_queued(server, &root, "order:1", 2).await;
        assert!(!waiting.is_finished());
        guard.release().await.unwrap();
        joined("the pool with another lease", waiting).await.1.release().await.unwrap();
    }
    until_nothing_is_left(server, &root).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_locks_are_released_at_a_shutdown() {
    const LOCKS: usize = 1_000;
    let server = EtcdServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let inside = Arc::new(Barrier::new(LOCKS + 1));
    let mut bodies = JoinSet::new();
    for n in 0..LOCKS {
        let inside = inside.clone();
        let ttl = ms(if n % 2 == 0 { 30_000 } else { 12_000 });
        bodies.spawn(pool.lock(format!("body:{n}")).ttl(ttl).wait(DEADLINE).run(async move {
            inside.wait().await;
            std::future::pending::<()>().await;
        }));
    }
    within(DEADLINE, "all are inside", inside.wait()).await;
    assert_eq!(owners(&server, "/locks"), LOCKS);
    let report = within(DEADLINE, "the end", pool.shutdown(ms(100))).await;
    assert!(report.released >= LOCKS && report.abandoned == 0, "{report:?}");
    bodies.join_all().await;
    assert_eq!(owners(&server, "/locks"), 0);
    eventually_async(DEADLINE, "the leases have ended", async || server.leases() == 0).await;
}

/// A member takes some thousand changes a second. More of them delayed the signs of life of all leases in the cluster, and
/// other locks were lost.
#[tokio::test]
async fn releases_at_the_same_time_travel_together() {
    const LOCKS: usize = 1_000;
    let server = EtcdServer::start();
    let builder = LockPool::builder(server.url()).request_timeout(DEADLINE);
    let pool = builder.ttl(ms(30_000)).connect().await.unwrap();
    let mut acquiring = JoinSet::new();
    for n in 0..LOCKS {
        acquiring.spawn(pool.lock(format!("order:{n}")).wait(DEADLINE).acquire());
    }
    let guards = acquiring.join_all().await;
    let before = server.transactions();
    server.pause();
    let mut releasing = JoinSet::new();
    for guard in guards {
        releasing.spawn(guard.unwrap().release());
    }
    // Each release has begun when this task is polled again.
    tokio::task::yield_now().await;
    server.resume();
    for released in within(DEADLINE, "the releases", releasing.join_all()).await {
        released.unwrap();
    }
    let sent = server.transactions() - before;
    assert!(sent < LOCKS / 4, "{sent} transactions");
    assert_eq!(owners(&server, "/locks"), 0);
}

/// Keys stay locked for a `min_hold` though the pool is gone, and longer than the ttl.
#[tokio::test]
async fn a_min_hold_outlives_its_pool() {
    let (server, root) = EtcdServer::shared();
    let url = server.url_of(&root);
    let store = open_backend(&url).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(1_000));
    let granted = store.acquire(std::slice::from_ref(&request)).await.remove(0).unwrap();
    assert!(matches!(granted, AcquireOutcome::Acquired { .. }));
    let mut release = ReleaseRequest::new(request.lease());
    release.free_after = ms(4_000);
    let released = Instant::now();
    store.release(&[release]).await.remove(0).unwrap();
    store.close().await;
    let other = patient(&url, ms(20_000)).await;
    let (acquired, guard) = joined("the next owner", acquire_in_task(&other, "order:1")).await;
    assert!(acquired.saturating_duration_since(released) >= ms(4_000));
    guard.release().await.unwrap();
}

/// Signs of life of a lease that is in little use are rare. One is sent before a `min_hold` is promised.
#[tokio::test]
async fn a_min_hold_under_an_idle_lease_outlives_its_pool() {
    const MIN_HOLD: Duration = ms(9_000);
    let (server, root) = EtcdServer::shared();
    let url = server.url_of(&root);
    let store = open_backend(&url).await.unwrap();
    let acquire = async |ttl| {
        let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
        let request = AcquireRequest::new(keys, Owner::random().unwrap(), ttl);
        let granted = store.acquire(std::slice::from_ref(&request)).await.remove(0).unwrap();
        assert!(matches!(granted, AcquireOutcome::Acquired { .. }));
        ReleaseRequest::new(request.lease())
    };
    let release = acquire(MIN_HOLD).await;
    let lease = server.queue(&root, "order:1")[0].lease;
    store.release(&[release]).await.remove(0).unwrap();
    // It has ten seconds, and is in use for twenty.
    eventually_async(2 * DEADLINE, "its last sign is old", async || server.seconds_left(lease) < 8)
        .await;
    let mut release = acquire(ms(1_000)).await;
    release.free_after = MIN_HOLD;
    let released = Instant::now();
    store.release(&[release]).await.remove(0).unwrap();
    assert_eq!(server.queue(&root, "order:1")[0].lease, lease);
    store.close().await;
    let other = patient(&url, ms(20_000)).await;
    let (acquired, guard) = joined("the next owner", acquire_in_task(&other, "order:1")).await;
    let took = acquired.saturating_duration_since(released);
    assert!(took >= MIN_HOLD, "{took:?}");
    guard.release().await.unwrap();
}

/// The owner has had a key in the queue, and a deadline for it. The lease of that key has ended since.
#[tokio::test]
async fn a_grant_by_a_new_key_ends_at_its_ttl() {
    let (server, root) = EtcdServer::shared();
    let url = server.url_of(&root);
    let holder = patient(&url, ms(20_000)).await;
    let guard = holder.lock("order:1").acquire().await.unwrap();
    let store = open_backend(&url).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(1_000));
    request.enqueue = true;
    let acquire = async |request: &AcquireRequest| {
        let outcome = store.acquire(std::slice::from_ref(request)).await.remove(0).unwrap();
        matches!(outcome, AcquireOutcome::Acquired { .. })
    };
    assert!(!acquire(&request).await, "it is queued");
    server.revoke(server.queue(&root, "order:1")[1].lease);
    guard.release().await.unwrap();
    request.attempt = 1;
    let granted = Instant::now();
    eventually_async(DEADLINE, "it is granted", async || acquire(&request).await).await;
    until_nothing_is_left(server, &root).await;
    let took = granted.elapsed();
    assert!(took < ms(8_000), "{took:?}");
}

/// The connection is being opened again when the pool is dropped.
#[tokio::test]
async fn a_pool_that_is_dropped_without_a_connection_leaves_nothing() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    // The lease is longer than this waits, and the end has as much time as a request.
    let pool = LockPool::builder(url_at(proxy.port(), &root)).ttl(ms(57_000));
    let pool = pool.request_timeout(ms(20_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    assert!(!server.keys(&root).is_empty(), "the lease has a key");
    let tries = async || {
        let before = proxy.refusals();
        let has_tried = async || proxy.refusals() >= before + 2;
        eventually_async(DEADLINE, "it connects again", has_tried).await;
    };
    proxy.refuse(true);
    proxy.cut();
    tries().await;
    drop(pool);
    tries().await;
    proxy.refuse(false);
    eventually_async(DEADLINE, "the lease has ended", async || server.keys(&root).is_empty()).await;
}

/// Dropped without a shutdown.
#[tokio::test]
async fn a_dropped_pool_leaves_nothing() {
    let (server, root) = EtcdServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(30_000));
    store.acquire(std::slice::from_ref(&request)).await.remove(0).unwrap();
    assert_eq!(owners(server, &root), 1);
    drop(store);
    until_nothing_is_left(server, &root).await;
    eventually_async(DEADLINE, "the lease has ended", async || server.keys(&root).is_empty()).await;
}
