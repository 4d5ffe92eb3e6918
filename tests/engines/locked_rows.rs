//! Rows that a transaction of another program keeps locked, on PostgreSQL and MariaDB.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::backend::{
    AcquireRequest, Backend, FailureKind, LeaseStatus, Owner, ReleaseOutcome, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::{SqlServer, SqlSession, eventually_async};
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_on_postgres_does_not_wait_for_locked_rows_of_other_keys_in_turn() {
    a_release_does_not_wait_in_turn(SqlServer::postgres()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_on_mysql_does_not_wait_for_locked_rows_of_other_keys_in_turn() {
    a_release_does_not_wait_in_turn(SqlServer::mysql()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_rows_on_postgres_delay_no_acquire_of_other_keys() {
    locked_rows_delay_no_other_acquire(SqlServer::postgres()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_rows_on_mysql_delay_no_acquire_of_other_keys() {
    locked_rows_delay_no_other_acquire(SqlServer::mysql()).await;
}

#[tokio::test]
async fn a_release_of_a_locked_row_on_postgres_waits_once() {
    a_release_of_a_locked_row_waits_once(SqlServer::postgres()).await;
}

#[tokio::test]
async fn a_release_of_a_locked_row_on_mysql_waits_once() {
    a_release_of_a_locked_row_waits_once(SqlServer::mysql()).await;
}

/// A release is repeated while its row is locked. Each wait would delay the requests for all other keys.
async fn a_release_of_a_locked_row_waits_once(server: SqlServer) {
    let store = open_backend(&server.url()).await.unwrap();
    let keys: Arc<[Key]> = Arc::new([Key::from("stuck:0")]);
    let held = AcquireRequest::new(keys, Owner::random().unwrap(), ms(20_000));
    store.acquire(std::slice::from_ref(&held)).await.remove(0).unwrap();
    let mut other = locking_session(&server).await;
    assert_eq!(other.rows("SELECT 1 FROM lock_lease FOR UPDATE").await.len(), 1);
    let mut took = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        let released = store.release(&[ReleaseRequest::new(held.lease())]).await.remove(0);
        assert_ne!(released.unwrap_err().kind(), FailureKind::Rejected);
        took.push(began.elapsed());
    }
    let repeated: Duration = took[1..].iter().sum();
    assert!(repeated < 3 * took[0], "{took:?}");
    other.run("COMMIT").await;
    eventually_async(DEADLINE, "it is released", async || {
        let released = store.release(&[ReleaseRequest::new(held.lease())]).await.remove(0);
        matches!(released, Ok(ReleaseOutcome::Freed))
    })
    .await;
}

#[tokio::test]
async fn a_loss_beside_a_locked_row_on_postgres_is_known() {
    a_loss_beside_a_locked_row_is_known(SqlServer::postgres()).await;
}

#[tokio::test]
async fn a_loss_beside_a_locked_row_on_mysql_is_known() {
    a_loss_beside_a_locked_row_is_known(SqlServer::mysql()).await;
}

/// Both renewals go in one statement, and one of them waits for its row in vain.
async fn a_loss_beside_a_locked_row_is_known(server: SqlServer) {
    let store = open_backend(&server.url()).await.unwrap();
    let [lost, stuck] = ["lost:0", "stuck:0"].map(|key| {
        let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
        AcquireRequest::new(keys, Owner::random().unwrap(), ms(60_000))
    });
    store.acquire(std::slice::from_ref(&lost)).await.remove(0).unwrap();
    server.session().await.run("DELETE FROM lock_lease").await;
    store.acquire(std::slice::from_ref(&stuck)).await.remove(0).unwrap();
    let mut other = locking_session(&server).await;
    assert_eq!(other.rows("SELECT 1 FROM lock_lease FOR UPDATE").await.len(), 1);
    let leases = [lost.lease(), stuck.lease()];
    let renewed = store.renew(&leases).await;
    assert!(matches!(renewed[0], Ok(LeaseStatus::NotHeld)), "{renewed:?}");
    assert!(renewed[1].is_err(), "{renewed:?}");
    other.run("COMMIT").await;
    eventually_async(DEADLINE, "the other lease is renewed", async || {
        matches!(store.renew(&leases).await[1], Ok(LeaseStatus::Held))
    })
    .await;
}

/// Another session, in a transaction that locks rows and no gaps.
async fn locking_session(server: &SqlServer) -> SqlSession {
    let mut other = server.session().await;
    if let SqlServer::Mysql(_) = server {
        other.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await;
    }
    other.begin().await;
    other
}

/// Another session, with a transaction that has locked the rows of the keys `stuck:0` and so on, and no others.
async fn lock_rows(server: &SqlServer, pool: &LockPool, count: usize) -> SqlSession {
    let stuck = pool.lock_all((0..count).map(|n| format!("stuck:{n}"))).acquire().await.unwrap();
    stuck.release().await.unwrap();
    let mut other = locking_session(server).await;
    assert_eq!(other.rows("SELECT 1 FROM lock_lease FOR UPDATE").await.len(), count);
    other
}

/// Requests for four locked rows arrive all the time. Each other request has the time limit of one statement.
async fn locked_rows_delay_no_other_acquire(server: SqlServer) {
    const STUCK: usize = 4;
    let pool = LockPool::builder(server.url()).request_timeout(ms(2_000)).connect().await.unwrap();
    let mut other = lock_rows(&server, &pool, STUCK).await;
    let mut acquiring = JoinSet::new();
    let failed = Arc::new(AtomicUsize::new(0));
    for n in 0..STUCK {
        let (pool, failed) = (pool.clone(), failed.clone());
        acquiring.spawn(async move {
            loop {
                let request = pool.lock(format!("stuck:{n}")).wait(Duration::ZERO);
                let error = request.acquire().await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
                failed.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    eventually_async(DEADLINE, "all rows are known to be locked", async || {
        failed.load(Ordering::SeqCst) >= 4 * STUCK
    })
    .await;
    for n in 0..30 {
        let free = pool.lock(format!("order:{n}")).wait(Duration::ZERO).acquire().await;
        free.unwrap_or_else(|error| panic!("{n}: {error}")).release().await.unwrap();
    }
    assert!(acquiring.try_join_next().is_none());
    acquiring.shutdown().await;
    other.run("COMMIT").await;
    eventually_async(DEADLINE, "the rows are unlocked", async || {
        pool.lock("stuck:1").wait(ms(1_000)).acquire().await.is_ok()
    })
    .await;
}

/// Each request for several keys waits for its row, and new ones arrive all the time.
async fn a_release_does_not_wait_in_turn(server: SqlServer) {
    const STUCK: usize = 100;
    // The time limit of a release is twice this one.
    let builder = LockPool::builder(server.url()).request_timeout(ms(3_000));
    let pool = builder.connect().await.unwrap();
    let _other = lock_rows(&server, &pool, STUCK).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let next = Arc::new(AtomicUsize::new(0));
    let mut acquiring = JoinSet::new();
    for _ in 0..16 {
        let (pool, next) = (pool.clone(), next.clone());
        acquiring.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::SeqCst) % STUCK;
                let request = pool.lock_all([format!("stuck:{n}"), format!("more:{n}")]);
                assert!(request.wait(Duration::ZERO).acquire().await.is_err());
            }
        });
    }
    let a_statement_waits = async || match &server {
        SqlServer::Postgres(server) => {
            server.query("SELECT count(*) FROM pg_locks WHERE NOT granted") != [["0"]]
        }
        SqlServer::Mysql(server) => server.status("Innodb_row_lock_current_waits") > 0,
    };
    eventually_async(DEADLINE, "a statement waits for a row", a_statement_waits).await;
    guard.release().await.unwrap();
    acquiring.abort_all();
}
