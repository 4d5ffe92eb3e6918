//! The published suite, and what stands in the tables.

use lock_runtime::LockPool;
use lock_runtime::testing::{conformance, open_backend};
use lock_tests::prelude::*;
use lock_tests::{PostgresServer, eventually_async, lock_delays, sequencers};

#[tokio::test]
async fn it_conforms() {
    let server = PostgresServer::start();
    let url = server.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn sequencers_stand_for_one_hold() {
    let server = PostgresServer::start();
    sequencers::stand_for_one_hold(&server.url()).await;
}

#[tokio::test]
async fn a_lock_delay_delays_the_next_grant_behind_a_loss() {
    let server = PostgresServer::start();
    lock_delays::delay_the_next_grant(&server.url()).await;
}

#[tokio::test]
async fn a_lock_is_a_row_and_its_fence_is_kept_when_it_is_free() {
    let server = PostgresServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let held = "SELECT convert_from(key, 'UTF8'), until > now(), fence FROM lock_lease";
    let fence = guard.fence().unwrap();
    assert_eq!(server.query(held), [["order:1", "t", &fence.to_string()]]);
    guard.release().await.unwrap();
    assert_eq!(server.query(held), [["order:1", "f", &fence.to_string()]]);
    assert!(cycle(&pool, "order:1").await > Some(fence));
}

#[tokio::test]
async fn fences_grow_when_rows_are_deleted_and_the_server_is_killed() {
    fences_grow(&PostgresServer::builder().setting("fsync", "on").start()).await;
}

/// Fences of a durable server grow over deleted rows and kills.
pub(super) async fn fences_grow(server: &PostgresServer) {
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let mut last = cycle(&pool, "order:1").await;
    for _ in 0..2 {
        server.query("TRUNCATE lock_lease, lock_queue");
        let fence = cycle(&pool, "order:1").await;
        assert!(fence > last, "{fence:?} after {last:?}");
        server.kill();
        server.restart();
        last = cycle(&pool, "order:1").await;
        assert!(last > fence, "{last:?} after {fence:?}");
    }
}

#[tokio::test]
async fn a_lease_outlives_a_kill_of_the_server() {
    outlives_a_kill(&PostgresServer::builder().setting("fsync", "on").start()).await;
}

/// A lock is kept over a kill of a durable server.
pub(super) async fn outlives_a_kill(server: &PostgresServer) {
    let (pool, other) =
        (patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await);
    let guard = pool.lock("order:1").acquire().await.unwrap();
    server.kill();
    server.restart();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(server, "order:1", 1).await;
    assert!(!waiting.is_finished());
    eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

/// Waits until `count` owners are in the wait queue of `key`.
pub(super) async fn until_queued(server: &PostgresServer, key: &str, count: usize) {
    let count = [[count.to_string()]];
    let statement = format!("SELECT count(*) FROM lock_queue WHERE key = '{key}'");
    eventually_async(DEADLINE, "the waiters are queued", async || {
        server.query(&statement) == count
    })
    .await;
}
