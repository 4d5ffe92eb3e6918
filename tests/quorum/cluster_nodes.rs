//! Redis Clusters as nodes of a quorum: the server of the slot casts the vote of a lock.

#![allow(clippy::disallowed_methods)]

use std::time::{Duration, Instant};

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::prelude::*;
use lock_tests::quorum::says_busy;
use lock_tests::{Quorum, RedisCluster, RedisServer, eventually_async};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::quorum::refusal;

const TTL: Duration = ms(2_000);
const DEADLINE: Duration = ms(10_000);

/// A cluster and two servers. Without one of the servers the cluster is in every majority.
struct Mixed {
    cluster: RedisCluster,
    servers: Quorum,
}

impl Mixed {
    fn start() -> Self {
        Self { cluster: RedisCluster::start(), servers: Quorum::start(2) }
    }

    /// Of servers that stay masters even if one of them gets no time for a while.
    fn start_without_failover() -> Self {
        let mixed = Self::start();
        for node in mixed.cluster.nodes() {
            node.cli(&["CONFIG", "SET", "cluster-node-timeout", "30000"]);
        }
        mixed
    }

    fn url(&self) -> String {
        let servers = self.servers.nodes().iter().map(RedisServer::url);
        Quorum::url_of([self.cluster.url()].into_iter().chain(servers))
    }

    async fn connect(&self) -> LockPool {
        LockPool::builder(self.url()).ttl(TTL).wait(DEADLINE).connect().await.unwrap()
    }

    /// The port of the cluster master that has `key`.
    fn holder(&self, key: &str) -> Option<u16> {
        let has = |node: &&&RedisServer| node.cli(&["KEYS", key]) == key;
        self.cluster.masters().iter().find(has).map(|node| node.port())
    }
}

