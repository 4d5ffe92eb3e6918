//! A `redis://` endpoint that refuses scripts with keys of several slots: Redis Enterprise, the clustered tiers of
//! Azure, ElastiCache Serverless, a Redis Cluster of one server.

#![allow(clippy::disallowed_methods)]

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Duration;

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, Fence, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, named};
use lock_tests::{FaultProxy, RedisCluster, RedisServer, eventually_async};

const SOON: Duration = ms(10_000);
const LONG: Duration = ms(60_000);
const KEY: &str = "order:7";

fn endpoint() -> RedisServer {
    RedisCluster::of_one(RedisServer::builder())
}

fn as_cluster(server: &RedisServer) -> String {
    server.url().replace("redis://", "redis+cluster://")
}

async fn fence(pool: &LockPool, key: &str) -> Fence {
    let guard = pool.lock(key).acquire().await.unwrap();
    let fence = guard.fence().unwrap();
    guard.release().await.unwrap();
    fence
}

/// The auxiliary keys of the server.
fn beside(server: &RedisServer) -> Vec<String> {
    let keys = server.cli(&["KEYS", "*lock_runtime:*"]);
    keys.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
}

#[tokio::test]
async fn it_conforms() {
    let server = endpoint();
    conformance(
        open_backend(&server.url()).await.unwrap(),
        open_backend(&server.url()).await.unwrap(),
    )
    .await;
}

#[tokio::test]
async fn a_lock_has_a_fence_and_is_kept_for_its_min_hold() {
    let server = endpoint();
    let pool = patient(server.url(), LONG).await;
    let mut last = None;
    for n in 0..20 {
        let fence = fence(&pool, &format!("k{}", n % 3)).await;
        assert!(
            Some(fence) > last,
            "fences of one slot grow, and those of others begin at the time"
        );
        last = Some(fence);
    }
    let guard = pool.lock(KEY).min_hold(LONG).acquire().await.unwrap();
    guard.release().await.unwrap();
    let left: i64 = server.cli(&["PTTL", KEY]).parse().unwrap();
    assert!(left > 40_000, "{left}");
    assert!(pool.lock(KEY).try_acquire().await.unwrap().is_none());
}

#[tokio::test]
async fn waiters_share_a_queue_with_cluster_clients_of_the_same_server() {
    let server = endpoint();
    let pools = [patient(server.url(), LONG).await, patient(as_cluster(&server), LONG).await];
    let mut last = None;
    for n in 0..6 {
        let (holder, waiter) = (&pools[n % 2], &pools[(n + 1) % 2]);
        let held = holder.lock(KEY).acquire().await.unwrap();
        assert!(held.fence() > last, "one counter for both");
        last = held.fence();
        let waiting = tokio::spawn(waiter.lock(KEY).acquire());
        eventually_async(SOON, "the waiter is queued", async || {
            beside(&server).iter().any(|key| {
                key.ends_with("}order:7:lock_runtime:line") && server.cli(&["ZCARD", key]) == "1"
            })
        })
        .await;
        held.release().await.unwrap();
        let next = joined("the waiter", waiting).await.unwrap();
        assert!(next.fence() > last);
        last = next.fence();
        next.release().await.unwrap();
    }
    let counters = beside(&server);
    assert!(counters.iter().all(|key| key.starts_with('{')), "{counters:?}");
}

#[tokio::test]
async fn several_keys_share_a_slot_or_the_error_says_so() {
    let server = endpoint();
    let pool = patient(server.url(), LONG).await;
    let guard = pool.lock_all(["order:{7}", "stock:{7}"]).acquire().await.unwrap();
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    for fencing in [true, false] {
        let request = pool.lock_all(["order:7", "stock:7"]).fencing(fencing).wait(SOON);
        let error = request.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        let text = error.to_string();
        assert!(text.contains("share a slot") && text.contains("`order:{<id>}`"), "{text}");
    }
    assert_eq!(server.cli(&["EXISTS", "order:7"]), "0", "nothing is left behind");
}

#[tokio::test]
async fn many_leases_in_many_slots_are_renewed() {
    let server = endpoint();
    let pool = patient(server.url(), ms(20_000)).await;
    let mut guards = Vec::new();
    for n in 0..50 {
        guards.push(pool.lock(format!("k{n}")).renew(ms(500)).acquire().await.unwrap());
    }
    let renewed = async || server.calls("pexpire") > 100;
    eventually_async(LONG, "each is renewed twice", renewed).await;
    until_renewed(&guards).await;
    for guard in guards {
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn it_begins_to_check_slots_as_it_is_restarted() {
    let server = RedisServer::start();
    let url = server.url();
    let pool = patient(&url, LONG).await;
    let before = fence(&pool, KEY).await;
    assert_eq!(beside(&server), ["lock_runtime:fence"]);

    let path = server.dir().join("redis.conf");
    let mut config = OpenOptions::new().append(true).open(path).unwrap();
    let port = lock_tests::server::another_port();
    writeln!(config, "cluster-enabled yes\ncluster-port {port}").unwrap();
    server.restart();
    RedisCluster::give_all_slots_to(&server);
    eventually_async(SOON, "the pool is connected again", async || pool.health().await.is_ok())
        .await;

    let held = pool.lock(KEY).acquire().await.unwrap();
    assert!(held.fence() > Some(before));
    held.verify().await.unwrap();
    held.release().await.unwrap();
    let names = beside(&server);
    assert!(!names.is_empty() && names.iter().all(|key| key.starts_with('{')), "{names:?}");
    let newcomer = patient(&url, LONG).await;
    assert!(fence(&newcomer, KEY).await > before);
    assert_eq!(beside(&server), names, "both pools have the same names");
}

/// Without a reconnect the first refusal shows it, and the refused request is sent again.
#[tokio::test]
async fn it_begins_to_check_slots_under_way() {
    const REFUSAL: &[u8] = b"-CROSSSLOT Keys in request don't hash to the same slot\r\n";
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::builder(proxy.url()).ttl(ms(3_000)).connect().await.unwrap();
    let mut guards = Vec::new();
    for n in 0..3 {
        guards.push(pool.lock(format!("k{n}")).acquire().await.unwrap());
    }
    let first = fence(&pool, KEY).await;
    assert_eq!(beside(&server), ["lock_runtime:fence"]);
    // For any request, also a renewal of all three.
    let trap = proxy.on_next(named("EVALSHA"), Action::AnswerWith(REFUSAL));
    let began = std::time::Instant::now();
    eventually_async(SOON, "a script is refused", async || trap.sprung()).await;
    eventually_async(SOON, "its answer has come, and the names are tagged", async || {
        assert!(fence(&pool, KEY).await > first);
        beside(&server).iter().any(|key| key.starts_with('{'))
    })
    .await;
    println!("tagged names {:?} after the trap was set", began.elapsed());
    for guard in guards {
        guard.verify().await.unwrap();
        guard.release().await.unwrap();
    }
}
