//! What a pool holds and waits for.

#![allow(clippy::disallowed_methods)]

use std::time::Instant;

use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, distributed_lock};
use lock_tests::eventually_async;
use lock_tests::prelude::*;

use crate::granting_store::GrantsAlways;

#[distributed_lock(key = "order:<id>", pool = pool, guard = lock, ttl = "20s")]
async fn settle(pool: &LockPool, id: u32) -> Result<u64, LockError> {
    let snapshot = pool.snapshot();
    let [held] = &snapshot.held[..] else { panic!("one lock: {snapshot:?}") };
    assert_eq!(held.template, Some("order:<id>"));
    assert!(held.name.as_ref().is_some_and(|name| name.ends_with("::settle")), "{held:?}");
    assert_eq!(held.keys.iter().map(|key| key.as_str()).collect::<Vec<_>>(), ["order:7"]);
    assert_eq!(held.fence, lock.fence());
    assert!(held.valid_for > ms(10_000) && held.valid_for <= ms(20_000), "{held:?}");
    Ok(u64::from(id))
}

#[tokio::test]
async fn a_held_lock_is_shown_with_its_function() {
    let pool = LockPool::builder("memory://").key_prefix("app:").connect().await.unwrap();
    assert_eq!(settle(&pool, 7).await.unwrap(), 7);
    let snapshot = pool.snapshot();
    assert!(snapshot.held.is_empty() && snapshot.waiting.is_empty(), "{snapshot:?}");
}

#[tokio::test(start_paused = true)]
async fn holds_and_waits_are_counted_by_key() {
    let pool = LockPool::builder("memory://")
        .key_prefix("app:")
        .wait(lock_runtime::Wait::Forever)
        .on_current_runtime()
        .connect()
        .await
        .unwrap();
    let held = pool.lock("a").acquire().await.unwrap();
    tokio::time::sleep(ms(1_000)).await;
    let both = pool.lock_all(["b", "c"]).acquire().await.unwrap();
    let tasks: Vec<_> = ["a", "a", "a", "b"].map(|key| acquire_in_task(&pool, key)).into();
    let several = run_in_task(pool.lock_all(["a", "c"]));
    eventually_async(DEADLINE, "all wait", async || {
        pool.snapshot().waiting.iter().map(|it| it.waiting).sum::<usize>() == 5
    })
    .await;
    tokio::time::sleep(ms(2_000)).await;
    let snapshot = pool.snapshot();
    assert_eq!(&*snapshot.pool, "unnamed");
    let [first, second] = &snapshot.held[..] else { panic!("{snapshot:?}") };
    assert_eq!((first.keys[0].as_str(), first.template, first.name.as_ref()), ("a", None, None));
    assert!(first.held_for >= ms(3_000) && second.held_for < ms(3_000), "{snapshot:?}");
    assert_eq!(second.keys.len(), 2);
    assert_ne!(first.owner, second.owner);
    let waiting = |key: &str| {
        let of_key = snapshot.waiting.iter().find(|it| it.key.as_str() == key);
        of_key.map_or(0, |it| it.waiting)
    };
    assert_eq!(waiting("b"), 1);
    assert_eq!(waiting("a") + waiting("c"), 4, "{snapshot:?}");
    assert!(waiting("a") >= 3 && first.waiting == waiting("a"), "{snapshot:?}");
    assert!(snapshot.waiting.iter().all(|it| it.waited_for >= ms(2_000)), "{snapshot:?}");
    drop((held, both));
    for task in tasks {
        joined("a waiter", task).await.1.release().await.unwrap();
    }
    joined("several", several).await.1.release().await.unwrap();
    assert!(pool.snapshot().held.is_empty() && pool.snapshot().waiting.is_empty());
}

#[tokio::test]
async fn a_lost_lock_is_not_held() {
    let pool = memory().await;
    let guard = pool.lock("a").ttl(ms(1_500)).renew(false).acquire().await.unwrap();
    assert_eq!(pool.snapshot().held.len(), 1);
    assert!(guard.lost().await.is_lost());
    assert!(pool.snapshot().held.is_empty());
}

/// Renewals of short leases go on beside snapshots.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshots_of_ten_thousand_locks_delay_no_renewal() {
    let pool = LockPool::builder("memory://").ttl(ms(12_000)).connect().await.unwrap();
    let mut guards: Vec<LockGuard> = Vec::new();
    for n in 0..10_000 {
        guards.push(pool.lock(format!("order:{n}")).acquire().await.unwrap());
    }
    let (began, mut taken) = (Instant::now(), Vec::new());
    while began.elapsed() < ms(6_000) {
        let before = Instant::now();
        let snapshot = pool.snapshot();
        taken.push(before.elapsed());
        assert_eq!(snapshot.held.len(), 10_000);
        tokio::task::yield_now().await;
    }
    assert!(guards.iter().all(LockGuard::is_held), "a lease has not been renewed");
    println!("{} snapshots, median {:?}", taken.len(), median(taken.clone()));
    pool.shutdown(ms(0)).await;
}

#[tokio::test]
async fn both_are_serialized_with_times_in_milliseconds() {
    let pool = memory().await;
    let guard = pool.lock("a").acquire().await.unwrap();
    let waiting = acquire_in_task(&pool, "a");
    eventually_async(DEADLINE, "it waits", async || !pool.snapshot().waiting.is_empty()).await;
    let snapshot = serde_json::to_value(pool.snapshot()).unwrap();
    let held = &snapshot["held"][0];
    assert_eq!(snapshot["pool"], "unnamed");
    assert_eq!(held["keys"], serde_json::json!(["a"]));
    assert_eq!(held["fence"], guard.fence().unwrap().get());
    assert_eq!(held["lingers"], false);
    assert_eq!(held["waiting"], 1);
    assert!(held["valid_ms"].as_u64().is_some_and(|millis| millis > 1_000), "{snapshot}");
    assert_eq!(snapshot["waiting"][0]["key"], "a");
    let shown = serde_json::to_value(pool.inspect("a").await.unwrap()).unwrap();
    assert_eq!(shown["holder"]["owner"], held["owner"]);
    assert_eq!(shown["holder"]["owner"].as_str().unwrap().len(), 8);
    assert!(shown["holder"]["expires_in_ms"].as_u64().is_some_and(|it| it > 1_000), "{shown}");
    assert_eq!(
        (&shown["waiting"], &shown["waiters"]),
        (&serde_json::Value::Null, &serde_json::json!([]))
    );
    guard.release().await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

#[tokio::test]
async fn a_store_that_does_not_tell_is_a_typed_error() {
    let pool = LockPool::with_backend(GrantsAlways(())).connect().await.unwrap();
    let guard = pool.lock("a").fencing(false).acquire().await.unwrap();
    let error = pool.inspect("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("does not report which owner"), "{error}");
    assert_eq!(pool.snapshot().held.len(), 1);
    guard.release().await.unwrap();
}
