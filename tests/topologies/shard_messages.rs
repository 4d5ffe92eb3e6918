//! Messages between the processes of a Redis Cluster go to the shard of the lock, and not to every server.

#![allow(clippy::disallowed_methods)]

use std::collections::HashSet;
use std::time::Duration;

use lock_runtime::{ErrorKind, LockPool, Wait};
use lock_tests::prelude::*;
use lock_tests::{RedisCluster, RedisServer, eventually_async};
use tokio::task::{JoinSet, block_in_place};

const SOON: Duration = ms(20_000);
const ROUNDS: u64 = 20;

async fn connect(url: &str) -> LockPool {
    let builder = LockPool::builder(url).ttl(ms(20_000)).wait(Wait::Forever);
    builder.local_handoff_limit(Duration::ZERO).connect().await.unwrap()
}

/// How many messages of one kind all servers have sent to each other.
fn sent(cluster: &RedisCluster, kind: &str) -> u64 {
    let name = format!("cluster_stats_messages_{kind}_sent:");
    let of_node = |node: &RedisServer| {
        let info = node.cli(&["CLUSTER", "INFO"]);
        info.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse::<u64>().ok())
    };
    cluster.nodes().iter().filter_map(of_node).sum()
}

fn shard_channels(node: &RedisServer) -> HashSet<String> {
    let channels = node.cli(&["PUBSUB", "SHARDCHANNELS"]);
    channels.lines().filter(|it| it.starts_with("lock_runtime:")).map(str::to_owned).collect()
}

/// The lock passes between two pools, each time to a queued waiter.
async fn hand_over(node: &RedisServer, pools: &[LockPool; 2], key: &str) {
    let mut last = None;
    for round in 0..ROUNDS as usize {
        let held = pools[round % 2].lock(key).acquire().await.unwrap();
        assert!(held.fence() > last);
        last = held.fence();
        let waiting = tokio::spawn(pools[(round + 1) % 2].lock(key).acquire());
        eventually_async(SOON, "the other is queued", async || {
            let line = node.cli(&["KEYS", &format!("*{key}:lock_runtime:line")]);
            !line.is_empty() && has_contended_mark(&node.cli(&["GET", key]))
        })
        .await;
        held.release().await.unwrap();
        let next = joined("the other", waiting).await.unwrap();
        assert!(next.fence() > last);
        last = next.fence();
        next.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_hand_off_reaches_the_servers_of_one_shard() {
    let cluster = RedisCluster::start();
    let pools = [connect(&cluster.url()).await, connect(&cluster.url()).await];
    for node in cluster.masters() {
        let key = cluster.key_at("k", node);
        let before = (sent(&cluster, "publish"), sent(&cluster, "publishshard"));
        hand_over(node, &pools, &key).await;
        let after = (sent(&cluster, "publish"), sent(&cluster, "publishshard"));
        let (to_all, to_shard) = (after.0 - before.0, after.1 - before.1);
        println!("{ROUNDS} hand-offs: {to_all} messages to all servers, {to_shard} in the shard");
        assert_eq!(to_all, 0);
        // A waiter that polls at the right moment needs no message.
        assert!(
            to_shard >= ROUNDS / 2,
            "the replica receives the messages of the master: {to_shard}"
        );
    }
}

/// One user may not subscribe to shard channels, the other may not publish to them.
#[tokio::test]
async fn users_without_the_right_to_it_reach_each_other_all_the_same() {
    let cluster = RedisCluster::start_with(|config| {
        config
            .config_line("user deaf on >pw ~* &* +@all -ssubscribe")
            .config_line("user dumb on >pw ~* &* +@all -spublish")
    });
    let pools =
        [connect(&cluster.url_of("deaf:pw")).await, connect(&cluster.url_of("dumb:pw")).await];
    let node = cluster.masters()[0];
    let key = cluster.key_at("k", node);
    let before = (sent(&cluster, "publish"), sent(&cluster, "publishshard"));
    hand_over(node, &pools, &key).await;
    assert!(sent(&cluster, "publish") >= before.0 + ROUNDS);
    assert!(sent(&cluster, "publishshard") > before.1, "one of them receives shard messages");
}

/// The server takes the channel away by an unrequested push. It must not be taken for an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_takes_the_channel_along() {
    let cluster = RedisCluster::start();
    let pools = [connect(&cluster.url()).await, connect(&cluster.url()).await];
    let masters = cluster.masters();
    let (from, to) = (masters[0], masters[1]);
    let keys: Vec<_> = (0..4).map(|n| cluster.key_at(&format!("k{n}-"), from)).collect();
    let before = shard_channels(from);
    assert_eq!(before.len(), 2, "one of each pool");

    let mut tasks = JoinSet::new();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    for key in &keys {
        for pool in &pools {
            let (pool, key, stopped) = (pool.clone(), key.clone(), stopped.clone());
            tasks.spawn(async move {
                let (mut last, mut cycles) = (None, 0);
                while !*stopped.borrow() {
                    let guard = pool.lock(key.as_str()).acquire().await.unwrap();
                    assert!(guard.fence() > last, "{key}: {:?} after {last:?}", guard.fence());
                    last = guard.fence();
                    // Unanswered if the connection ends, and never with the answer of another request.
                    if let Err(error) = guard.verify().await {
                        assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
                    }
                    guard.release().await.unwrap();
                    cycles += 1;
                }
                cycles
            });
        }
    }
    for channel in &before {
        block_in_place(|| cluster.begin_move(cluster.slot(channel), to).finish());
    }
    eventually_async(SOON, "each pool has another channel there", async || {
        let now = shard_channels(from);
        now.len() == 2 && now.is_disjoint(&before)
    })
    .await;
    stop.send_replace(true);
    let cycles: Vec<u32> = tasks.join_all().await;
    assert!(cycles.iter().all(|cycles| *cycles > 0), "{cycles:?}");

    // The queue of the key may still have an entry with the channel of an earlier connection.
    eventually_async(SOON, "no message goes to all servers", async || {
        let counted = sent(&cluster, "publish");
        hand_over(from, &pools, &keys[0]).await;
        sent(&cluster, "publish") == counted
    })
    .await;
}
