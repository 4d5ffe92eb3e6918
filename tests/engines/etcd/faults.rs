//! Lost and late requests, dropped calls, killed servers, and chaos.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, LeaseRef, LeaseStatus, Owner, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Key, LockPool};
use lock_tests::etcd::url_at;
use lock_tests::poll::poll_n;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{EtcdServer, FaultProxy, eventually_async};

use super::conformance::{until_nothing_is_left, until_queued};

#[tokio::test]
async fn an_acquire_with_a_lost_reply_is_undone_or_found_again() {
    let (server, root) = EtcdServer::shared();
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
                assert_eq!(server.queue(&root, &key).len(), 1, "one key for all requests");
                guard.release().await.unwrap();
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Backend, "{error}"),
        }
        until_nothing_is_left(server, &root).await;
    }
}

/// There is no other member to ask, so the limit is that of a connection attempt, not that of a request.
#[tokio::test]
async fn the_only_member_has_the_connect_timeout_for_its_first_answers() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    proxy.delay(Direction::ToClient, ms(1_200));
    let builder = LockPool::builder(url_at(proxy.port(), &root)).connect_timeout(DEADLINE);
    let pool = builder.request_timeout(ms(500)).connect().await.unwrap();
    proxy.delay(Direction::ToClient, Duration::ZERO);
    eventually_async(DEADLINE, "the pool serves", async || {
        pool.lock("order:1").run(async {}).await.is_ok()
    })
    .await;
}

/// The members accept connections and do not answer, as in an election that lasts longer than an attempt at each member.
#[tokio::test]
async fn a_pool_connects_to_members_that_answer_within_the_connect_timeout() {
    let (server, root) = EtcdServer::shared();
    let members = [FaultProxy::to_port(server.port()), FaultProxy::to_port(server.port())];
    members.iter().for_each(|member| member.hold(Direction::ToClient));
    let url = url_of_members(&members, &root);
    let connecting = tokio::spawn(async move {
        LockPool::builder(url).connect_timeout(DEADLINE).request_timeout(ms(500)).connect().await
    });
    eventually_async(DEADLINE, "each member was tried again", async || {
        members.iter().all(|member| member.connections() > 1) || connecting.is_finished()
    })
    .await;
    members.iter().for_each(FaultProxy::release_held);
    let pool = joined("the connection", connecting).await.unwrap();
    cycle(&pool, "order:1").await;
}

/// The leases of several ttls are all written before a connection serves. One after the other they need more than its time limit.
#[tokio::test]
async fn a_pool_with_many_leases_reconnects_over_a_slow_link() {
    let (server, root) = EtcdServer::shared();
    let members = [FaultProxy::to_port(server.port()), FaultProxy::to_port(server.port())];
    let builder = LockPool::builder(url_of_members(&members, &root));
    let pool = builder.request_timeout(ms(1_000)).connect().await.unwrap();
    let mut guards = Vec::new();
    for seconds in [30, 45, 60, 90, 120, 190, 300] {
        let ttl = Duration::from_secs(seconds);
        guards.push(pool.lock(format!("order:{seconds}")).ttl(ttl).acquire().await.unwrap());
    }
    members.iter().for_each(|member| member.delay(Direction::ToClient, ms(550)));
    members.iter().for_each(FaultProxy::cut);
    for guard in &guards {
        eventually_async(DEADLINE, "the lock is held", async || guard.verify().await.is_ok()).await;
    }
    members.iter().for_each(|member| member.delay(Direction::ToClient, Duration::ZERO));
    for guard in guards {
        guard.release().await.unwrap();
    }
}

/// The answer to a sign of life takes longer than the time after which another stream is opened for the lease of a short lock.
#[tokio::test]
async fn a_short_lock_over_a_slow_link_does_not_end_the_connection() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let builder = LockPool::builder(url_at(proxy.port(), &root)).request_timeout(ms(5_000));
    let pool = builder.wait(DEADLINE).connect().await.unwrap();
    proxy.delay(Direction::ToClient, ms(350));
    let connections = proxy.connections();
    for _ in 0..3 {
        let guard = pool.lock("order:1").ttl(ms(1_500)).acquire().await.unwrap();
        guard.release().await.unwrap();
        // Nothing else than signs of life.
        tokio::time::sleep(ms(1_000)).await;
    }
    assert_eq!(proxy.connections(), connections);
    proxy.delay(Direction::ToClient, Duration::ZERO);
}

/// The URL of a cluster with these members.
fn url_of_members(members: &[FaultProxy; 2], root: &str) -> String {
    let [one, other] = members.each_ref().map(FaultProxy::port);
    format!("etcd://127.0.0.1:{one},127.0.0.1:{other}{root}")
}

/// The requests of the interface itself, without a pool: what was dropped or lost is found and deleted without a release.
#[tokio::test]
async fn what_nothing_asks_for_any_more_is_deleted_at_its_end() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = Arc::new(open_backend(&url_at(proxy.port(), &root)).await.unwrap());
    let claim = |key: &str| {
        let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
        AcquireRequest::new(keys, Owner::random().unwrap(), ms(300))
    };
    // Answered. The claims below use the lease that it has made.
    let granted = store.acquire(&[claim("order:0")]).await.remove(0);
    assert!(matches!(granted, Ok(AcquireOutcome::Acquired { .. })), "{granted:?}");
    until_nothing_is_left(server, &root).await;
    // Dropped after its put. The answer comes later.
    for round in 0..4 {
        let mut request = claim("order:1");
        request.enqueue = round % 2 == 0;
        proxy.hold(Direction::ToClient);
        let caller = store.clone();
        let asking =
            tokio::spawn(async move { caller.acquire(std::slice::from_ref(&request)).await });
        until_queued(server, &root, "order:1", 1).await;
        asking.abort();
        drop(asking.await);
        proxy.release_held();
        until_nothing_is_left(server, &root).await;
    }
    for polls in 0..6 {
        let mut request = claim(&format!("order:{polls}"));
        request.enqueue = polls % 2 == 0;
        let _ = poll_n(store.acquire(std::slice::from_ref(&request)), polls).await;
    }
    // Behind all that was sent before.
    let granted = store.acquire(&[claim("last")]).await.remove(0);
    assert!(matches!(granted, Ok(AcquireOutcome::Acquired { .. })), "{granted:?}");
    until_nothing_is_left(server, &root).await;
}

/// A repeated release of the same owner, one of which was dropped at each of its polls.
#[tokio::test]
async fn a_release_may_be_dropped_and_repeated() {
    let (server, root) = EtcdServer::shared();
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
    let server = EtcdServer::start();
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
    // Killed under a lock: the lease is restored from the disk.
    let guard = pool.lock("order:1").ttl(ms(20_000)).acquire().await.unwrap();
    server.kill();
    let error = pool.lock("order:2").wait(ms(100)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    server.restart();
    eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    until_nothing_is_left(&server, "/locks").await;
}
