//! Curator's mutex and this store exclude each other, in one queue.

use std::path::PathBuf;

use lock_runtime::{ErrorKind, LockPool};
use lock_tests::prelude::*;
use lock_tests::{Worker, ZooKeeperServer};

use super::conformance::until_queued;

fn curator(server: &ZooKeeperServer, path: &str) -> Worker {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("foreign/zookeeper/Holder.java");
    let libraries = lock_tests::zookeeper::libraries().join("*");
    let address = format!("127.0.0.1:{}", server.port());
    let options = ["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"];
    let mut args: Vec<&str> = options.to_vec();
    args.extend([libraries.to_str().unwrap(), source.to_str().unwrap(), &address, path]);
    Worker::start("java", &args)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curators_mutex_and_this_store_share_one_queue() {
    let (server, root) = ZooKeeperServer::shared();
    let (url, key) = (server.url_of(&root), "order:1");
    let [one, other] = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    let theirs = curator(server, &format!("{root}/{key}"));
    let said = std::cell::Cell::new(0);
    let says = |expected: &str| {
        let line = format!("{} {expected}", said.replace(said.get() + 1));
        tokio::task::block_in_place(|| theirs.wait_for_line(DEADLINE, |it| it == line))
    };
    says("ready");
    for round in 0..3 {
        let ours = one.lock(key).acquire().await.unwrap();
        theirs.send_line("lock");
        until_queued(server, &root, key, 2).await;
        let next = acquire_in_task(&other, key);
        until_queued(server, &root, key, 3).await;
        ours.release().await.unwrap();
        // First come, first served: theirs is in, and ours behind it waits.
        says("in");
        assert!(!next.is_finished(), "round {round}: two holders");
        let error = one.lock(key).wait(ms(100)).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        theirs.send_line("free");
        says("out");
        let (_, next) = joined("ours behind theirs", next).await;
        theirs.send_line("try");
        says("busy");
        next.release().await.unwrap();
    }
    theirs.send_line("try");
    says("in");
    assert!(one.lock(key).try_acquire().await.unwrap().is_none());
    theirs.send_line("free");
    says("out");
}

/// Nodes by other names that end with a number, and numbers that have wrapped.
#[tokio::test]
async fn nodes_of_other_clients_count_in_the_order_of_their_numbers() {
    let (server, root) = ZooKeeperServer::shared();
    let pool = LockPool::connect(&server.url_of(&root)).await.unwrap();
    let mut client = server.client();
    for (key, name, is_before) in [
        ("plain", "lock-0000000000", true),
        // Two billion numbers behind the own one, so before it.
        ("wrapped", "_c_x-lock--000000007", true),
        ("other", "leases", false),
        ("kazoo", "9d4c__lock__0000000000", true),
    ] {
        cycle(&pool, key).await;
        let path = format!("{root}/{key}/{name}");
        client.create(&path, false).unwrap();
        let free = pool.lock(key).try_acquire().await.unwrap();
        assert_eq!(free.is_none(), is_before, "{name}");
        if let Some(guard) = free {
            guard.release().await.unwrap();
        }
        let queued = pool.lock(key).wait(ms(300)).acquire().await;
        assert_eq!(queued.is_err(), is_before, "{name}");
        drop(queued);
        client.delete(&path).unwrap();
        eventually_free(&pool, key).await;
    }
}

async fn eventually_free(pool: &LockPool, key: &str) {
    pool.lock(key).wait(DEADLINE).acquire().await.unwrap().release().await.unwrap();
}
