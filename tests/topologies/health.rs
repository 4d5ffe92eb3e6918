//! Warnings of a pool about a store that serves, but could lose locks.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::LockPool;
use lock_tests::logs::Logs;
use lock_tests::server::fit;
use lock_tests::{RedisServer, eventually, eventually_async};

const NOISE: Duration = Duration::from_secs(5);

/// The warnings of `health`; the connect logged them too, unless only `CONFIG` shows them.
async fn warnings(server: &RedisServer) -> Vec<String> {
    let logs = Logs::global();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let health = pool.health().await.unwrap();
    let warnings: Vec<_> = health.warnings.iter().map(ToString::to_string).collect();
    let address = format!("server=\"127.0.0.1:{}\"", server.port());
    let told = warnings.iter().filter(|warning| !warning.contains("appendfsync every")).count();
    let logged = || -> Vec<_> {
        logs.lines_with("the store may lose locks")
            .into_iter()
            .filter(|line| line.contains(&address) && line.contains("WARN lock_runtime"))
            .collect()
    };
    eventually(Duration::from_secs(10), "all warnings are logged", || logged().len() >= told);
    let logged = logged();
    assert_eq!(logged.len(), told, "{logged:#?} {warnings:#?}");
    for warning in &warnings {
        assert!(warning.contains(&format!("Redis at 127.0.0.1:{} ", server.port())), "{warning}");
    }
    warnings
}

fn is_one(warnings: &[String], says: &[&str]) {
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(says.iter().all(|says| warnings[0].contains(says)), "{warnings:#?}");
}

#[tokio::test]
async fn a_fit_server_is_not_warned_of() {
    assert_eq!(warnings(&fit().start()).await, Vec::<String>::new());
    assert!(
        LockPool::connect("memory://").await.unwrap().health().await.unwrap().warnings.is_empty()
    );
}

#[tokio::test]
async fn eviction() {
    let full = fit().arg("maxmemory", "100mb").arg("maxmemory-policy", "volatile-lru").start();
    is_one(
        &warnings(&full).await,
        &["drops locks when its memory is full", "`volatile-lru`", "noeviction"],
    );
    let endless = fit().arg("maxmemory-policy", "allkeys-lfu").start();
    is_one(&warnings(&endless).await, &["would drop locks if", "`allkeys-lfu`"]);
    // Nothing is dropped: writes are refused, which is an error.
    let strict = fit().arg("maxmemory", "100mb").start();
    assert_eq!(warnings(&strict).await, Vec::<String>::new());
}

#[tokio::test]
async fn persistence() {
    // The servers of the harness keep nothing.
    is_one(
        &warnings(&RedisServer::start()).await,
        &["keeps nothing on disk", "appendonly yes", "fences"],
    );
    let snapshots = RedisServer::builder().arg("save", "60 1").start();
    is_one(&warnings(&snapshots).await, &["no append-only file", "last snapshot"]);
    let late =
        RedisServer::builder().arg("appendonly", "yes").arg("appendfsync", "everysec").start();
    is_one(&warnings(&late).await, &["`appendfsync everysec`", "`appendfsync always`"]);
}

#[tokio::test]
async fn a_replica() {
    let master = RedisServer::start();
    let replica = fit().config_line(&format!("replicaof 127.0.0.1 {}", master.port())).start();
    is_one(&warnings(&replica).await, &["is a replica", "point the URL at the master"]);
}

#[tokio::test]
async fn what_changes_later_is_in_the_next_health() {
    let server = fit().start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    assert!(pool.health().await.unwrap().warnings.is_empty());
    server.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-random"]);
    let health = pool.health().await.unwrap();
    assert!(health.warnings[0].to_string().contains("allkeys-random"), "{health:?}");
}

/// There is no warning about invisible settings, and everything works.
#[tokio::test]
async fn a_user_without_diagnostic_permissions() {
    let may =
        "~* &* -@all +set +get +mget +del +pexpire +pttl +time +eval +evalsha +hello +ping +select";
    let server = RedisServer::builder()
        .config_line(&format!("user blind on >secret {may}"))
        .config_line(&format!("user seeing on >secret {may} +info"))
        .start();
    for (user, seen) in [("blind", None), ("seeing", Some("no append-only file"))] {
        let url = format!("redis://{user}:secret@127.0.0.1:{}", server.port());
        let pool = LockPool::connect(&url).await.unwrap();
        let guard = pool.lock("order:7").acquire().await.unwrap();
        guard.release().await.unwrap();
        let warnings = pool.health().await.unwrap().warnings;
        assert_eq!(warnings.len(), usize::from(seen.is_some()), "{warnings:?}");
        for (warning, seen) in warnings.iter().zip(seen) {
            assert!(warning.to_string().contains(seen), "{warning}");
        }
    }
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_not_healthy() {
    let server = RedisServer::start();
    let limit = Duration::from_millis(300);
    let pool = LockPool::builder(server.url()).request_timeout(limit).connect().await.unwrap();
    server.pause();
    let error = tokio::time::timeout(NOISE, pool.health()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("did not answer in time"), "{error}");
    server.resume();
}

#[tokio::test]
async fn a_connect_asks_once() {
    let server = RedisServer::start();
    // The request of the test itself is not in the answer yet.
    server.cli(&["CONFIG", "RESETSTAT"]);
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let stats = server.cli(&["INFO", "commandstats"]);
    assert!(stats.contains("cmdstat_info:calls=1,"), "{stats}");
    assert!(!stats.contains("cmdstat_config|get"), "{stats}");
    // A reconnect logs no warning again.
    server.kill_clients();
    eventually_async(NOISE, "it serves again", async || {
        pool.lock("order:7").wait(Duration::ZERO).acquire().await.is_ok()
    })
    .await;
    let stats = server.cli(&["INFO", "commandstats"]);
    assert!(stats.contains("cmdstat_info:calls=2,"), "one is the test's own: {stats}");
}
