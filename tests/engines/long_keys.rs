//! Keys of the greatest length, behind the longest prefix.

use lock_runtime::{Key, LockPool};
use lock_tests::{Engine, EngineKind};

on_each_engine!(long_keys_behind_a_long_prefix_are_granted_listed_and_found);

async fn long_keys_behind_a_long_prefix_are_granted_listed_and_found(kind: EngineKind) {
    let engine = Engine::start(kind);
    let prefix = "p".repeat(256);
    let connect =
        async || LockPool::builder(engine.url()).key_prefix(&prefix).connect().await.unwrap();
    let (pool, other) = (connect().await, connect().await);
    let long = |end: &str| Key::from("k".repeat(511) + end);

    let guard = pool.lock_all([long("1"), long("2")]).acquire().await.unwrap();
    for key in [long("1"), long("2")] {
        assert!(other.lock(key).try_acquire().await.unwrap().is_none());
    }
    let third = other.lock(long("3")).acquire().await.unwrap();

    let found = pool.list("k*", 10).await.unwrap();
    assert!(found.is_complete && found.keys.len() == 3, "{found:?}");
    for key in &found.keys {
        assert!(other.inspect(key).await.unwrap().holder.is_some(), "{key:?}");
    }
    third.release().await.unwrap();
    guard.release().await.unwrap();
    assert!(pool.list("k*", 10).await.unwrap().keys.is_empty());
}
