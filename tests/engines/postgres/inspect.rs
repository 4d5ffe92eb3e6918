//! The holder of a key and its queue, as rows tell them.

use lock_tests::PostgresServer;
use lock_tests::forced::is_taken_from_its_holder;
use lock_tests::inspected::{
    ShownQueue, tells_the_holder_and_its_queue, tells_the_process_of_the_holder,
};
use lock_tests::listed::{lists_more_than_a_page, lists_the_locks_that_are_held};
use lock_tests::prelude::*;

#[tokio::test]
async fn it_tells_the_holder_and_its_queue() {
    let server = PostgresServer::start();
    tells_the_holder_and_its_queue(&server.url(), ShownQueue::Shown).await;
}

#[tokio::test]
async fn a_lock_is_taken_from_its_holder() {
    let server = PostgresServer::start();
    is_taken_from_its_holder(&server.url()).await;
}

#[tokio::test]
async fn held_locks_are_listed() {
    let server = PostgresServer::start();
    lists_the_locks_that_are_held(&server.url()).await;
}

#[tokio::test]
async fn more_locks_than_one_page_are_listed() {
    let server = PostgresServer::start();
    lists_more_than_a_page(&server.url()).await;
}

#[tokio::test]
async fn an_inspection_writes_no_row_and_waits_for_none() {
    let server = PostgresServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let guard = pool.lock("order:1").renew(false).acquire().await.unwrap();
    let rows = "SELECT xmin, xmax, until, fence FROM lock_lease";
    let before = server.query(rows);
    let locked = server.transaction("SELECT * FROM lock_lease FOR UPDATE");
    let shown = pool.inspect("order:1").await.unwrap().holder.unwrap();
    assert_eq!(shown.fence, guard.fence());
    drop(locked);
    assert!(pool.inspect("order:2").await.unwrap().is_free());
    let after = server.query("SELECT xmin, until, fence FROM lock_lease");
    let [row] = &before[..] else { panic!("one row: {before:?}") };
    assert_eq!(after, [[row[0].as_str(), &row[2], &row[3]]]);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_tells_the_process_of_the_holder() {
    let server = PostgresServer::start();
    let row = "SELECT encode(info, 'escape'), channel, encode(owner, 'escape') FROM lock_lease";
    let stored = || format!("{:?}", server.query(row));
    let holder = env!("CARGO_BIN_EXE_annotated-holder");
    tells_the_process_of_the_holder(&server.url(), holder, stored).await;
}
