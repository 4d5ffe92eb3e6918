//! The holder of a key and its queue, as keys with leases tell them.

use lock_runtime::LockPool;
use lock_tests::EtcdServer;
use lock_tests::forced::is_taken_from_its_holder;
use lock_tests::inspected::{
    ShownQueue, owner_of, tells_the_holder_and_its_queue, tells_the_process_of_the_holder,
};
use lock_tests::listed::{lists_more_than_a_page, lists_the_locks_that_are_held};
use lock_tests::prelude::*;

use super::conformance::until_queued;

#[tokio::test]
async fn it_tells_the_holder_and_its_queue() {
    let (server, root) = EtcdServer::shared();
    tells_the_holder_and_its_queue(&server.url_of(&root), ShownQueue::Shown).await;
}

#[tokio::test]
async fn a_lock_is_taken_from_its_holder() {
    let (server, root) = EtcdServer::shared();
    is_taken_from_its_holder(&server.url_of(&root)).await;
}

#[tokio::test]
async fn held_locks_are_listed() {
    let (server, root) = EtcdServer::shared();
    lists_the_locks_that_are_held(&server.url_of(&root)).await;
}

#[tokio::test]
async fn more_locks_than_one_page_are_listed() {
    let (server, root) = EtcdServer::shared();
    lists_more_than_a_page(&server.url_of(&root)).await;
}

#[tokio::test]
async fn keys_of_other_clients_are_held_by_another_client() {
    let (server, root) = EtcdServer::shared();
    let pool = patient(server.url_of(&root), ms(20_000)).await;
    server.put(&format!("{root}/order:1/theirs"), 60);
    let waiting = acquire_in_task(&pool, "order:1");
    until_queued(server, &root, "order:1", 2).await;
    server.put(&format!("{root}/order:1/694d9c2a1b0c4e55"), 60);
    let shown = pool.inspect("order:1").await.unwrap();
    let holder = shown.holder.clone().unwrap();
    assert_eq!((holder.owner, holder.fence), (None, None));
    assert!(holder.expires_in.is_some_and(|left| left <= ms(60_000)), "{holder:?}");
    assert_eq!(shown.waiting, Some(2), "{shown:?}");
    assert!(shown.waiters[0].owner.is_some() && shown.waiters[1].owner.is_none(), "{shown:?}");
    server.delete(&format!("{root}/order:1/theirs"));
    let (_, ours) = joined("ours", waiting).await;
    assert_eq!(owner_of(&pool.inspect("order:1").await.unwrap()), shown.waiters[0].owner);
    ours.release().await.unwrap();
    server.delete(&format!("{root}/order:1/694d9c2a1b0c4e55"));
}

#[tokio::test]
async fn an_inspection_makes_no_revision() {
    let server = EtcdServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let before = server.revision();
    for _ in 0..5 {
        assert!(pool.inspect("order:2").await.unwrap().is_free());
        let holder = pool.inspect("order:1").await.unwrap().holder.unwrap();
        assert_eq!(holder.fence, guard.fence());
    }
    assert_eq!(server.revision(), before);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_tells_the_process_of_the_holder() {
    let (server, root) = EtcdServer::shared();
    let holder = env!("CARGO_BIN_EXE_annotated-holder");
    let name = format!("{root}/order:42/");
    let stored = || server.etcdctl(&["get", "--prefix", "--print-value-only", &name]);
    tells_the_process_of_the_holder(&server.url_of(&root), holder, stored).await;
}
