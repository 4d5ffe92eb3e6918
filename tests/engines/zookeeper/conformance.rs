//! The published suite, what stands in the tree, and fences.

use std::sync::Arc;

use lock_runtime::backend::{AcquireOutcome, AcquireRequest, Backend, Owner, ReleaseRequest};
use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{Key, LockPool};
use lock_tests::prelude::*;
use lock_tests::{ZooKeeperServer, eventually_async, lock_delays, sequencers};

#[tokio::test]
async fn it_conforms() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn sequencers_stand_for_one_hold() {
    let (server, root) = ZooKeeperServer::shared();
    sequencers::stand_for_one_hold(&server.url_of(&root)).await;
}

#[tokio::test]
async fn a_lock_delay_delays_the_next_grant_behind_a_loss() {
    let (server, root) = ZooKeeperServer::shared();
    lock_delays::delay_the_next_grant(&server.url_of(&root)).await;
}

#[tokio::test]
async fn a_lock_is_an_ephemeral_node_below_a_container() {
    let (server, root) = ZooKeeperServer::shared();
    let pool = LockPool::connect(&server.url_of(&root)).await.unwrap();
    let guard = pool.lock("order/1").acquire().await.unwrap();
    let nodes = server.queue(&root, "order%2F1");
    let [node] = &nodes[..] else { panic!("one node: {nodes:?}") };
    let (owner, number) = node.strip_prefix("_c_").unwrap().split_once("-lock-").unwrap();
    assert_eq!((owner.len(), number), (32, "0000000000"));
    guard.release().await.unwrap();
    assert_eq!(server.queue(&root, "order%2F1"), [""; 0]);
}

/// The servers delete a container that is not used, and numbers begin anew.
#[tokio::test]
async fn fences_grow_when_containers_vanish_and_the_server_is_killed() {
    // A lock that is held outlasts the restart of the server on a busy machine.
    let ttl = ms(100_000);
    let server = ZooKeeperServer::builder().setting("maxSessionTimeout", 200_000).start();
    let pool = unhurried(server.url(), ttl).await;
    let mut last = cycle(&pool, "order:1").await;
    for _ in 0..2 {
        server.client().delete("/locks/order:1").unwrap();
        let fence = cycle(&pool, "order:1").await;
        assert!(fence > last, "{fence:?} after {last:?}");
        server.kill();
        server.restart();
        last = cycle(&pool, "order:1").await;
        assert!(last > fence, "{last:?} after {fence:?}");
    }
    let other = unhurried(server.url(), ttl).await;
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
    let (server, root) = ZooKeeperServer::shared();
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
        release(&both).await;
        fences.push(acquire(&later).await);
        release(&later).await;
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

/// Waits until `count` nodes are in the queue of `key`, that of the holder included.
pub(super) async fn until_queued(server: &ZooKeeperServer, root: &str, key: &str, count: usize) {
    eventually_async(DEADLINE, &format!("{count} nodes are queued for {key}"), async || {
        server.queue(root, key).len() == count
    })
    .await;
}

/// Waits until no owner has a node below `root`.
pub(super) async fn until_nothing_is_left(server: &ZooKeeperServer, root: &str) {
    eventually_async(ms(10_000), "nothing is left in the tree", async || {
        let mut client = server.client();
        let keys = client.children(root).unwrap_or_default();
        let mut nodes = keys.iter().map(|key| client.children(&format!("{root}/{key}")));
        nodes.all(|nodes| nodes.unwrap_or_default().is_empty())
    })
    .await;
}
