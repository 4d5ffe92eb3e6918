//! `?replicas=n`: a grant is valid only if n replicas have it.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::prelude::*;
use lock_tests::sentinel::FakeSentinel;
use lock_tests::{Monitor, RedisServer, eventually_async};

const KEY: &str = "order:7";
const NOISE: Duration = Duration::from_secs(20);

/// A master and its replicas, in sync.
async fn servers(replicas: usize) -> (RedisServer, Vec<RedisServer>) {
    let master = RedisServer::builder().arg("repl-diskless-sync-delay", "0").start();
    let follow = format!("replicaof 127.0.0.1 {}", master.port());
    let replicas: Vec<_> =
        (0..replicas).map(|_| RedisServer::builder().config_line(&follow).start()).collect();
    // A master that never had a replica counts no writes, and then takes a loading replica for one that is in sync.
    eventually_async(ms(30_000), "the replicas are in step", async || {
        let info = master.cli(&["INFO", "replication"]);
        if info.matches("state=online").count() < replicas.len() {
            return false;
        }
        master.cli(&["SET", "nothing", "x", "PX", "1"]);
        master.cli(&["WAIT", &replicas.len().to_string(), "100"]) == replicas.len().to_string()
    })
    .await;
    (master, replicas)
}

async fn pool(server: &RedisServer, replicas: usize) -> LockPool {
    LockPool::connect(&format!("{}?replicas={replicas}", server.url())).await.unwrap()
}

/// The first error of an acquire that contains `text`. On a busy machine the last request of a wait may be without an answer.
async fn refused_with(pool: &LockPool, text: &str) -> String {
    let mut error = String::new();
    let refused = async || {
        let refusal = pool.lock(KEY).wait(ms(1_500)).acquire().await.unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::Backend, "{refusal}");
        error = refusal.to_string();
        error.contains(text)
    };
    eventually_async(NOISE, text, refused).await;
    error
}

async fn is_free(server: &RedisServer) {
    let free = async || server.cli(&["EXISTS", KEY, &format!("{KEY}:lock_runtime:line")]) == "0";
    eventually_async(NOISE, "the key is free", free).await;
}

#[tokio::test]
async fn a_replica_has_what_is_granted() {
    let (master, replicas) = servers(1).await;
    let pool = pool(&master, 1).await;
    for fencing in [true, false] {
        for _ in 0..50 {
            let request = pool.lock(KEY).fencing(fencing);
            let guard = request.acquire().await.unwrap();
            // At once, without a request to the master.
            assert_eq!(replicas[0].cli(&["EXISTS", KEY]), "1");
            guard.release().await.unwrap();
        }
    }
    let all = pool.lock_all(["a", "b"]).acquire().await.unwrap();
    assert_eq!(replicas[0].cli(&["EXISTS", "a", "b"]), "2");
    all.release().await.unwrap();
}

