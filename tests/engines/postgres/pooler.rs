//! PgBouncer in front of the server.

use lock_runtime::LockPool;
use lock_runtime::testing::{conformance, open_backend};
use lock_tests::PostgresServer;
use lock_tests::postgres::PgBouncer;
use lock_tests::prelude::*;

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
        pools.push(patient(&url, ms(20_000)).await);
    }
    let warnings = format!("{:?}", pools[0].health().await.unwrap().warnings);
    assert!(warnings.contains("pooler"), "{warnings}");
    are_served_in_turn(&server, &pools).await;
    let [one, other] = [pools[0].clone(), pools[1].clone()];
    assert!(alternate([one, other], "order:1", 10).await > 0);
}

#[tokio::test]
async fn in_session_mode_notifications_arrive() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::start(&server, "session");
    let pool = LockPool::connect(&pooler.url()).await.unwrap();
    let warnings = format!("{:?}", pool.health().await.unwrap().warnings);
    assert!(!warnings.contains("pooler"), "{warnings}");
}