#[tokio::test]
async fn it_conforms() {
    let mixed = Mixed::start_without_failover();
    let url = mixed.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn a_cluster_votes_where_the_slot_of_the_lock_is() {
    let mixed = Mixed::start_without_failover();
    let (pool, rival) = (mixed.connect().await, mixed.connect().await);
    mixed.servers[0].kill();
    for node in mixed.cluster.masters() {
        let key = &*mixed.cluster.key_at("order", node);
        let first = cycle(&pool, key).await.unwrap();
        let guard = pool.lock(key).acquire().await.unwrap();
        assert!(guard.fence().unwrap() > first);
        assert_eq!(mixed.holder(key), Some(node.port()));
        eventually_async(DEADLINE, "it is busy", async || says_busy(rival.lock(key)).await).await;
        // Woken by two of three nodes; the cluster is one of them.
        let waiting = tokio::spawn(rival.lock(key).acquire());
        guard.release().await.unwrap();
        let next = timeout(DEADLINE, waiting).await.unwrap().unwrap().unwrap();
        assert!(next.fence().unwrap() > first);
        next.release().await.unwrap();
        // One ballot log for each slot.
        eventually_async(DEADLINE, "all votes are taken back", async || {
            node.cli(&["KEYS", "*"]).lines().all(|key| key.ends_with("}lock_runtime:ballots"))
        })
        .await;
    }
}

/// Votes of one node that come from several servers.
#[tokio::test]
async fn a_frozen_master_takes_no_votes_of_other_locks_along() {
    let mixed = Mixed::start_without_failover();
    let pool = LockPool::builder(mixed.url()).ttl(TTL).wait(DEADLINE).connect().await.unwrap();
    let masters = mixed.cluster.masters();
    let [freezes, stays] = [masters[0], masters[1]];
    let renewed = |key: String| pool.lock(key).ttl(10 * TTL).renew(ms(500)).acquire();
    let mut acquiring = JoinSet::new();
    for n in 0..5 {
        acquiring.spawn(renewed(mixed.cluster.key_at(&format!("its:{n}"), freezes)));
    }
    let its = acquiring.join_all().await;
    assert!(its.iter().all(Result::is_ok));
    let other = renewed(mixed.cluster.key_at("other", stays)).await.unwrap();
    let beside = &*mixed.cluster.key_at("beside", freezes);
    let wanted = &*mixed.cluster.key_at("wanted", stays);
    mixed.servers[0].kill();
    freezes.pause();
    // Renewals of all are sent meanwhile.
    let held_for = Instant::now();
    while held_for.elapsed() < TTL * 3 / 2 {
        let beside = pool.lock(beside).wait(ms(100)).acquire();
        let (beside, wanted) = tokio::join!(beside, pool.lock(wanted).acquire());
        assert!(beside.is_err());
        wanted.unwrap().release().await.unwrap();
        assert!(other.is_held());
    }
    until_renewed(std::slice::from_ref(&other)).await;
    freezes.resume();
    other.release().await.unwrap();
}

#[tokio::test]
async fn a_lock_is_held_and_freed_while_its_slot_is_divided() {
    const KEY: &str = "{7}:a";
    for book_first in [false, true] {
        let mixed = Mixed::start_without_failover();
        let pool = mixed.connect().await;
        let cluster = &mixed.cluster;
        // Both other nodes have to confirm each renewal, and one of them may be late on a busy machine.
        let guard = pool.lock(KEY).ttl(10 * TTL).renew(ms(500)).acquire().await.unwrap();
        let slot = cluster.slot(KEY);
        let from = cluster.owner(slot);
        let to = cluster.masters().into_iter().find(|node| node.port() != from.port()).unwrap();
        let book = from.cli(&["KEYS", "*lock_runtime:ballots"]);
        let step = cluster.begin_move(slot, to);
        step.migrate(if book_first { &book } else { KEY });
        mixed.servers[0].kill();
        until_renewed(std::slice::from_ref(&guard)).await;
        eventually_async(DEADLINE, "it is verified", async || match guard.verify().await {
            Ok(()) => true,
            Err(error) => {
                assert!(error.is_backend(), "{error}");
                false
            }
        })
        .await;
        guard.release().await.unwrap();
        step.finish();
        cycle(&pool, KEY).await;
    }
}

/// Long before any of the leases is renewed by its timer.
#[tokio::test]
async fn masters_that_are_emptied_one_after_the_other_are_taken_again() {
    let mixed = Mixed::start_without_failover();
    let pool = LockPool::builder(mixed.url()).ttl(ms(90_000)).connect().await.unwrap();
    let masters = mixed.cluster.masters();
    let keys: Vec<_> = masters.iter().map(|node| mixed.cluster.key_at("k", node)).collect();
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(pool.lock(&**key).acquire().await.unwrap());
        eventually_async(DEADLINE, "all nodes have it", async || mixed.holder(key).is_some()).await;
    }
    for node in masters {
        assert_eq!(node.cli(&["FLUSHALL"]), "OK");
    }
    for key in &keys {
        eventually_async(DEADLINE, "it is taken again", async || mixed.holder(key).is_some()).await;
    }
}

#[tokio::test]
async fn a_lock_is_held_while_its_slot_moves() {
    const KEY: &str = "{7}:a";
    let mixed = Mixed::start_without_failover();
    let (pool, rival) = (mixed.connect().await, mixed.connect().await);
    mixed.servers[0].kill();
    let guard = pool.lock(KEY).acquire().await.unwrap();
    let cluster = &mixed.cluster;
    let slot = cluster.slot(KEY);
    let from = cluster.owner(slot).port();
    let to = cluster.masters().into_iter().find(|node| node.port() != from).unwrap();
    cluster.begin_move(slot, to).finish();
    assert_eq!(mixed.holder(KEY), Some(to.port()));
    let fence = guard.fence().unwrap();
    let left = || to.cli(&["PTTL", KEY]).parse::<i64>().unwrap();
    let moved = left();
    eventually_async(DEADLINE, "it is renewed where it is now", async || left() > moved).await;
    guard.verify().await.unwrap();
    eventually_async(DEADLINE, "the rival has found it, too", async || {
        says_busy(rival.lock(KEY)).await
    })
    .await;
    guard.release().await.unwrap();
    assert!(cycle(&rival, KEY).await.unwrap() > fence);
}

