//! What the renewal of very many leases costs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use lock_runtime::backend::{AcquireOutcome, AcquireRequest, Backend, LeaseStatus, Owner};
use lock_runtime::testing::open_backend;
use lock_runtime::{Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::runtimes::current_thread;
use lock_tests::{Engine, EngineKind};
use tokio::task::JoinSet;
use tokio::time::sleep;

on_each_engine!(the_leases_of_one_tick_share_a_few_requests);

/// `LOCK_LEASES`, by default 2,000.
fn leases() -> usize {
    std::env::var("LOCK_LEASES").map_or(2_000, |count| count.parse().expect("a number"))
}

/// Longer than the test takes, and as long as a session of the servers may be.
const TTL: Duration = ms(50_000);

/// Calls of a store that may fail on a busy machine, where a connection may be replaced.
const MOST_TRIES: usize = 100;

/// A tick of the pool is one call of the store with all leases that are due. The call and the connections share a thread, as
/// on the driver.
async fn the_leases_of_one_tick_share_a_few_requests(kind: EngineKind) {
    let engine = Engine::start(kind);
    let ticks = tokio::task::spawn_blocking(move || current_thread().block_on(ticks(&engine)));
    let (first, later) = ticks.await.unwrap();
    let leases = leases();
    println!(
        "{kind:?}: {first} requests in the first tick of {leases} leases, {later:?} in later ones"
    );
    // A statement serves this many. MariaDB has two: a look for what is not locked, and the update.
    let exact = match kind {
        EngineKind::Postgres => leases.div_ceil(4_096),
        EngineKind::Mysql => 2 * leases.div_ceil(4_096),
        // A sign of life, a request that a majority confirms, and one more of a connection.
        EngineKind::Etcd | EngineKind::ZooKeeper => {
            return assert!(later.iter().all(|requests| *requests <= 3), "{later:?} requests");
        }
    };
    assert!(later.iter().all(|requests| *requests == exact), "{later:?} requests, not {exact}");
}

/// How many requests the first tick takes, and each of the last four.
async fn ticks(engine: &Engine) -> (usize, Vec<usize>) {
    let store = open_backend(&engine.url()).await.unwrap();
    let request = |n| {
        let keys: Arc<[Key]> = Arc::new([Key::from(format!("held:{n}"))]);
        AcquireRequest::new(keys, Owner::random().unwrap(), TTL)
    };
    let requests: Vec<_> = (0..leases()).map(request).collect();
    let (mut pending, mut tries) = (requests.clone(), 0..MOST_TRIES);
    while !pending.is_empty() {
        let again = pending.split_off(pending.len().min(500));
        let outcomes = store.acquire(&pending).await;
        assert!(tries.next().is_some(), "{:?}", outcomes.first());
        let mut outcomes = outcomes.into_iter();
        // On a busy machine a connection may be replaced.
        pending.retain_mut(|request| {
            request.attempt += 1;
            !matches!(outcomes.next(), Some(Ok(AcquireOutcome::Acquired { .. })))
        });
        pending.extend(again);
    }
    let leases: Vec<_> = requests.iter().map(AcquireRequest::lease).collect();
    // Reading the counters may be a request too, and a connection may be checked meanwhile.
    let read_twice = |_| {
        let before = engine.requests();
        engine.requests() - before
    };
    let reading = (0..5).map(read_twice).min().unwrap_or_default();
    let tick = async || {
        let mut outcomes = Vec::new();
        for _ in 0..MOST_TRIES {
            let before = engine.requests();
            outcomes = store.renew(&leases).await;
            let requests = engine.requests() - before;
            // A call that fails because its connection is replaced may have sent nothing.
            if outcomes.iter().all(Result::is_ok) {
                let held = |outcome: &_| matches!(outcome, Ok(LeaseStatus::Held));
                assert!(outcomes.iter().all(held));
                // Signs of life may have come during each reading, and none during the tick.
                return requests.saturating_sub(reading);
            }
        }
        panic!("{:?}", outcomes.iter().find(|outcome| outcome.is_err()));
    };
    let first = tick().await;
    let mut later = VecDeque::new();
    // etcd and ZooKeeper read keys until they watch them, which takes some ticks on a busy machine.
    for _ in 0..30 {
        sleep(ms(500)).await;
        later.push_back(tick().await);
        if later.len() > 4 {
            later.pop_front();
        }
        if later.len() == 4 && later.iter().all(|requests| *requests <= 3) {
            break;
        }
    }
    store.close().await;
    (first, later.into())
}

/// Of databases: etcd and ZooKeeper take all requests at once.
mod checks {
    use super::*;

    on_each_engine!(@ postgres Postgres checks_at_once_share_a_few_statements);
    on_each_engine!(@ mysql Mysql checks_at_once_share_a_few_statements);

    /// One statement after the other would hold up the renewals that arrive behind them.
    async fn checks_at_once_share_a_few_statements(kind: EngineKind) {
        const CHECKS: usize = 500;
        let engine = Engine::start(kind);
        let pool = LockPool::builder(engine.url()).ttl(TTL).connect().await.unwrap();
        let guard = Arc::new(pool.lock("order:1").acquire().await.unwrap());
        guard.verify().await.unwrap();
        let before = engine.requests();
        let mut checks = JoinSet::new();
        for _ in 0..CHECKS {
            let guard = guard.clone();
            checks.spawn(async move { guard.verify().await });
        }
        for check in checks.join_all().await {
            check.unwrap();
        }
        let requests = engine.requests() - before;
        assert!(requests < CHECKS / 5, "{requests} statements");
    }
}