#[tokio::test]
async fn it_conforms() {
    let (master, _replicas) = servers(1).await;
    let url = format!("{}?replicas=1", master.url());
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn a_replica_that_hangs() {
    let (master, replicas) = servers(1).await;
    let pool = pool(&master, 1).await;
    replicas[0].pause();
    let text = refused_with(&pool, "0 of the 1 replicas").await;
    assert!(text.contains("INFO replication"), "{text}");
    is_free(&master).await;
    // Existing holders continue: renewals do not wait.
    replicas[0].resume();
    let ttl = ms(2_000);
    let guard = pool.lock(KEY).ttl(ttl).wait(NOISE).acquire().await.unwrap();
    replicas[0].pause();
    tokio::time::timeout(ttl * 3 / 2, guard.lost()).await.unwrap_err();
    guard.release().await.unwrap();
    // The replicas return during a wait.
    let waiting = tokio::spawn(pool.lock(KEY).wait(ms(20_000)).acquire());
    eventually_async(NOISE, "it sends a request", async || master.cli(&["EXISTS", KEY]) == "1")
        .await;
    replicas[0].resume();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    is_free(&master).await;
}

#[tokio::test]
async fn fewer_than_wanted() {
    let (master, _replicas) = servers(1).await;
    refused_with(&pool(&master, 2).await, "1 of the 2 replicas").await;
    is_free(&master).await;
    let alone = RedisServer::start();
    refused_with(&pool(&alone, 1).await, "0 of the 1 replicas").await;
    is_free(&alone).await;
}

/// The caller leaves at any moment: nothing remains.
#[tokio::test]
async fn a_caller_that_gives_up() {
    let (master, replicas) = servers(1).await;
    let pool = pool(&master, 1).await;
    replicas[0].pause();
    for limit in [0, 1, 2, 5, 20, 100, 300] {
        let request = pool.lock(KEY).wait(ms(5_000));
        tokio::time::timeout(ms(limit), request.acquire()).await.unwrap_err();
    }
    is_free(&master).await;
    replicas[0].resume();
    let guard = pool.lock(KEY).acquire().await.unwrap();
    assert_eq!(replicas[0].cli(&["EXISTS", KEY]), "1");
    guard.release().await.unwrap();
    is_free(&master).await;
}

/// One `WAIT` covers all requests that came meanwhile, and delays nothing else.
#[tokio::test]
async fn many_at_once_share_the_wait() {
    const MANY: usize = 200;
    let (master, replicas) = servers(1).await;
    // One `WAIT` then lasts half a minute, unless it is answered.
    let builder = LockPool::builder(format!("{}?replicas=1", master.url())).ttl(3 * NOISE);
    let pool = builder.request_timeout(15 * NOISE).connect().await.unwrap();
    pool.lock(KEY).acquire().await.unwrap().release().await.unwrap();
    let monitor = Monitor::start(&master);
    replicas[0].pause();
    let request = |n: usize| pool.lock(format!("key:{n}")).wait(3 * NOISE).acquire();
    let asked: Vec<_> = (0..MANY).map(|n| tokio::spawn(request(n))).collect();
    eventually_async(NOISE, "all have sent a request", async || {
        master.cli(&["DBSIZE"]).parse::<usize>().unwrap() >= MANY
    })
    .await;
    // The other connection is free.
    within(NOISE, "an answer beside the `WAIT`", pool.health()).await.unwrap();
    assert!(asked.iter().all(|asked| !asked.is_finished()), "no grant is confirmed");
    replicas[0].resume();
    for asked in asked {
        asked.await.unwrap().unwrap().release().await.unwrap();
    }
    let waits = monitor.settled().iter().filter(|ran| ran.name() == "WAIT").count();
    assert!((1..MANY / 4).contains(&waits), "{waits}");
}

/// The two connections may be to two servers for a moment: the master and the former master.
#[tokio::test]
async fn what_another_server_has_does_not_count() {
    let (old, _old_replicas) = servers(1).await;
    let (new, new_replicas) = servers(1).await;
    let fake = FakeSentinel::start(&old);
    let url = format!("{}?replicas=1", FakeSentinel::url(&[&fake]));
    let pool = LockPool::connect(&url).await.unwrap();
    pool.lock(KEY).acquire().await.unwrap().release().await.unwrap();
    fake.say(&new, 1);
    eventually_async(NOISE, "locks are in the new one and its replica", async || {
        let Ok(guard) = pool.lock(KEY).wait(ms(200)).acquire().await else { return false };
        let there = new_replicas[0].cli(&["EXISTS", KEY]) == "1";
        assert!(there || old.cli(&["EXISTS", KEY]) == "1", "a grant that is nowhere");
        let _ = guard.release().await;
        there
    })
    .await;
}

#[tokio::test]
async fn a_user_without_wait_is_rejected_at_connect() {
    let user = "user worker on >secret ~* &* +@all -wait";
    let server = RedisServer::builder().config_line(user).start();
    let url = format!("redis://worker:secret@127.0.0.1:{}", server.port());
    LockPool::connect(&url).await.unwrap();
    let error = LockPool::connect(&format!("{url}?replicas=1")).await.unwrap_err();
    assert!(error.to_string().contains("+wait"), "{error}");
}
