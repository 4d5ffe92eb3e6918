//! `LockPool::changes` while connections end, and where nothing is reported.

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::quorum::Quorum;
use lock_tests::{RedisCluster, RedisServer, eventually_async};

#[tokio::test]
async fn changes_are_reported_also_behind_the_end_of_a_connection() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).key_prefix("app:").connect().await.unwrap();
    let other = LockPool::builder(server.url()).key_prefix("app:").connect().await.unwrap();
    let mut changes = pool.changes("order:*");
    for key in ["order:1", "order:2"] {
        eventually_async(DEADLINE, "the watch has begun", async || changes.is_reporting()).await;
        within(DEADLINE, "its begin", changes.changed()).await;
        let guard = other.lock(key).renew(false).acquire().await.unwrap();
        within(DEADLINE, "a grant", changes.changed()).await;
        guard.release().await.unwrap();
        within(DEADLINE, "a release", changes.changed()).await;
        server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
        eventually_async(DEADLINE, "the end of the watch", async || !changes.is_reporting()).await;
    }
    eventually_async(DEADLINE, "the watch has begun", async || changes.is_reporting()).await;
    pool.shutdown(ms(0)).await;
    eventually_async(DEADLINE, "the pool is closed", async || !changes.is_reporting()).await;
    other.shutdown(ms(0)).await;
    eventually_async(DEADLINE, "its connections are closed", async || {
        let clients = server.cli(&["CLIENT", "LIST"]);
        !clients.contains("cmd=client|tracking")
    })
    .await;
}

#[tokio::test]
async fn other_keys_are_not_reported() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let mut changes = pool.changes("order:*7");
    within(DEADLINE, "the watch begins", changes.changed()).await;
    server.cli(&["SET", "order:8", "1"]);
    server.cli(&["SET", "stock:7", "1"]);
    server.cli(&["PING"]);
    // A report of the next change would come behind those of the others.
    let mut next = pool.changes("order:*8");
    within(DEADLINE, "another watch begins", next.changed()).await;
    server.cli(&["SET", "order:8", "2"]);
    within(DEADLINE, "its change", next.changed()).await;
    let silent = tokio::time::timeout(ms(100), changes.changed()).await;
    assert!(silent.is_err(), "neither key matches");
    server.cli(&["SET", "order:17", "1"]);
    within(DEADLINE, "a key that matches", changes.changed()).await;
}

#[tokio::test]
async fn a_store_without_reports_is_silent() {
    let user = "user worker on >pw ~* &* +@all -client|tracking";
    let (server, quorum) = (RedisServer::builder().config_line(user).start(), Quorum::start(3));
    let limited = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    for url in ["memory://".to_owned(), limited, quorum.url()] {
        let pool = LockPool::connect(&url).await.unwrap();
        let mut changes = pool.changes("*");
        let guard = pool.lock("order:1").acquire().await.unwrap();
        let reported = tokio::time::timeout(ms(300), changes.changed()).await;
        assert!(reported.is_err() && !changes.is_reporting(), "{url}");
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_master_that_joins_a_cluster_reports_too() {
    let mut cluster = RedisCluster::start();
    let pool = LockPool::connect(&cluster.url()).await.unwrap();
    let mut changes = pool.changes("{7}*");
    within(DEADLINE, "the watch begins", changes.changed()).await;
    cluster.join();
    let new = &cluster.nodes()[6];
    cluster.begin_move(cluster.slot("{7}"), new).finish();
    // The first request learns of the move.
    cycle(&pool, "{7}:a").await;
    let is_watched = async || {
        let clients = new.cli(&["CLIENT", "LIST"]);
        let flags = clients.split_whitespace().filter_map(|it| it.strip_prefix("flags="));
        flags.into_iter().any(|flags| flags.contains('B'))
    };
    eventually_async(DEADLINE, "the new master is watched", is_watched).await;
    eventually_async(DEADLINE, "the watch has begun", async || changes.is_reporting()).await;
    while tokio::time::timeout(ms(100), changes.changed()).await.is_ok() {}
    let guard = pool.lock("{7}:a").acquire().await.unwrap();
    within(DEADLINE, "a grant", changes.changed()).await;
    guard.release().await.unwrap();
}
