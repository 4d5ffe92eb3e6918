//! The holder of a key and its queue, as rows tell them.

use lock_tests::forced::is_taken_from_its_holder;
use lock_tests::inspected::{
    ShownQueue, tells_the_holder_and_its_queue, tells_the_process_of_the_holder,
};
use lock_tests::listed::{lists_more_than_a_page, lists_the_locks_that_are_held};
use lock_tests::prelude::*;

use super::conformance::shared;

#[tokio::test]
async fn it_tells_the_holder_and_its_queue() {
    let url = shared().database("inspected");
    tells_the_holder_and_its_queue(&url, ShownQueue::Shown).await;
}

#[tokio::test]
async fn a_lock_is_taken_from_its_holder() {
    is_taken_from_its_holder(&shared().database("forced")).await;
}

#[tokio::test]
async fn held_locks_are_listed() {
    lists_the_locks_that_are_held(&shared().database("listed")).await;
}

#[tokio::test]
async fn more_locks_than_one_page_are_listed() {
    lists_more_than_a_page(&shared().database("pages")).await;
}

#[tokio::test]
async fn an_inspection_waits_for_no_row() {
    let server = shared();
    let pool = patient(server.database("inspected_rows"), ms(20_000)).await;
    let guard = pool.lock("order:1").renew(false).acquire().await.unwrap();
    let rows = "SELECT until, fence FROM inspected_rows.lock_lease";
    let before = server.query(rows);
    let locked = server.transaction("SELECT * FROM inspected_rows.lock_lease FOR UPDATE");
    let shown = pool.inspect("order:1").await.unwrap().holder.unwrap();
    assert_eq!(shown.fence, guard.fence());
    drop(locked);
    assert!(pool.inspect("order:2").await.unwrap().is_free());
    assert_eq!(server.query(rows), before);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_tells_the_process_of_the_holder() {
    let (server, url) = (shared(), shared().database("inspected_info"));
    let row = "SELECT CONVERT(info USING utf8mb4), channel, owner FROM inspected_info.lock_lease";
    let stored = || format!("{:?}", server.query(row));
    let holder = env!("CARGO_BIN_EXE_annotated-holder");
    tells_the_process_of_the_holder(&url, holder, stored).await;
}