/// The node fails for the locks of that master, and for no others.
#[tokio::test]
async fn a_master_of_the_cluster_dies() {
    let mixed = Mixed::start();
    let pool = mixed.connect().await;
    let masters = mixed.cluster.masters();
    let [dies, stays] = [masters[0], masters[1]];
    let its = mixed.cluster.key_at("its", dies);
    let other = mixed.cluster.key_at("other", stays);
    let before = cycle(&pool, &its).await.unwrap();
    mixed.cluster.until_replicated(dies);
    dies.kill();
    // The other nodes are a majority.
    let between = cycle(&pool, &its).await.unwrap();
    assert!(between > before);
    mixed.servers[0].kill();
    cycle(&pool, &other).await;
    // Until there is another master, the votes of this one are missing.
    mixed.cluster.until_serving();
    assert!(cycle(&pool, &its).await.unwrap() > between);
}

#[tokio::test]
async fn a_cluster_that_is_away_is_taken_in_later() {
    let mixed = Mixed::start();
    mixed.cluster.nodes().iter().for_each(RedisServer::kill);
    let pool = mixed.connect().await;
    let guard = pool.lock("k").acquire().await.unwrap();
    let warnings = pool.health().await.unwrap().warnings;
    let text = format!("{warnings:?}");
    assert!(text.contains("the cluster of 127.0.0.1"), "{text}");
    for node in mixed.cluster.nodes() {
        node.restart();
    }
    mixed.cluster.until_serving();
    eventually_async(DEADLINE, "a renewal takes the lock there, too", async || {
        mixed.holder("k").is_some()
    })
    .await;
    mixed.servers[1].kill();
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    cycle(&pool, "k").await;
}

#[tokio::test]
async fn locks_of_several_slots_have_no_vote_of_a_cluster() {
    let mixed = Mixed::start();
    let pool = mixed.connect().await;
    let keys = ["a", "b"];
    pool.lock_all(keys).acquire().await.unwrap().release().await.unwrap();
    mixed.servers[0].kill();
    let error = pool.lock_all(keys).wait(ms(300)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert!(error.to_string().contains("`a` and `b` are in different slots"), "{error}");
    pool.lock_all(["{x}:a", "{x}:b"]).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_cluster_under_two_names_is_one_node() {
    let cluster = RedisCluster::start();
    let server = RedisServer::start();
    let [one, other] =
        [0, 1].map(|at| format!("redis+cluster://127.0.0.1:{}", cluster.nodes()[at].port()));
    let url = Quorum::url_of([one, other, server.url()].into_iter());
    let text = refusal(&url).await;
    assert!(text.contains("are the same server"), "{text}");
    // Found by the server names in its slot map, so that a dead server hides nothing.
    let named =
        |node: &&&RedisServer| cluster.nodes()[..2].iter().any(|it| it.port() == node.port());
    cluster.masters().iter().find(|node| !named(node)).unwrap().kill();
    let text = refusal(&url).await;
    assert!(text.contains("are the same server"), "{text}");
}

#[tokio::test]
async fn a_part_of_a_cluster_is_no_node() {
    let cluster = RedisCluster::start();
    let servers = Quorum::start(2);
    let others = || servers.nodes().iter().map(RedisServer::url);
    // Masters and replicas.
    for part in cluster.nodes() {
        let url = Quorum::url_of([part.url()].into_iter().chain(others()));
        let text = refusal(&url).await;
        assert!(text.contains("is a part of a Redis Cluster"), "{text}");
        assert!(text.contains("`redis+cluster://host`"), "{text}");
    }
    // A later change is detected, too.
    cluster.nodes().iter().for_each(RedisServer::kill);
    let url = Quorum::url_of([cluster.nodes()[0].url()].into_iter().chain(others()));
    let pool = LockPool::connect(&url).await.unwrap();
    cluster.nodes()[0].restart();
    eventually_async(DEADLINE, "the pool warns of it", async || {
        let warnings = pool.health().await.unwrap().warnings;
        format!("{warnings:?}").contains("is a part of a Redis Cluster")
    })
    .await;
}
