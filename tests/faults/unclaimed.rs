//! A grant that its caller does not poll for is given back.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, Progress};
use lock_tests::prelude::*;

const KEY: &str = "order:7";
const TTL: Duration = Duration::from_secs(3);

type Acquire = Pin<Box<dyn Future<Output = Result<LockGuard, LockError>>>>;

/// Polls once and parks the future.
async fn parked(acquire: impl Future<Output = Result<LockGuard, LockError>> + 'static) -> Acquire {
    let mut acquire: Acquire = Box::pin(acquire);
    let is_pending = poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx).is_pending())).await;
    assert!(is_pending, "it waits for an answer");
    acquire
}

/// A pool with a slow store, and another one on the same store.
async fn pools(name: &str) -> ([LockPool; 2], lock_runtime::testing::FaultPlan) {
    let url = format!("memory://{name}");
    let (store, faults) = FaultyBackend::new(open_backend(&url).await.unwrap());
    // Otherwise the first poll would return it.
    faults.plan(Operation::Acquire, Fault::DelayReply(ms(10)));
    let ours = LockPool::with_backend(store).on_current_runtime().connect().await.unwrap();
    let theirs = LockPool::builder(url).on_current_runtime().connect().await.unwrap();
    ([ours, theirs], faults)
}

fn is_given_back(outcome: Result<LockGuard, LockError>) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.to_string().contains("released again"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_parked_acquire_keeps_others_out_for_one_ttl_at_most() {
    let ([ours, theirs], faults) = pools("unclaimed").await;
    let acquire = parked(ours.lock(KEY).ttl(TTL).wait(ms(500)).acquire()).await;
    tokio::time::sleep(TTL / 2).await;
    assert!(faults.count(Operation::Renew) > 0, "it was granted, and is renewed meanwhile");
    assert!(theirs.lock(KEY).try_acquire().await.unwrap().is_none());
    let guard = theirs.lock(KEY).wait(TTL).acquire().await.unwrap();
    is_given_back(acquire.await);
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

/// Its lease may end before its `wait` does. No body has begun, so the `min_hold` keeps no other owner out.
#[tokio::test(start_paused = true)]
async fn a_parked_acquire_that_is_lost_has_no_min_hold() {
    for is_polled in [true, false] {
        let ([ours, theirs], _) = pools(&format!("unclaimed-min-hold-{is_polled}")).await;
        let request = ours.lock(KEY).ttl(TTL).renew(false).min_hold(TTL * 600).lock_delay(TTL);
        let acquire = parked(request.wait(TTL * 300).acquire()).await;
        tokio::time::sleep(TTL / 2).await;
        assert!(theirs.lock(KEY).try_acquire().await.unwrap().is_none(), "it was granted");
        tokio::time::sleep(TTL).await;
        if is_polled {
            let error = acquire.await.unwrap_err();
            assert_eq!((error.kind(), error.progress()), (ErrorKind::Lost, Progress::NotStarted));
        }
        theirs.lock(KEY).wait(TTL).acquire().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_parked_acquire_has_its_wait_at_least() {
    let ([ours, theirs], _) = pools("unclaimed-wait").await;
    let acquire = parked(ours.lock(KEY).ttl(TTL).wait(TTL * 4).acquire()).await;
    tokio::time::sleep(TTL * 3).await;
    assert!(theirs.lock(KEY).try_acquire().await.unwrap().is_none());
    acquire.await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_parked_acquire_of_several_keys_gives_all_of_them_back() {
    let ([ours, theirs], _) = pools("unclaimed-keys").await;
    let acquire = parked(ours.lock_all(["a", "b", "c"]).ttl(TTL).wait(ms(500)).acquire()).await;
    tokio::time::sleep(TTL / 2).await;
    assert!(theirs.lock("b").try_acquire().await.unwrap().is_none(), "it was granted");
    let guard = theirs.lock_all(["a", "b", "c"]).wait(TTL).acquire().await.unwrap();
    is_given_back(acquire.await);
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_parked_waiter_to_which_the_lock_was_handed_on_gives_way_to_the_next_one() {
    let ([ours, _], _) = pools("unclaimed-handoff").await;
    let held = ours.lock(KEY).ttl(TTL).acquire().await.unwrap();
    let acquire = parked(ours.lock(KEY).ttl(TTL).wait(ms(500)).acquire()).await;
    let behind = tokio::spawn(ours.lock(KEY).ttl(TTL).wait(TTL * 2).acquire());
    tokio::task::yield_now().await;
    held.release().await.unwrap();
    let guard = behind.await.unwrap().unwrap();
    is_given_back(acquire.await);
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_parked_waiter_is_sent_away_at_the_end_of_its_wait() {
    let ([ours, theirs], _) = pools("unclaimed-deadline").await;
    let held = theirs.lock(KEY).acquire().await.unwrap();
    let acquire = parked(ours.lock(KEY).ttl(TTL).wait(ms(500)).acquire()).await;
    tokio::time::sleep(ms(600)).await;
    held.release().await.unwrap();
    tokio::time::sleep(ms(10)).await;
    let guard = theirs.lock(KEY).try_acquire().await.unwrap();
    guard.expect("its wait was over").release().await.unwrap();
    assert_eq!(acquire.await.unwrap_err().kind(), ErrorKind::Conflict);
}

/// Either the caller has the lock or the next waiter may have it: never both, never neither.
#[tokio::test(start_paused = true)]
async fn a_pick_up_in_the_instant_of_the_return() {
    let ttl = ms(300);
    let (mut picked_up, mut given_back) = (0, 0);
    for moment in 290..420 {
        let ([ours, theirs], faults) = pools(&format!("unclaimed-{moment}")).await;
        if moment % 2 == 0 {
            faults.plan(Operation::Renew, Fault::DelayReply(ms(60)));
        }
        let acquire = parked(ours.lock(KEY).ttl(ttl).wait(ms(100)).acquire()).await;
        tokio::time::sleep(ms(moment)).await;
        match acquire.await {
            Ok(guard) => {
                picked_up += 1;
                guard.verify().await.unwrap();
                assert!(theirs.lock(KEY).try_acquire().await.unwrap().is_none());
                tokio::time::sleep(ttl * 4).await;
                guard.verify().await.expect("what is picked up is kept");
                guard.release().await.unwrap();
            }
            outcome => {
                given_back += 1;
                is_given_back(outcome);
            }
        }
        theirs.lock(KEY).wait(ms(100)).acquire().await.unwrap().release().await.unwrap();
    }
    assert!(picked_up > 0 && given_back > 0, "{picked_up} and {given_back}");
}
