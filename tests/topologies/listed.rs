//! The locks that each store of Redis lists.

use lock_runtime::{ErrorKind, LockPool};
use lock_tests::listed::lists_the_locks_that_are_held;
use lock_tests::prelude::*;
use lock_tests::quorum::Quorum;
use lock_tests::{RedisCluster, RedisServer};

#[tokio::test]
async fn memory() {
    lists_the_locks_that_are_held("memory://listed").await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    lists_the_locks_that_are_held(&server.url()).await;
}

#[tokio::test]
async fn a_cluster() {
    let cluster = RedisCluster::start();
    lists_the_locks_that_are_held(&cluster.url()).await;
}

#[tokio::test]
async fn a_quorum() {
    let quorum = Quorum::start(3);
    lists_the_locks_that_are_held(&quorum.url()).await;
    // A value on one of three nodes is no lock.
    let pool = LockPool::connect(&quorum.url()).await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let value = quorum[0].cli(&["GET", "order:1"]);
    quorum[0].cli(&["SET", "order:2", &value, "PX", "60000"]);
    let listed = async || {
        let list = pool.list("order:*", 10).await.unwrap();
        list.keys.iter().map(|key| key.as_str().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, ["order:1"]);
    // The silent node could have another vote for the same owner.
    quorum[2].kill();
    assert_eq!(listed().await, ["order:1", "order:2"]);
    quorum[1].kill();
    assert_eq!(pool.list("*", 10).await.unwrap_err().kind(), ErrorKind::Backend);
    drop(guard);
}

/// Redis has other keys too: neither they nor queues and counters are listed, and no command looks at all of them.
#[tokio::test]
async fn locks_among_other_keys() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let other = patient(server.url(), ms(20_000)).await;
    server.cli(&["DEBUG", "POPULATE", "20000"]);
    server.cli(&["HSET", "redisson", "6f1a:42", "1"]);
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(&server, "order:1", 1).await;
    let list = other.list("*", 10).await.unwrap();
    assert!(list.keys.len() == 1 && list.is_complete, "{list:?}");
    let stats = server.cli(&["INFO", "commandstats"]);
    assert!(stats.contains("cmdstat_scan:") && !stats.contains("cmdstat_keys:"), "{stats}");
    guard.release().await.unwrap();
    joined("the other", waiting).await.1.release().await.unwrap();
}

#[tokio::test]
async fn a_login_without_the_right_to_search_is_told() {
    let user = "user worker on >pw ~* &* +@all -scan";
    let server = RedisServer::builder().config_line(user).start();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    let pool = LockPool::connect(&url).await.unwrap();
    let error = pool.list("*", 10).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert!(error.to_string().to_lowercase().contains("scan"), "{error}");
}

/// Rights that are missing are no empty list.
#[tokio::test]
async fn a_value_that_may_not_be_read_is_an_error() {
    let user = "user worker on >pw ~* &* +@all -getrange";
    let config = RedisServer::builder().config_line(user);
    let quorum = Quorum::of(3, &config);
    let url_of = |server: &RedisServer| format!("redis://worker:pw@127.0.0.1:{}", server.port());
    let url = url_of(&quorum[0]);
    for url in [url, Quorum::url_of(quorum.nodes().iter().map(url_of))] {
        let pool = LockPool::connect(&url).await.unwrap();
        let guard = pool.lock("order:1").acquire().await.unwrap();
        let error = pool.list("order:*", 10).await.unwrap_err();
        assert!(error.is_backend(), "{error}");
        assert!(error.to_string().contains("+scan +getrange"), "{error}");
        guard.release().await.unwrap();
    }
}
