//! Locks pass between pools in FIFO order, by notifications.

#![allow(clippy::disallowed_methods)]

use std::path::Path;

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::{PostgresServer, Worker, eventually_async};

use super::conformance::until_queued;

#[tokio::test]
async fn waiters_of_several_pools_are_served_in_fifo_order() {
    let server = PostgresServer::start();
    let mut pools = Vec::new();
    for _ in 0..5 {
        pools.push(patient(server.url(), ms(20_000)).await);
    }
    are_served_in_turn(&server, &pools).await;
    let left = server.query("SELECT count(*) FROM lock_queue");
    assert_eq!(left, [["0"]]);
}

/// The first pool holds a key, the others queue for it one after the other, and each has it in its turn.
pub(super) async fn are_served_in_turn(server: &PostgresServer, pools: &[LockPool]) {
    let guard = pools[0].lock("order:1").acquire().await.unwrap();
    let mut waiting = Vec::new();
    for (n, pool) in pools.iter().skip(1).enumerate() {
        waiting.push(acquire_in_task(pool, "order:1"));
        until_queued(server, "order:1", n + 1).await;
    }
    guard.release().await.unwrap();
    for (n, waiter) in waiting.into_iter().enumerate() {
        let (_, guard) = joined(format!("waiter {n}"), waiter).await;
        // A waiter out of order would hold the key now, and this one would wait.
        guard.release().await.unwrap();
    }
}

/// With this recheck interval a lost notification would cost half a second at each change.
#[tokio::test]
async fn hand_offs_between_pools_take_notifications_and_no_looks() {
    let server = PostgresServer::start();
    let [one, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let took = hand_off_time([one, other], "order:1", 40).await;
    assert!(took < ms(200), "{took:?}");
}

#[tokio::test]
async fn a_waiter_that_gives_up_leaves_the_queue() {
    let server = PostgresServer::start();
    let [one, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let guard = one.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(&server, "order:1", 1).await;
    waiting.abort();
    until_queued(&server, "order:1", 0).await;
    guard.release().await.unwrap();
    assert!(one.lock("order:1").try_acquire().await.unwrap().is_some());
}

fn start_waiter(server: &PostgresServer, dir: &Path, name: &str) -> Worker {
    let program = env!("CARGO_BIN_EXE_waiter");
    Worker::start(program, &[&server.url(), dir.to_str().unwrap(), name, "2000"])
}

#[tokio::test]
async fn killed_waiters_are_skipped() {
    let server = PostgresServer::start();
    let dir = tempfile::tempdir().unwrap();
    let pool = patient(server.url(), ms(20_000)).await;
    let guard = pool.lock("k").acquire().await.unwrap();
    for n in 0..3 {
        let waiter = start_waiter(&server, dir.path(), &format!("killed-{n}"));
        waiter.send_line("lock");
        until_queued(&server, "k", n + 1).await;
        waiter.kill();
    }
    let other = patient(server.url(), ms(20_000)).await;
    let waiting = acquire_in_task(&other, "k");
    until_queued(&server, "k", 4).await;
    eventually_async(DEADLINE, "the server has seen the ends of the others", async || {
        pool.inspect("k").await.is_ok_and(|found| found.waiting == Some(1))
    })
    .await;
    guard.release().await.unwrap();
    // A hand-off to one of the dead would have left those behind it in the queue.
    assert_eq!(server.query("SELECT count(*) FROM lock_queue"), [["0"]]);
    joined("the waiter that lives", waiting).await.1.release().await.unwrap();
}

#[tokio::test]
async fn the_lock_of_a_killed_holder_is_free_at_the_end_of_its_ttl() {
    let server = PostgresServer::start();
    let dir = tempfile::tempdir().unwrap();
    let other = patient(server.url(), ms(20_000)).await;
    let holder = start_waiter(&server, dir.path(), "holder");
    holder.send_line("lock");
    holder.wait_for_line(DEADLINE, |line| line.starts_with("in "));
    let waiting = acquire_in_task(&other, "k");
    until_queued(&server, "k", 1).await;
    holder.kill();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

/// The channel is of a connection that has ended, so the notification reaches nothing.
#[tokio::test]
async fn a_waiter_with_a_cut_connection_is_served() {
    let server = PostgresServer::start();
    let [one, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    for _ in 0..5 {
        let guard = one.lock("order:1").acquire().await.unwrap();
        let waiting = acquire_in_task(&other, "order:1");
        until_queued(&server, "order:1", 1).await;
        server.kill_clients();
        eventually_async(DEADLINE, "the pool is back", async || guard.verify().await.is_ok()).await;
        guard.release().await.unwrap();
        joined("the waiter", waiting).await.1.release().await.unwrap();
    }
}

/// All of them were granted or released in one statement.
#[tokio::test]
async fn several_tasks_and_keys_share_statements() {
    let server = PostgresServer::start();
    let [one, other] =
        [unhurried(server.url(), ms(60_000)).await, unhurried(server.url(), ms(60_000)).await];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let pool = if n % 2 == 0 { one.clone() } else { other.clone() };
        tasks.spawn(async move {
            for round in 0..5 {
                cycle(&pool, &format!("order:{}", (n + round) % 60)).await;
            }
        });
    }
    within(DEADLINE, "all cycles", tasks.join_all()).await;
    assert_eq!(server.query("SELECT count(*) FROM lock_queue"), [["0"]]);
}
