//! PgBouncer in front of the server.

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::postgres::PgBouncer;
use lock_tests::prelude::*;
use lock_tests::{PostgresServer, eventually_async};

use super::wait_queue::are_served_in_turn;

/// No notification arrives, so waiters look for themselves, still in FIFO order.
#[tokio::test]
async fn in_transaction_mode_locks_are_safe_and_waiters_look() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(&server, "transaction");
    let url = pooler.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    let mut pools = Vec::new();
    for _ in 0..3 {
        pools.push(unhurried(&url, ms(60_000)).await);
    }
    let warnings = format!("{:?}", pools[0].health().await.unwrap().warnings);
    assert!(warnings.contains("pooler"), "{warnings}");
    are_served_in_turn(&server, &pools).await;
    let [one, other] = [pools[0].clone(), pools[1].clone()];
    assert!(alternate([one, other], "order:1", 10).await > 0);
}

/// The pooler takes no settings of a session, and a closed connection ends no statement that waits behind it.
#[tokio::test]
async fn in_transaction_mode_no_statement_stays_in_wait_for_a_row() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(&server, "transaction");
    let builder = LockPool::builder(pooler.url()).request_timeout(ms(400));
    let pool = builder.connect().await.unwrap();
    cycle(&pool, "order:1").await;
    let blocker = server.transaction("SELECT FROM lock_lease FOR UPDATE");
    for _ in 0..2 {
        let acquired = pool.lock("order:1").wait(ms(1_000)).acquire().await;
        assert_eq!(acquired.unwrap_err().kind(), ErrorKind::Backend);
    }
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    eventually_async(DEADLINE, "no statement waits", async || server.query(waiting) == [["0"]])
        .await;
    drop(blocker);
    let guard = pool.lock("order:1").wait(ms(5_000)).acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// The search for notifications takes a second there.
#[tokio::test]
async fn in_transaction_mode_a_connect_timeout_below_a_second_suffices() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(&server, "transaction");
    // Makes the tables.
    drop(LockPool::connect(&pooler.url()).await.unwrap());
    let builder = LockPool::builder(pooler.url()).connect_timeout(ms(800));
    let pool = builder.connect().await.unwrap();
    let warnings = format!("{:?}", pool.health().await.unwrap().warnings);
    assert!(warnings.contains("pooler"), "{warnings}");
    cycle(&pool, "order:1").await;
}

#[tokio::test]
async fn in_session_mode_notifications_arrive() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(&server, "session");
    let pool = LockPool::connect(&pooler.url()).await.unwrap();
    let warnings = format!("{:?}", pool.health().await.unwrap().warnings);
    assert!(!warnings.contains("pooler"), "{warnings}");
}
