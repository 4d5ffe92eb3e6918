//! Many callers over a slow link.

use lock_runtime::LockPool;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{Engine, EngineKind, FaultProxy};
use tokio::task::JoinSet;

on_each_engine!(many_calls_over_a_slow_link_are_answered);

/// More calls than a connection serves in a few round trips: what is sent in excess is answered after its time limit.
async fn many_calls_over_a_slow_link_are_answered(kind: EngineKind) {
    const CALLS: usize = 4_000;
    let engine = Engine::start(kind);
    let proxy = FaultProxy::to_port(engine.port());
    for direction in [Direction::ToServer, Direction::ToClient] {
        proxy.delay(direction, ms(125));
    }
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
