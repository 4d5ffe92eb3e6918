//! Lost and late requests, dropped calls, killed servers, and chaos.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use fastrand::Rng;
use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, LeaseRef, LeaseStatus, Owner, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Key, LockPool};
use lock_tests::poll::poll_n;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::zookeeper::url_at;
use lock_tests::{FaultProxy, ZooKeeperServer, eventually_async};
use tokio::task::JoinSet;

use super::conformance::{until_nothing_is_left, until_queued};

#[tokio::test]
async fn an_acquire_with_a_lost_reply_is_undone_or_found_again() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    for n in 0..3 {
        let key = format!("order:{n}");
        let pool = LockPool::builder(url_at(proxy.port(), &root)).connect().await.unwrap();
        cycle(&pool, &key).await;
        proxy.hold(Direction::ToClient);
        let wait = ms(if n == 0 { 300 } else { 5_000 });
        let acquiring = tokio::spawn(pool.lock(key.as_str()).wait(wait).acquire());
        until_queued(server, &root, &key, 1).await;
        proxy.cut();
        proxy.release_held();
        match joined("the acquire", acquiring).await {
            Ok(guard) => {
                assert_eq!(server.queue(&root, &key).len(), 1, "one node for all requests");
                guard.release().await.unwrap();
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Backend, "{error}"),
        }
        until_nothing_is_left(server, &root).await;
    }
}

/// The requests of the interface itself, without a pool: what was dropped or lost is found and deleted without a release.
#[tokio::test]
async fn what_nothing_asks_for_any_more_is_deleted_at_its_end() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = Arc::new(open_backend(&url_at(proxy.port(), &root)).await.unwrap());
    let claim = |key: &str, enqueue: bool| {
        let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
        let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(300));
        request.enqueue = enqueue;
        request
    };
    // Answered. The claims below use the session that it has opened.
    let granted = store.acquire(&[claim("held", true)]).await.remove(0);
    assert!(matches!(granted, Ok(AcquireOutcome::Acquired { .. })), "{granted:?}");
    // The servers do not delete a container with a node.
    let mut other = server.client();
    other.create(&format!("{root}/held/lock-0000000000"), false).unwrap();
    until_queued(server, &root, "held", 1).await;
    // Dropped after its creation. The answer comes later.
    for _ in 0..3 {
        let request = claim("held", true);
        proxy.hold(Direction::ToClient);
        let caller = store.clone();
        let asking =
            tokio::spawn(async move { caller.acquire(std::slice::from_ref(&request)).await });
        until_queued(server, &root, "held", 2).await;
        asking.abort();
        drop(asking.await);
        proxy.release_held();
        until_queued(server, &root, "held", 1).await;
    }
    for polls in 0..7 {
        let request = claim(&format!("order:{polls}"), polls % 2 == 0);
        let _ = poll_n(store.acquire(std::slice::from_ref(&request)), polls).await;
    }
    // Behind all that was sent before.
    let granted = store.acquire(&[claim("last", true)]).await.remove(0);
    assert!(matches!(granted, Ok(AcquireOutcome::Acquired { .. })), "{granted:?}");
    let containers = other.children(&root).unwrap();
    let is_of_a_dropped_call = |name: &String| name.starts_with("order:");
    assert!(containers.iter().any(is_of_a_dropped_call), "{containers:?}");
    drop(other);
    until_nothing_is_left(server, &root).await;
}

/// A repeated release of the same owner, one of which was dropped at each of its polls.
#[tokio::test]
async fn a_release_may_be_dropped_and_repeated() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    for polls in 0..5 {
        let keys: Arc<[Key]> = Arc::new([Key::from("order:1"), Key::from("order:2")]);
        let request = AcquireRequest::new(keys.clone(), Owner::random().unwrap(), ms(20_000));
        store.acquire(std::slice::from_ref(&request)).await.remove(0).unwrap();
        let lease = LeaseRef::new(keys, request.owner, request.ttl);
        let release = [ReleaseRequest::new(lease.clone())];
        let _ = poll_n(store.release(&release), polls).await;
        store.release(&release).await.remove(0).unwrap();
        let held = store.is_held(&lease).await.unwrap();
        assert_eq!(held, LeaseStatus::NotHeld);
    }
    until_nothing_is_left(server, &root).await;
}

#[tokio::test]
async fn a_frozen_server_loses_the_lock_in_time_and_serves_again() {
    let server = ZooKeeperServer::builder().setting("maxSessionTimeout", 200_000).start();
    let builder = LockPool::builder(server.url()).request_timeout(ms(300));
    let pool = builder.wait(DEADLINE).connect().await.unwrap();
    let guard = pool.lock("order:1").ttl(ms(1_500)).acquire().await.unwrap();
    let paused = Instant::now();
    server.pause();
    let error = within(DEADLINE, "the loss", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(paused.elapsed() < ms(1_500) + ms(10_000), "{:?}", paused.elapsed());
    let error = pool.lock("order:2").wait(ms(300)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    server.resume();
    drop(guard);
    eventually_async(DEADLINE, "it serves again", async || {
        match pool.lock("order:1").wait(ms(1_000)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    until_nothing_is_left(&server, "/locks").await;
    // Killed under a lock: the session is restored from the disk.
    let guard = pool.lock("order:1").ttl(ms(100_000)).acquire().await.unwrap();
    server.kill();
    let error = pool.lock("order:2").wait(ms(100)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    server.restart();
    eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    until_nothing_is_left(&server, "/locks").await;
}

/// Several keys in opposite orders from several pools, while containers are deleted at any moment, as the servers do with those
/// that are not used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exclusion_needs_no_containers_of_free_locks_and_ends_in_no_deadlock() {
    let (server, root) = ZooKeeperServer::shared();
    let inside: Arc<[AtomicUsize; 6]> = Arc::default();
    let over = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for n in 0..6 {
        let pool = patient(server.url_of(&root), ms(20_000)).await;
        let (inside, over, mut rng) = (inside.clone(), over.clone(), Rng::with_seed(n));
        tasks.spawn(async move {
            for _ in 0..20 {
                let mut keys: Vec<_> = (0..rng.usize(1..4)).map(|_| rng.usize(..6)).collect();
                keys.sort_unstable();
                keys.dedup();
                let names = keys.iter().map(|key| format!("account:{key}"));
                let guard = pool.lock_all(names).acquire().await.unwrap();
                for key in &keys {
                    assert_eq!(inside[*key].fetch_add(1, Ordering::SeqCst), 0, "two holders");
                }
                tokio::task::yield_now().await;
                for key in &keys {
                    inside[*key].fetch_sub(1, Ordering::SeqCst);
                }
                guard.release().await.unwrap();
            }
            over.fetch_add(1, Ordering::SeqCst);
        });
    }
    let (mut client, mut deleted) = (server.client(), 0);
    while over.load(Ordering::SeqCst) < 6 {
        for key in 0..6 {
            deleted += usize::from(client.delete(&format!("{root}/account:{key}")).is_ok());
        }
        tokio::task::yield_now().await;
        while let Some(ended) = tasks.try_join_next() {
            ended.unwrap();
        }
    }
    within(DEADLINE, "all tasks", tasks.join_all()).await;
    println!("{deleted} containers deleted");
    assert!(deleted > 0);
    until_nothing_is_left(server, &root).await;
}
