//! What `LockPool::inspect` tells on any store.

use lock_runtime::{Inspection, LockPool, OwnerTag, Wait};

use crate::prelude::*;
use crate::{Worker, eventually_async};

/// Whether a store shows its wait queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShownQueue {
    /// It has none, or does not show it.
    Hidden,
    /// In its order.
    Shown,
}

/// One pool at `url` holds a lock and two others wait for it. All tell the same of it, behind their common prefix.
pub async fn tells_the_holder_and_its_queue(url: &str, queue: ShownQueue) {
    let connect = || {
        let builder = LockPool::builder(url).key_prefix("seen:").ttl(ms(20_000));
        builder.wait(Wait::Forever).connect()
    };
    let [one, other, third] =
        [connect().await.unwrap(), connect().await.unwrap(), connect().await.unwrap()];
    let free = one.inspect("order:1").await.unwrap();
    assert!(free.is_free() && free.waiters.is_empty(), "{free:?}");
    let guard = one.lock("order:1").acquire().await.unwrap();
    let holder = owner_of(&one.inspect("order:1").await.unwrap());
    assert_eq!(Some(one.snapshot().held[0].owner), holder);
    for pool in [&one, &other] {
        let shown = pool.inspect("order:1").await.unwrap();
        assert_eq!(owner_of(&shown), holder, "{shown:?}");
        let shown = shown.holder.unwrap();
        assert!(shown.fence.is_none() || shown.fence == guard.fence(), "{shown:?}");
        assert!(shown.expires_in.is_none_or(|left| left < ms(40_000)), "{shown:?}");
        assert!(pool.inspect("order:2").await.unwrap().is_free());
    }
    let elsewhere = LockPool::connect(url).await.unwrap();
    assert!(elsewhere.inspect("order:1").await.unwrap().is_free(), "another prefix");
    assert_eq!(owner_of(&elsewhere.inspect("seen:order:1").await.unwrap()), holder);

    let waiting = |count: usize| {
        let elsewhere = &elsewhere;
        eventually_async(DEADLINE, "the waiters are shown", async move || {
            let shown = elsewhere.inspect("seen:order:1").await.unwrap();
            assert_eq!(owner_of(&shown), holder, "{shown:?}");
            match queue {
                ShownQueue::Shown => shown.waiting == Some(count),
                ShownQueue::Hidden => {
                    assert!(shown.waiters.is_empty() && shown.waiting.is_none(), "{shown:?}");
                    true
                }
            }
        })
    };
    let second = acquire_in_task(&other, "order:1");
    waiting(1).await;
    let last = match queue {
        ShownQueue::Shown => {
            let last = acquire_in_task(&third, "order:1");
            waiting(2).await;
            Some(last)
        }
        // Without a queue the order is not known.
        ShownQueue::Hidden => None,
    };
    let queued = one.inspect("order:1").await.unwrap().waiters;
    guard.release().await.unwrap();
    let (_, second) = joined("the second", second).await;
    let next = owner_of(&one.inspect("order:1").await.unwrap());
    assert_ne!(next, holder);
    assert_eq!(queued.first().map_or(next, |first| first.owner), next, "the first one is next");
    second.release().await.unwrap();
    if let Some(last) = last {
        joined("the last", last).await.1.release().await.unwrap();
    }
    eventually_async(DEADLINE, "it is free", async || {
        let shown = other.inspect("order:1").await.unwrap();
        shown.is_free() && shown.waiting.unwrap_or(0) == 0
    })
    .await;
}

/// Another process holds a lock by an annotated function, and is told with its host, its number, and the function; or not, if
/// its pool is set so. `holder` is the program `annotated-holder`. `stored` reads what the store keeps for the key `order:42`, as
/// other clients see it.
pub async fn tells_the_process_of_the_holder(url: &str, holder: &str, stored: impl Fn() -> String) {
    let pool = LockPool::connect(url).await.unwrap();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let stored = || tokio::task::block_in_place(&stored);
    for setting in ["off", "on", "off"] {
        let worker = Worker::start(holder, &[url, setting]);
        tokio::task::block_in_place(|| worker.wait_for_line(DEADLINE, |line| line == "ready"));
        let shown = pool.inspect("order:42").await.unwrap().holder.unwrap();
        assert!(shown.owner.is_some(), "{shown:?}");
        let text = format!("{}/{}", host.trim(), worker.pid());
        if setting == "off" {
            assert_eq!(shown.info, None);
            for part in [text.as_str(), &format!("{}/", host.trim()), "annotated-holder"] {
                assert!(!stored().contains(part), "{part}: {}", stored());
            }
        } else {
            assert!(stored().contains(&text), "{}", stored());
            let info = shown.info.clone().unwrap();
            assert_eq!((info.host.as_str(), info.process_id), (host.trim(), worker.pid()));
            let site = info.call_site.as_deref().unwrap();
            let (file, line) = site.rsplit_once(':').unwrap();
            assert!(file.ends_with("src/bin/annotated-holder.rs"), "{site}");
            assert!((8..14).contains(&line.parse().unwrap()), "{site}");
            assert_eq!(info.to_string(), format!("{text} {site}"));
            // Waiters leave it as it is.
            let waiting = pool.lock("order:42").wait(ms(500)).acquire();
            let error = waiting.await.map(|_| ()).unwrap_err();
            assert!(error.is_conflict(), "{error}");
            let behind = pool.inspect("order:42").await.unwrap().holder.unwrap();
            assert_eq!(behind.info, Some(info));
        }
        worker.kill();
        if setting == "off" {
            assert!(pool.force_release("order:42", &shown).await.unwrap());
        }
        // Otherwise by its ttl.
        let next = pool.lock("order:42").wait(2 * DEADLINE).acquire().await.unwrap();
        let call_site = format!("{}:{}", file!(), line!() - 1);
        let own = pool.inspect("order:42").await.unwrap().holder.unwrap().info.unwrap();
        assert_eq!((own.process_id, own.call_site), (std::process::id(), Some(call_site)));
        next.release().await.unwrap();
    }
}

/// The owner that holds the key.
#[must_use]
pub fn owner_of(inspection: &Inspection) -> Option<OwnerTag> {
    inspection.holder.as_ref().and_then(|holder| holder.owner)
}
