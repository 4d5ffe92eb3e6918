//! What `LockPool::list` finds on any store.

use lock_runtime::LockPool;
use tokio::task::JoinSet;

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
        ("?%2F", &["ä%2F"]),
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

/// More locks than one page of a search has, and free keys between them, are found while another lock is renewed.
pub async fn lists_more_than_a_page(url: &str) {
    const LOCKS: usize = 1_200;
    let pool = patient(url, ms(5_000)).await;
    let watched = pool.lock("watched").acquire().await.unwrap();
    cycle(&pool, "many:0000-free").await;
    let mut acquiring = JoinSet::new();
    for number in 0..LOCKS {
        let acquire = pool.lock(format!("many:{number:04}")).ttl(DEADLINE).acquire();
        acquiring.spawn(async move { acquire.await.unwrap() });
    }
    let guards = within(DEADLINE, "all are granted", acquiring.join_all()).await;
    for _ in 0..3 {
        let list = within(DEADLINE, "the list", pool.list("many:*", 5_000)).await.unwrap();
        assert_eq!((list.keys.len(), list.is_complete), (LOCKS, true));
        assert!(list.keys.is_sorted());
    }
    watched.verify().await.unwrap();
    let mut releasing = JoinSet::new();
    for guard in guards {
        releasing.spawn(async move { guard.release().await.unwrap() });
    }
    within(DEADLINE, "all are released", releasing.join_all()).await;
    watched.release().await.unwrap();
}
