//! The holder of a key and its queue, as nodes tell them.

use lock_runtime::LockPool;
use lock_tests::ZooKeeperServer;
use lock_tests::forced::is_taken_from_its_holder;
use lock_tests::inspected::{
    ShownQueue, owner_of, tells_the_holder_and_its_queue, tells_the_process_of_the_holder,
};
use lock_tests::listed::lists_the_locks_that_are_held;
use lock_tests::prelude::*;

#[tokio::test]
async fn it_tells_the_holder_and_its_queue() {
    let (server, root) = ZooKeeperServer::shared();
    tells_the_holder_and_its_queue(&server.url_of(&root), ShownQueue::Shown).await;
}

#[tokio::test]
async fn a_lock_is_taken_from_its_holder() {
    let (server, root) = ZooKeeperServer::shared();
    is_taken_from_its_holder(&server.url_of(&root)).await;
}

#[tokio::test]
async fn held_locks_are_listed() {
    let (server, root) = ZooKeeperServer::shared();
    lists_the_locks_that_are_held(&server.url_of(&root)).await;
}

/// Curator names its nodes by a UUID.
#[tokio::test]
async fn nodes_of_other_clients_are_held_by_another_client() {
    let (server, root) = ZooKeeperServer::shared();
    let pool = LockPool::connect(&server.url_of(&root)).await.unwrap();
    cycle(&pool, "order:1").await;
    let mut client = server.client();
    let curators = "_c_0a1b2c3d-0a1b-4c2d-8e3f-0123456789ab-lock-";
    let first = client.create(&format!("{root}/order:1/{curators}"), true).unwrap();
    let waiting = acquire_in_task(&pool, "order:1");
    super::conformance::until_queued(server, &root, "order:1", 2).await;
    client.create(&format!("{root}/order:1/lock-"), true).unwrap();
    let shown = pool.inspect("order:1").await.unwrap();
    let holder = shown.holder.clone().unwrap();
    assert_eq!((holder.owner, holder.fence, holder.expires_in), (None, None, None));
    assert_eq!(shown.waiting, Some(2), "{shown:?}");
    assert!(shown.waiters[0].owner.is_some() && shown.waiters[1].owner.is_none(), "{shown:?}");
    client.delete(&first).unwrap();
    let (_, ours) = joined("ours", waiting).await;
    let next = pool.inspect("order:1").await.unwrap();
    assert_eq!(owner_of(&next), shown.waiters[0].owner);
    ours.release().await.unwrap();
}

/// One key that the login may not read is listed, and hides no other one.
#[tokio::test]
async fn a_queue_that_may_not_be_read_is_listed() {
    let (server, root) = ZooKeeperServer::shared();
    let pool = LockPool::connect(&server.url_of(&root)).await.unwrap();
    cycle(&pool, "order:1").await;
    let guard = pool.lock("order:2").acquire().await.unwrap();
    let mut client = server.client();
    // All but reading.
    client.set_rights(&format!("{root}/order:1"), 0b11110).unwrap();
    let listed = pool.list("*", 10).await.unwrap();
    let keys: Vec<_> = listed.keys.iter().map(|key| key.as_str()).collect();
    assert_eq!((keys, listed.is_complete), (vec!["order:1", "order:2"], true));
    let error = pool.inspect("order:1").await.unwrap_err();
    assert!(error.to_string().contains("refuses access"), "{error}");
    assert!(!pool.inspect("order:2").await.unwrap().is_free());
    client.set_rights(&format!("{root}/order:1"), 31).unwrap();
    assert_eq!(pool.list("*", 10).await.unwrap().keys.len(), 1);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn an_inspection_makes_no_node() {
    let (server, root) = ZooKeeperServer::shared();
    let pool = LockPool::connect(&server.url_of(&root)).await.unwrap();
    assert!(pool.inspect("order:1").await.unwrap().is_free());
    let children = server.client().children(&root).unwrap();
    assert!(!children.contains(&"order:1".to_owned()), "{children:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_tells_the_process_of_the_holder() {
    let (server, root) = ZooKeeperServer::shared();
    let holder = env!("CARGO_BIN_EXE_annotated-holder");
    let stored = || {
        let mut client = server.client();
        let names = server.queue(&root, "order:42");
        let data = names.iter().map(|name| client.data(&format!("{root}/order:42/{name}")));
        data.map(|data| String::from_utf8(data.unwrap()).unwrap()).collect()
    };
    tells_the_process_of_the_holder(&server.url_of(&root), holder, stored).await;
}
