//! What a sequencer has to be on every store.

use lock_runtime::{ErrorKind, LockPool, Sequencer, Wait};

use crate::eventually_async;
use crate::prelude::*;

/// Checks on the store at `url` that a sequencer stands for one hold: not after its release, nor after a hand-off within
/// the process, nor after its lease ran out.
///
/// # Panics
///
/// When the store says otherwise.
pub async fn stand_for_one_hold(url: &str) {
    let connect = || LockPool::builder(url).ttl(ms(20_000)).wait(Wait::Forever).connect();
    let (pool, receiver) = (connect().await.unwrap(), connect().await.unwrap());
    released(&pool, &receiver).await;
    handed_off(&pool, &receiver).await;
    expired(&pool, &receiver).await;
}

async fn released(pool: &LockPool, receiver: &LockPool) {
    for keys in [&["sequenced:1"][..], &["sequenced:1", "sequenced:2 ;%"]] {
        let guard = pool.lock_all(keys.iter().copied()).acquire().await.unwrap();
        let sequencer: Sequencer = guard.sequencer().unwrap().to_string().parse().unwrap();
        assert_eq!(Some(sequencer.fence()), guard.fence());
        assert_eq!(sequencer.keys(), guard.keys());
        receiver.check(&sequencer).await.unwrap();
        guard.release().await.unwrap();
        is_over(receiver, &sequencer).await;
    }
}

/// The next holder of the process has an owner token of its own, where a lease would be handed off otherwise.
async fn handed_off(pool: &LockPool, receiver: &LockPool) {
    let first = pool.lock("sequenced:1").acquire().await.unwrap();
    let waiting = [(); 2].map(|()| acquire_in_task(pool, "sequenced:1"));
    eventually_async(DEADLINE, "both are queued", async || {
        pool.snapshot().held.iter().any(|held| held.waiting == 2)
    })
    .await;
    first.release().await.unwrap();
    let [next, last] = waiting;
    let guard = joined("the first waiter", next).await.1;
    let sequencer = guard.sequencer().unwrap();
    receiver.check(&sequencer).await.unwrap();
    guard.release().await.unwrap();
    let last = joined("the last waiter", last).await.1;
    is_over(receiver, &sequencer).await;
    let later = last.sequencer().unwrap();
    receiver.check(&later).await.unwrap();
    assert!(later.fence() > sequencer.fence());
    last.release().await.unwrap();
    is_over(receiver, &later).await;
}

async fn expired(pool: &LockPool, receiver: &LockPool) {
    let request = pool.lock_all(["sequenced:3", "sequenced:4"]).ttl(ms(2_000)).renew(false);
    let guard = request.acquire().await.unwrap();
    let sequencer = guard.sequencer().unwrap();
    receiver.check(&sequencer).await.unwrap();
    // One of the keys is enough.
    let taken = receiver.lock("sequenced:4").acquire();
    let next = within(DEADLINE, "the lease runs out", taken).await.unwrap();
    is_over(receiver, &sequencer).await;
    is_over(pool, &sequencer).await;
    assert_eq!(guard.sequencer().unwrap_err().kind(), ErrorKind::Lost);
    pool.check(&next.sequencer().unwrap()).await.unwrap();
    next.release().await.unwrap();
}

async fn is_over(receiver: &LockPool, sequencer: &Sequencer) {
    let error = receiver.check(sequencer).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(error.to_string().contains("refuse the request"), "{error}");
}
