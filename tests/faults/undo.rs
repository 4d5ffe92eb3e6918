//! Grants of ambiguous acquires are undone, with bounded effort.

use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultPlan, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::prelude::*;

const TTL: Duration = Duration::from_secs(30);

/// Acquires of so many keys; all fail, and each may have been granted.
async fn fail(pool: &LockPool, faults: &FaultPlan, count: usize) {
    for _ in 0..count {
        faults.plan(Operation::Acquire, Fault::LoseReply);
    }
    faults.always(Fault::Fail(FailureKind::MaybeApplied));
    let acquire = |n: usize| {
        let request = pool.lock(format!("order:{n}")).ttl(TTL).wait(ms(200));
        tokio::spawn(async move { request.acquire().await.map(drop) })
    };
    for failed in (0..count).map(acquire).collect::<Vec<_>>() {
        assert_eq!(failed.await.unwrap().unwrap_err().kind(), ErrorKind::Backend);
    }
}

async fn pools(name: &str) -> ([LockPool; 2], FaultPlan) {
    let url = format!("memory://{name}");
    let (store, faults) = FaultyBackend::new(open_backend(&url).await.unwrap());
    let ours = LockPool::with_backend(store).on_current_runtime().connect().await.unwrap();
    let theirs = LockPool::builder(url).on_current_runtime().connect().await.unwrap();
    ([ours, theirs], faults)
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_receives_one_undo_a_second_and_not_for_ever() {
    let ([ours, _], faults) = pools("undo-silent").await;
    fail(&ours, &faults, 1_000).await;
    // The acquires give up soon by themselves.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = faults.count(Operation::Release);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let calls = faults.count(Operation::Release) - before;
    assert!((1..=20).contains(&calls), "{calls} calls in ten seconds, for 1,000 acquires");
    tokio::time::sleep(TTL + Duration::from_secs(90)).await;
    let before = faults.count(Operation::Release);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(faults.count(Operation::Release), before, "the store has forgotten them by itself");
}

#[tokio::test(start_paused = true)]
async fn all_is_taken_back_as_soon_as_the_store_answers() {
    let ([ours, theirs], faults) = pools("undo-answers").await;
    let count = 500;
    fail(&ours, &faults, count).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let is_taken = theirs.lock("order:0").try_acquire().await.unwrap().is_none();
    assert!(is_taken, "an unanswered request was served");
    faults.always(Fault::None);
    tokio::time::sleep(Duration::from_secs(2)).await;
    for n in 0..count {
        let guard = theirs.lock(format!("order:{n}")).try_acquire().await.unwrap();
        guard.unwrap_or_else(|| panic!("order:{n} is free")).release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_a_silent_store() {
    let ([ours, _], faults) = pools("undo-shutdown").await;
    fail(&ours, &faults, 300).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    ours.shutdown(Duration::from_secs(3)).await;
    let before = faults.count(Operation::Release);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(faults.count(Operation::Release), before, "a closed pool sends nothing");
}
