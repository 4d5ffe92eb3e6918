//! What `LockPool::list` finds on any store.

use lock_runtime::LockPool;

use crate::eventually_async;
use crate::prelude::*;

/// One pool holds locks, and another one with its prefix lists them. Free keys and those of another prefix are left out.
pub async fn lists_the_locks_that_are_held(url: &str) {
    let connect = |prefix| LockPool::builder(url).key_prefix(prefix).ttl(ms(20_000)).connect();
    let [one, other] = [connect("listed:").await.unwrap(), connect("listed:").await.unwrap()];
    let elsewhere = connect("elsewhere:").await.unwrap();
    cycle(&one, "order:4").await;
    let mut guards = Vec::new();
    for key in ["order:2", "order:1", "order/3", "stock:*[1]", "ä%2F"] {
        guards.push(one.lock(key).acquire().await.unwrap());
    }
    guards.push(elsewhere.lock("order:5").acquire().await.unwrap());

    let listed = async |pattern: &str, limit| {
        let list = other.list(pattern, limit).await.unwrap();
        let keys: Vec<_> = list.keys.iter().map(|key| key.as_str().to_owned()).collect();
        (keys, list.is_complete)
    };
    for (pattern, keys) in [
        ("*", &["order/3", "order:1", "order:2", "stock:*[1]", "ä%2F"][..]),
        ("order:*", &["order:1", "order:2"]),
        ("order?3", &["order/3"]),
        ("*1*", &["order:1", "stock:*[1]"]),
        ("stock:*[1]", &["stock:*[1]"]),
        ("ä*", &["ä%2F"]),
        ("order:1", &["order:1"]),
        ("nothing*", &[]),
    ] {
        assert_eq!(
            listed(pattern, 100).await,
            (keys.iter().map(|it| (*it).to_owned()).collect(), true)
        );
    }
    let (keys, is_complete) = listed("*", 2).await;
    assert!(keys.len() == 2 && !is_complete, "{keys:?}");
    assert_eq!(elsewhere.list("*", 10).await.unwrap().keys.len(), 1);
    for guard in guards {
        guard.release().await.unwrap();
    }
    eventually_async(DEADLINE, "nothing is held", async || listed("*", 10).await.0.is_empty())
        .await;
}
