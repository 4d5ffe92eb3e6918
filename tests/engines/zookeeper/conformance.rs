//! The published suite, what stands in the tree, and fences.

use lock_runtime::LockPool;
use lock_runtime::testing::{conformance, open_backend};
use lock_tests::prelude::*;
use lock_tests::{ZooKeeperServer, eventually_async};

#[tokio::test]
async fn it_conforms() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
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
    let server = ZooKeeperServer::start();
    let pool = patient(server.url(), ms(10_000)).await;
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
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let [one, two, three] = [
        patient(&url, ms(20_000)).await,
        patient(&url, ms(20_000)).await,
        patient(&url, ms(20_000)).await,
    ];
    for round in 0..3 {
        let first = one.lock("b").acquire().await.unwrap();
        let both = tokio::spawn(two.lock_all(["a", "b"]).acquire());
        until_queued(server, &root, "a", 1).await;
        until_queued(server, &root, "b", 2).await;
        let later = acquire_in_task(&three, "a");
        until_queued(server, &root, "a", 2).await;
        let mut fences = vec![first.fence()];
        first.release().await.unwrap();
        let both = joined("both keys", both).await.unwrap();
        fences.push(both.fence());
        both.release().await.unwrap();
        let later = joined("the waiter", later).await.1;
        fences.push(later.fence());
        later.release().await.unwrap();
        fences.push(cycle(&one, "a").await);
        assert!(fences.is_sorted_by(|one, next| one < next), "round {round}: {fences:?}");
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
    eventually_async(ms(6_000), "nothing is left in the tree", async || {
        let mut client = server.client();
        let keys = client.children(root).unwrap_or_default();
        let mut nodes = keys.iter().map(|key| client.children(&format!("{root}/{key}")));
        nodes.all(|nodes| nodes.unwrap_or_default().is_empty())
    })
    .await;
}
