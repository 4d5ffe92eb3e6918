//! `lockctl ls`, `show` and `release` where the way to the lock is a different one.

use lock_runtime::ErrorKind;
use lock_tests::lockctl::{Ended, lockctl, run};
use lock_tests::prelude::*;
use lock_tests::{Quorum, Watched, ZooKeeperServer, eventually_async};
use serde_json::json;
use tokio::task::block_in_place;

/// The lock of another process is listed and shown with its process, and taken from it for an operator.
async fn is_shown_and_released(url: &str) {
    let ask = |args: &[&str]| -> Ended {
        block_in_place(|| run(lockctl(args.iter().copied().chain(["--url", url]))))
    };
    let pool = patient(url, ms(6_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let owner = json!(pool.snapshot().held[0].owner.to_string());
    let process = json!(std::process::id());

    let listed = ask(&["ls", "order:*"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    let lock = &listed.json()["locks"][0];
    assert_eq!((&lock["key"], &lock["holder"]["owner"]), (&json!("order:1"), &owner), "{lock:#}");
    assert_eq!(lock["holder"]["info"]["process_id"], process, "{lock:#}");
    let shown = ask(&["show", "order:1"]);
    assert_eq!((shown.code, &*shown.stderr), (0, ""), "{shown:?}");
    let shown = shown.json();
    assert_eq!(shown["holder"]["owner"], owner, "{shown:#}");
    assert_eq!(shown["holder"]["info"]["process_id"], process, "{shown:#}");

    let refused = ask(&["release", "order:1", "--yes"]);
    assert_eq!((refused.code, &*refused.stdout), (2, ""), "{refused:?}");
    guard.verify().await.unwrap();
    let taken = ask(&["release", "order:1", "--force", "--yes", "--operator", "alice"]);
    assert_eq!((taken.code, &taken.json()["released"]), (0, &json!(true)), "{taken:?}");
    let event = taken.stderr.lines().find(|line| line.contains("released by force"));
    assert!(event.is_some_and(|event| event.contains("by=alice at ")), "{taken:?}");
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    drop(guard);
    eventually_async(DEADLINE, "it is free", async || ask(&["show", "order:1"]).code == 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_behind_sentinels() {
    let watched = Watched::start().without_failover();
    is_shown_and_released(&watched.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn zookeeper() {
    let (server, root) = ZooKeeperServer::shared();
    is_shown_and_released(&server.url_of(&root)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum() {
    let quorum = Quorum::start(3);
    is_shown_and_released(&quorum.url()).await;
}
