//! Locks of each store of Redis that are taken from their holders.

use lock_runtime::{ErrorKind, LockPool};
use lock_tests::forced::is_taken_from_its_holder;
use lock_tests::prelude::*;
use lock_tests::quorum::Quorum;
use lock_tests::sentinel::Watched;
use lock_tests::{RedisCluster, RedisServer, eventually_async};

#[tokio::test]
async fn memory() {
    is_taken_from_its_holder("memory://forced").await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    is_taken_from_its_holder(&server.url()).await;
    let left = server.cli(&["KEYS", "*"]);
    assert!(!left.contains("order"), "{left}");
}

#[tokio::test]
async fn a_cluster() {
    let cluster = RedisCluster::start();
    is_taken_from_its_holder(&cluster.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_behind_sentinels() {
    let watched = Watched::start().without_failover();
    is_taken_from_its_holder(&watched.url()).await;
}

#[tokio::test]
async fn a_quorum() {
    let quorum = Quorum::start(3);
    is_taken_from_its_holder(&quorum.url()).await;
}

/// A renewal restores a vote that its node has lost, so a lock without a number cannot be free before its ttl is over.
#[tokio::test]
async fn a_quorum_keeps_a_lock_without_a_fence_until_its_ttl_is_over() {
    let quorum = Quorum::start(3);
    let ttl = ms(3_000);
    let [pool, admin] = [patient(quorum.url(), ttl).await, patient(quorum.url(), ttl).await];
    let guard = pool.lock("order:1").fencing(false).acquire().await.unwrap();
    let holder = admin.inspect("order:1").await.unwrap().holder.unwrap();
    assert!(admin.force_release("order:1", &holder).await.unwrap());
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    let next = within(DEADLINE, "it is free", admin.lock("order:1").acquire()).await.unwrap();
    next.verify().await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test]
async fn redis_without_scripts() {
    let server = RedisServer::start();
    let url = format!("{}?scripts=off", server.url());
    let [pool, admin] = [patient(&url, ms(3_000)).await, patient(&url, ms(3_000)).await];
    let guard = pool.lock("order:1").fencing(false).acquire().await.unwrap();
    let holder = admin.inspect("order:1").await.unwrap().holder.unwrap();
    assert!(admin.force_release("order:1", &holder).await.unwrap());
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    let next = admin.lock("order:1").fencing(false).acquire().await.unwrap();
    assert!(!pool.force_release("order:1", &holder).await.unwrap());
    next.verify().await.unwrap();
}

/// Its waiters would be taken from the queue and not notified.
#[tokio::test]
async fn a_login_without_channels_leaves_a_lock_with_waiters() {
    let server =
        RedisServer::builder().config_line("user worker on >pw ~* resetchannels +@all").start();
    let pool = patient(server.url(), ms(20_000)).await;
    let other = patient(server.url(), ms(20_000)).await;
    let restricted = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    let restricted = patient(&restricted, ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    eventually_async(DEADLINE, "it waits", async || {
        other.inspect("order:1").await.unwrap().waiting == Some(1)
    })
    .await;
    let holder = restricted.inspect("order:1").await.unwrap().holder.unwrap();
    let error = restricted.force_release("order:1", &holder).await.unwrap_err();
    assert!(error.to_string().contains("lock_runtime:*"), "{error}");
    assert_eq!(other.inspect("order:1").await.unwrap().waiting, Some(1));
    guard.release().await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

/// The other key ends with the lease.
#[tokio::test]
async fn one_key_of_two() {
    let server = RedisServer::start();
    let [pool, admin] =
        [patient(server.url(), ms(3_000)).await, patient(server.url(), ms(3_000)).await];
    let guard = pool.lock_all(["order:1", "order:2"]).acquire().await.unwrap();
    let holder = admin.inspect("order:1").await.unwrap().holder.unwrap();
    assert!(admin.force_release("order:1", &holder).await.unwrap());
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    drop(guard);
    eventually_async(DEADLINE, "both are free", async || {
        admin.inspect("order:2").await.unwrap().is_free()
    })
    .await;
}

#[tokio::test]
async fn a_client_of_another_library_keeps_its_lock() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    server.cli(&["SET", "order:1", "worker-7", "PX", "60000"]);
    let holder = pool.inspect("order:1").await.unwrap().holder.unwrap();
    let error = pool.force_release("order:1", &holder).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("another library"), "{error}");
    assert_eq!(server.cli(&["GET", "order:1"]), "worker-7");
}

/// The next call of this process would take the lease without a request.
#[tokio::test]
async fn a_lock_that_lingers_in_this_process() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let other = LockPool::connect(&server.url()).await.unwrap();
    let guard = pool.lock("order:1").linger(DEADLINE).acquire().await.unwrap();
    guard.release().await.unwrap();
    let holder = pool.inspect("order:1").await.unwrap().holder.expect("it lingers");
    assert!(pool.force_release("order:1", &holder).await.unwrap());
    let next = other.lock("order:1").acquire().await.unwrap();
    assert!(pool.lock("order:1").try_acquire().await.unwrap().is_none());
    next.verify().await.unwrap();
    next.release().await.unwrap();
}
