//! Many callers and many leases over a slow link.

#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, Owner, ReleaseOutcome, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{Key, LockGuard, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{Engine, EngineKind, FaultProxy, SqlServer, eventually_async};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

on_each_engine!(
    many_calls_over_a_slow_link_are_answered,
    many_leases_are_kept_as_the_link_becomes_slow,
);

/// More calls than a connection serves in a few round trips: what is sent in excess is answered after its time limit.
async fn many_calls_over_a_slow_link_are_answered(kind: EngineKind) {
    const CALLS: usize = 4_000;
    let engine = Engine::start(kind);
    let proxy = FaultProxy::to_port(engine.port());
    delay(&proxy, ms(125));
    let builder = LockPool::builder(engine.url_at(proxy.port())).max_waiters(CALLS);
    // A busy machine needs as long for a batch as the link.
    let builder = builder.request_timeout(ms(2_000)).wait(2 * DEADLINE);
    let pool = builder.connect().await.unwrap();
    let mut calls = JoinSet::new();
    for n in 0..CALLS {
        let pool = pool.clone();
        calls.spawn(async move { cycle(&pool, &format!("order:{n}")).await });
    }
    // Each has acquired and released its lock.
    within(4 * DEADLINE, "the calls", calls.join_all()).await;
}

#[tokio::test]
async fn a_release_on_postgres_is_sent_before_acquires_that_wait() {
    a_release_is_sent_before_acquires_that_wait(SqlServer::postgres()).await;
}

#[tokio::test]
async fn a_release_on_mysql_is_sent_before_acquires_that_wait() {
    a_release_is_sent_before_acquires_that_wait(SqlServer::mysql()).await;
}

/// A call ends with its release. Where acquires of three statements wait, it does not wait for the last one.
async fn a_release_is_sent_before_acquires_that_wait(server: SqlServer) {
    const ACQUIRES: usize = 3_000;
    let store = open_backend(&server.url()).await.unwrap();
    let request =
        |key: String| AcquireRequest::new([Key::from(key)], Owner::random().unwrap(), ms(60_000));
    let held = request("held".to_owned());
    store.acquire(std::slice::from_ref(&held)).await.remove(0).unwrap();
    let acquires: Vec<_> = (0..ACQUIRES).map(|n| request(format!("order:{n}"))).collect();
    let releases = [ReleaseRequest::new(held.lease())];
    // Both are sent to the connection before its task runs.
    let (mut granted, mut released) =
        (Box::pin(store.acquire(&acquires)), Box::pin(store.release(&releases)));
    tokio::select! {
        biased;
        _ = &mut granted => panic!("the release waits for all acquires"),
        outcomes = &mut released => {
            assert_eq!(outcomes[0].as_ref().unwrap(), &ReleaseOutcome::Freed);
        }
    }
    let is_granted = |outcome| matches!(outcome, Ok(AcquireOutcome::Acquired { .. }));
    assert!(granted.await.into_iter().all(is_granted));
}

#[tokio::test]
async fn the_ttl_on_etcd_counts_from_after_the_preparation() {
    the_ttl_counts_from_after_the_preparation(EngineKind::Etcd).await;
}

#[tokio::test]
async fn the_ttl_on_zookeeper_counts_from_after_the_preparation() {
    the_ttl_counts_from_after_the_preparation(EngineKind::ZooKeeper).await;
}

/// The first lock with a ttl opens a lease or a session, which takes round trips of its own.
async fn the_ttl_counts_from_after_the_preparation(kind: EngineKind) {
    let engine = Engine::start(kind);
    let proxy = FaultProxy::to_port(engine.port());
    delay(&proxy, ms(50));
    let store = open_backend(&engine.url_at(proxy.port())).await.unwrap();
    let prepared_in = async || {
        let keys = [Key::from("order:7")];
        let request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(5_000));
        let outcome = store.acquire(std::slice::from_ref(&request)).await.remove(0);
        let released = store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0);
        assert_eq!(released.unwrap(), ReleaseOutcome::Freed);
        match outcome {
            Ok(AcquireOutcome::Acquired { prepared_in, .. }) => prepared_in,
            outcome => panic!("{outcome:?}"),
        }
    };
    assert!(prepared_in().await >= ms(100));
    eventually_async(DEADLINE, "a lock without preparation", async || prepared_in().await < ms(50))
        .await;
}

/// A renewal that waits for those before it is answered after its time limit, and in time for its lease.
async fn many_leases_are_kept_as_the_link_becomes_slow(kind: EngineKind) {
    const LEASES: usize = 4_000;
    const TTL: Duration = ms(15_000);
    let engine = Engine::start(kind);
    let proxy = FaultProxy::to_port(engine.port());
    let builder = LockPool::builder(engine.url_at(proxy.port())).ttl(TTL).max_waiters(LEASES);
    let pool = builder.wait(2 * DEADLINE).connect().await.unwrap();
    let mut acquires = JoinSet::new();
    for n in 0..LEASES {
        acquires.spawn(pool.lock(format!("order:{n}")).acquire());
    }
    let acquired = within(4 * DEADLINE, "the locks", acquires.join_all()).await;
    let guards: Vec<LockGuard> = acquired.into_iter().map(Result::unwrap).collect();
    delay(&proxy, ms(200));
    // Without an answer in time a lease is lost within its ttl.
    let end = Instant::now() + TTL + ms(4_000);
    while Instant::now() < end {
        let lost = guards.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!(lost, 0, "of {LEASES} leases");
        sleep(ms(250)).await;
    }
    delay(&proxy, Duration::ZERO);
    drop(guards);
    within(4 * DEADLINE, "the releases", pool.shutdown(3 * DEADLINE)).await;
}

/// Delays what the proxy passes on, in each direction.
fn delay(proxy: &FaultProxy, by: Duration) {
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.delay(direction, by);
    }
}
