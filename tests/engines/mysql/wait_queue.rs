//! Locks pass between pools in FIFO order, by looks.

#![allow(clippy::disallowed_methods)]

use std::path::Path;

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::{Latency, MysqlServer, Worker, eventually_async};

use super::conformance::{shared, until_queued};

#[tokio::test]
async fn waiters_of_several_pools_are_served_in_fifo_order() {
    let server = shared();
    let url = server.database("fifo");
    let mut pools = Vec::new();
    for _ in 0..5 {
        pools.push(patient(&url, ms(20_000)).await);
    }
    let guard = pools[0].lock("order:1").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for (n, pool) in pools.iter().skip(1).enumerate() {
        waiting.push(acquire_in_task(pool, "order:1"));
        until_queued(server, "fifo", "order:1", n + 1).await;
    }
    guard.release().await.unwrap();
    for (n, waiter) in waiting.into_iter().enumerate() {
        let (_, guard) = joined(format!("waiter {n}"), waiter).await;
        // A waiter out of order would hold the key now, and this one would wait.
        guard.release().await.unwrap();
    }
    assert_eq!(server.query("SELECT COUNT(*) FROM fifo.lock_queue"), [["0"]]);
}

/// A waiter that only repeats its request would read three times a second, and take a quarter of a second for a hand-off.
#[tokio::test]
async fn hand_offs_between_pools_take_looks() {
    const LOOKS: u64 = 30;
    let server = MysqlServer::start();
    let mut pools =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let mut guard = pools[0].lock("order:1").acquire().await.unwrap();
    let mut latency = Latency::below(ms(100), 8);
    while latency.wants_more() {
        let waiting = acquire_in_task(&pools[1], "order:1");
        until_queued(&server, "locks", "order:1", 1).await;
        let (began, before) = (std::time::Instant::now(), server.status("Com_select"));
        eventually_async(DEADLINE, "the waiter looks", async || {
            server.status("Com_select") > before + LOOKS
        })
        .await;
        assert!(began.elapsed() < ms(8_000), "{LOOKS} reads took {:?}", began.elapsed());
        let released = release(guard).await;
        let (acquired, next) = joined("the waiter", waiting).await;
        latency.push(acquired.saturating_duration_since(released));
        guard = next;
        pools.swap(0, 1);
    }
    println!("{latency}");
}

/// The holder's pool passes its lease on to its own tasks, and learns from a look that another pool waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_of_one_pool_do_not_keep_a_lock_from_another_pool() {
    let server = shared();
    let url = server.database("busy");
    let [one, other] = [patient(&url, ms(30_000)).await, patient(&url, ms(30_000)).await];
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let pool = one.clone();
            tokio::spawn(async move {
                loop {
                    let guard = pool.lock("order:1").acquire().await.unwrap();
                    tokio::time::sleep(ms(1)).await;
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for _ in 0..5 {
        let guard = within(ms(5_000), "a turn", other.lock("order:1").acquire()).await.unwrap();
        guard.release().await.unwrap();
    }
    for task in tasks {
        task.abort();
    }
}

#[tokio::test]
async fn a_waiter_that_gives_up_leaves_the_queue() {
    let server = shared();
    let url = server.database("gives_up");
    let [one, other] = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    let guard = one.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(server, "gives_up", "order:1", 1).await;
    waiting.abort();
    until_queued(server, "gives_up", "order:1", 0).await;
    guard.release().await.unwrap();
    assert!(one.lock("order:1").try_acquire().await.unwrap().is_some());
}

fn start_waiter(url: &str, dir: &Path, name: &str) -> Worker {
    let program = env!("CARGO_BIN_EXE_waiter");
    Worker::start(program, &[url, dir.to_str().unwrap(), name, "2000"])
}

#[tokio::test]
async fn killed_waiters_are_skipped() {
    let server = shared();
    let url = server.database("killed");
    let dir = tempfile::tempdir().unwrap();
    let pool = patient(&url, ms(20_000)).await;
    let guard = pool.lock("k").acquire().await.unwrap();
    for n in 0..3 {
        let waiter = start_waiter(&url, dir.path(), &format!("killed-{n}"));
        waiter.send_line("lock");
        until_queued(server, "killed", "k", n + 1).await;
        waiter.kill();
    }
    let other = patient(&url, ms(20_000)).await;
    let waiting = acquire_in_task(&other, "k");
    until_queued(server, "killed", "k", 4).await;
    // The server takes a moment to see that a connection was closed.
    let alive = "SELECT COUNT(*) FROM killed.lock_queue WHERE IS_USED_LOCK(channel) IS NOT NULL";
    eventually_async(DEADLINE, "one waiter lives", async || server.query(alive) == [["1"]]).await;
    guard.release().await.unwrap();
    // A hand-off to one of the dead would have left those behind it in the queue.
    assert_eq!(server.query("SELECT COUNT(*) FROM killed.lock_queue"), [["0"]]);
    joined("the waiter that lives", waiting).await.1.release().await.unwrap();
}

#[tokio::test]
async fn the_lock_of_a_killed_holder_is_free_at_the_end_of_its_ttl() {
    let server = shared();
    let url = server.database("holder");
    let dir = tempfile::tempdir().unwrap();
    let other = patient(&url, ms(20_000)).await;
    let holder = start_waiter(&url, dir.path(), "holder");
    holder.send_line("lock");
    holder.wait_for_line(DEADLINE, |line| line.starts_with("in "));
    let waiting = acquire_in_task(&other, "k");
    until_queued(server, "holder", "k", 1).await;
    holder.kill();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

/// The channel is of a connection that has ended.
#[tokio::test]
async fn a_waiter_with_a_cut_connection_is_served() {
    let server = MysqlServer::start();
    let [one, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    for _ in 0..5 {
        let guard = one.lock("order:1").acquire().await.unwrap();
        let waiting = acquire_in_task(&other, "order:1");
        until_queued(&server, "locks", "order:1", 1).await;
        server.kill_clients();
        eventually_async(DEADLINE, "the pool is back", async || guard.verify().await.is_ok()).await;
        guard.release().await.unwrap();
        joined("the waiter", waiting).await.1.release().await.unwrap();
    }
}

/// All of them were granted or released in one packet.
#[tokio::test]
async fn several_tasks_and_keys_share_statements() {
    let server = shared();
    let url = server.database("several");
    let [one, other] = [unhurried(&url, ms(60_000)).await, unhurried(&url, ms(60_000)).await];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let pool: LockPool = if n % 2 == 0 { one.clone() } else { other.clone() };
        tasks.spawn(async move {
            for round in 0..5 {
                cycle(&pool, &format!("order:{}", (n + round) % 60)).await;
            }
        });
    }
    within(2 * DEADLINE, "all cycles", tasks.join_all()).await;
    assert_eq!(server.query("SELECT COUNT(*) FROM several.lock_queue"), [["0"]]);
}
