//! The published suite, what stands in etcd, and fences.

use std::sync::Arc;

use lock_runtime::backend::{AcquireOutcome, AcquireRequest, Backend, Owner, ReleaseRequest};
use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, eventually_async, lock_delays, sequencers};

#[tokio::test]
async fn it_conforms() {
    let (server, root) = EtcdServer::shared();
    let url = server.url_of(&root);
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn sequencers_stand_for_one_hold() {
    let (server, root) = EtcdServer::shared();
    sequencers::stand_for_one_hold(&server.url_of(&root)).await;
}

#[tokio::test]
async fn a_lock_delay_delays_the_next_grant_behind_a_loss() {
    let (server, root) = EtcdServer::shared();
    lock_delays::delay_the_next_grant(&server.url_of(&root)).await;
}

#[tokio::test]
async fn a_lock_is_a_key_with_a_lease_below_the_name_of_the_lock() {
    let (server, root) = EtcdServer::shared();
    let pool = LockPool::connect(&server.url_of(&root)).await.unwrap();
    let guard = pool.lock("order/1").acquire().await.unwrap();
    let keys = server.queue(&root, "order%2F1");
    let [key] = &keys[..] else { panic!("one key: {keys:?}") };
    let owner = key.name.strip_prefix(&format!("{root}/order%2F1/")).unwrap();
    assert_eq!(owner.len(), 32, "{owner}");
    assert_ne!(key.lease, 0);
    // A lock is another one if its name only begins like this one's.
    let other = pool.lock("order").acquire().await.unwrap();
    other.release().await.unwrap();
    guard.release().await.unwrap();
    assert_eq!(server.queue(&root, "order%2F1"), []);
}

#[tokio::test]
async fn fences_grow_when_the_server_is_killed() {
    let server = EtcdServer::start();
    let pool = patient(server.url(), ms(10_000)).await;
    let mut last = cycle(&pool, "order:1").await;
    for _ in 0..3 {
        let fence = cycle(&pool, "order:1").await;
        assert!(fence > last, "{fence:?} after {last:?}");
        server.kill();
        server.restart();
        last = cycle(&pool, "order:1").await;
        assert!(last > fence, "{last:?} after {fence:?}");
    }
    let other = patient(server.url(), ms(10_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    server.kill();
    server.restart();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(&server, "/locks", "order:1", 2).await;
    eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
}

/// A waiter has queued for one of the keys before the owner of both had the other one.
#[tokio::test]
async fn a_fence_of_keys_that_were_taken_one_by_one_is_below_those_of_later_waiters() {
    let (server, root) = EtcdServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let request = |keys: &[&str]| {
        let keys: Arc<[Key]> = keys.iter().map(|key| Key::from(*key)).collect();
        let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(20_000));
        (request.fencing, request.enqueue) = (true, request.keys.len() == 1);
        request
    };
    let acquire = async |request: &AcquireRequest| {
        let outcome = store.acquire(std::slice::from_ref(request)).await.remove(0).unwrap();
        match outcome {
            AcquireOutcome::Acquired { fence, .. } => fence,
            _ => None,
        }
    };
    let release = async |request: &AcquireRequest| {
        let release = [ReleaseRequest::new(request.lease())];
        store.release(&release).await.remove(0).unwrap();
    };
    for _ in 0..3 {
        let (first, both, later) = (request(&["b"]), request(&["a", "b"]), request(&["a"]));
        let step = |key: &str| {
            let mut step = request(&[key]);
            step.owner = both.owner;
            step
        };
        let mut fences = vec![acquire(&first).await];
        fences.push(acquire(&step("a")).await);
        assert_eq!(acquire(&step("b")).await, None, "it is held");
        assert_eq!(acquire(&later).await, None, "it is held");
        release(&first).await;
        assert!(acquire(&step("b")).await.is_some(), "it is next");
        fences.push(acquire(&both).await);
        // Queued behind the fence of both keys, and before that of the next owner.
        let last = request(&["a"]);
        assert_eq!(acquire(&last).await, None, "it is held");
        release(&both).await;
        for queued in [&later, &last] {
            fences.push(acquire(queued).await);
            release(queued).await;
        }
        for key in ["a", "b"] {
            let next = request(&[key]);
            fences.push(acquire(&next).await);
            release(&next).await;
        }
        // The steps have fences of their own, which no body sees.
        fences.remove(1);
        assert!(fences.is_sorted_by(|one, next| one.is_some() && one < next), "{fences:?}");
    }
}

/// Waits until `count` keys are in the queue of `key`, that of the holder included.
pub(super) async fn until_queued(server: &EtcdServer, root: &str, key: &str, count: usize) {
    eventually_async(DEADLINE, &format!("{count} keys are queued for {key}"), async || {
        server.queue(root, key).len() == count
    })
    .await;
}

/// Waits until no owner has a key below `root`.
pub(super) async fn until_nothing_is_left(server: &EtcdServer, root: &str) {
    eventually_async(ms(10_000), "nothing is left in etcd", async || owners(server, root) == 0)
        .await;
}

/// How many keys of owners there are below `root`.
pub(super) fn owners(server: &EtcdServer, root: &str) -> usize {
    let own = format!("{root}/%");
    server.keys(&format!("{root}/")).iter().filter(|key| !key.name.starts_with(&own)).count()
}

/// Owners of several keys that have waited write their fence beside the queues.
#[tokio::test]
async fn a_fence_beside_a_queue_is_deleted_with_the_last_key_of_the_queue() {
    let (server, root) = EtcdServer::shared();
    let pools = [server.url_of(&root), server.url_of(&root), server.url_of(&root)];
    let mut transfers = tokio::task::JoinSet::new();
    for url in pools {
        transfers.spawn(async move {
            let builder = LockPool::builder(url).ttl(ms(20_000)).wait(ms(20_000));
            let (pool, mut last) = (builder.connect().await.unwrap(), None);
            for _ in 0..10 {
                let guard = pool.lock_all(["order:1", "stock:1"]).acquire().await.unwrap();
                let fence = guard.fence();
                assert!(fence > last, "{fence:?} after {last:?}");
                last = fence;
                guard.release().await.unwrap();
                // A request for one key queues between those for both.
                pool.lock("stock:1").acquire().await.unwrap().release().await.unwrap();
            }
        });
    }
    transfers.join_all().await;
    let written = server.keys(&format!("{root}/%fence/"));
    assert!(written.is_empty(), "{written:?}");
}
