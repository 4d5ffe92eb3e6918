//! Locks pass between pools in FIFO order, by notifications.

#![allow(clippy::disallowed_methods)]

use std::path::Path;
use std::time::Instant;

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::{FaultProxy, Latency, Worker, ZooKeeperServer, eventually_async};

use super::conformance::{until_nothing_is_left, until_queued};

#[tokio::test]
async fn waiters_of_several_pools_are_served_in_fifo_order() {
    let (server, root) = ZooKeeperServer::shared();
    let mut pools = Vec::new();
    for _ in 0..5 {
        pools.push(patient(server.url_of(&root), ms(20_000)).await);
    }
    let guard = pools[0].lock("order:1").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for (n, pool) in pools.iter().skip(1).enumerate() {
        waiting.push(acquire_in_task(pool, "order:1"));
        until_queued(server, &root, "order:1", n + 2).await;
    }
    guard.release().await.unwrap();
    for (n, waiter) in waiting.into_iter().enumerate() {
        // A waiter out of order would hold the key now, and this one would wait.
        joined(format!("waiter {n}"), waiter).await.1.release().await.unwrap();
    }
    until_nothing_is_left(server, &root).await;
}

/// With this recheck interval a lost notification would cost more than a second at each change.
#[tokio::test]
async fn hand_offs_between_pools_take_notifications_and_no_looks() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let [one, other] = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    let took = hand_off_time([one, other], "order:1", 40).await;
    assert!(took < NOISE, "{took:?}");
}

#[tokio::test]
async fn a_waiter_that_gives_up_leaves_the_queue() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let pools = [
        patient(&url, ms(20_000)).await,
        patient(&url, ms(20_000)).await,
        patient(&url, ms(20_000)).await,
    ];
    let guard = pools[0].lock("order:1").acquire().await.unwrap();
    let leaving = acquire_in_task(&pools[1], "order:1");
    until_queued(server, &root, "order:1", 2).await;
    let waiting = acquire_in_task(&pools[2], "order:1");
    until_queued(server, &root, "order:1", 3).await;
    leaving.abort();
    until_queued(server, &root, "order:1", 2).await;
    assert!(!waiting.is_finished());
    guard.release().await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

fn start_waiter(url: &str, dir: &Path, name: &str) -> Worker {
    Worker::start(env!("CARGO_BIN_EXE_waiter"), &[url, dir.to_str().unwrap(), name, "1000"])
}

/// A holder and waiters behind it are killed: their sessions end together.
#[tokio::test]
async fn killed_holders_and_waiters_are_skipped_at_the_end_of_their_sessions() {
    let (server, root) = ZooKeeperServer::shared();
    let (url, dir) = (server.url_of(&root), tempfile::tempdir().unwrap());
    let workers: Vec<_> =
        (0..3).map(|n| start_waiter(&url, dir.path(), &format!("killed-{n}"))).collect();
    for (n, worker) in workers.iter().enumerate() {
        worker.send_line("lock");
        until_queued(server, &root, "k", n + 1).await;
    }
    let pool = patient(&url, ms(20_000)).await;
    let waiting = acquire_in_task(&pool, "k");
    until_queued(server, &root, "k", 4).await;
    let killed = Instant::now();
    for worker in &workers {
        worker.kill();
    }
    let (acquired, guard) = joined("the waiter that lives", waiting).await;
    let took = acquired.saturating_duration_since(killed);
    println!("free after {took:?}");
    // The ttl is a second. The session of each ends four seconds after its last sign of life, and not one after the other.
    assert!(took > ms(1_000) && took < ms(5_000) + NOISE, "{took:?}");
    guard.release().await.unwrap();
}

/// Watches end with the connection, so their notifications are missed.
#[tokio::test]
async fn a_waiter_with_a_cut_connection_is_served() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let one = patient(server.url_of(&root), ms(20_000)).await;
    let other = patient(lock_tests::zookeeper::url_at(proxy.port(), &root), ms(20_000)).await;
    let mut took = Latency::below(ms(1_000) + NOISE, 5);
    while took.wants_more() {
        let guard = one.lock("order:1").acquire().await.unwrap();
        let waiting = acquire_in_task(&other, "order:1");
        until_queued(server, &root, "order:1", 2).await;
        proxy.refuse(true);
        proxy.cut();
        eventually_async(DEADLINE, "it is cut", async || proxy.open_connections() == 0).await;
        release(guard).await;
        let reachable = Instant::now();
        proxy.refuse(false);
        let (acquired, guard) = joined("the waiter", waiting).await;
        took.push(acquired.saturating_duration_since(reachable));
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn several_tasks_and_keys_share_a_session() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let [one, other] = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..100 {
        let pool = if n % 2 == 0 { one.clone() } else { other.clone() };
        tasks.spawn(async move {
            for round in 0..4 {
                cycle(&pool, &format!("order:{}", (n + round) % 30)).await;
            }
        });
    }
    within(DEADLINE, "all cycles", tasks.join_all()).await;
    until_nothing_is_left(server, &root).await;
}

/// Another client deletes the node: the holder hears of it without a renewal, and a waiter has the key.
#[tokio::test]
async fn the_loss_of_a_deleted_node_is_told_at_once() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let [pool, other] = [patient(&url, ms(30_000)).await, patient(&url, ms(30_000)).await];
    for waits in [false, true] {
        let mut told = Latency::below(ms(2_000) + NOISE, 1);
        while told.wants_more() {
            let guard = pool.lock("order:1").acquire().await.unwrap();
            let waiting = waits.then(|| acquire_in_task(&other, "order:1"));
            until_queued(server, &root, "order:1", 1 + usize::from(waits)).await;
            let node = server.queue(&root, "order:1").remove(0);
            let deleted = Instant::now();
            server.client().delete(&format!("{root}/order:1/{node}")).unwrap();
            let error = within(DEADLINE, "the loss", guard.lost()).await;
            assert!(error.is_lost(), "{error}");
            told.push(deleted.elapsed());
            if let Some(waiting) = waiting {
                joined("the waiter", waiting).await.1.release().await.unwrap();
            }
        }
    }
}

/// The pool that holds the key is told of a waiter, and hands off to no further task of its own.
#[tokio::test]
async fn a_holder_is_told_of_waiters_of_other_processes() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let builder = LockPool::builder(&url).ttl(ms(20_000)).wait(lock_runtime::Wait::Forever);
    let pool = builder.connect().await.unwrap();
    let other = patient(&url, ms(20_000)).await;
    let mut tasks = tokio::task::JoinSet::new();
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    for _ in 0..4 {
        let (pool, over) = (pool.clone(), over.clone());
        tasks.spawn(async move {
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                let guard = pool.lock("order:1").acquire().await.unwrap();
                tokio::time::sleep(ms(2)).await;
                guard.release().await.unwrap();
            }
        });
    }
    for _ in 0..5 {
        joined("the other process", acquire_in_task(&other, "order:1"))
            .await
            .1
            .release()
            .await
            .unwrap();
    }
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    within(DEADLINE, "all tasks", tasks.join_all()).await;
}
