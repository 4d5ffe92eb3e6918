//! `etcdctl lock`, which is Go's `concurrency.Mutex`, and this store exclude each other, in one queue.

use lock_runtime::ErrorKind;
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, Worker};

use super::conformance::until_queued;

fn etcdctl_lock(server: &EtcdServer, name: &str) -> Worker {
    let endpoint = server.etcdctl_endpoint();
    Worker::start_with_env("etcdctl", &[&endpoint, "lock", name], &[("ETCDCTL_API", "3")])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_and_this_store_share_one_queue() {
    let (server, root) = EtcdServer::shared();
    let (url, key) = (server.url_of(&root), "order:1");
    let [one, other] = [patient(&url, ms(20_000)).await, patient(&url, ms(20_000)).await];
    let name = format!("{root}/{key}");
    for round in 0..3 {
        let ours = one.lock(key).acquire().await.unwrap();
        let theirs = etcdctl_lock(server, &name);
        until_queued(server, &root, key, 2).await;
        let next = acquire_in_task(&other, key);
        until_queued(server, &root, key, 3).await;
        ours.release().await.unwrap();
        // First come, first served: theirs is in, and ours behind it waits.
        tokio::task::block_in_place(|| {
            theirs.wait_for_line(DEADLINE, |line| line.starts_with(&name))
        });
        assert!(!next.is_finished(), "round {round}: two holders");
        let error = one.lock(key).wait(ms(100)).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(one.lock(key).try_acquire().await.unwrap().is_none());
        theirs.terminate();
        let (_, next) = joined("ours behind theirs", next).await;
        let blocked = etcdctl_lock(server, &name);
        until_queued(server, &root, key, 2).await;
        assert_eq!(blocked.stdout(), [""; 0], "round {round}: two holders");
        next.release().await.unwrap();
        tokio::task::block_in_place(|| {
            blocked.wait_for_line(DEADLINE, |line| line.starts_with(&name))
        });
        blocked.terminate();
        until_queued(server, &root, key, 0).await;
    }
}

/// Keys of other programs below the name of a lock count in the order of their creation.
#[tokio::test]
async fn keys_of_other_clients_are_owners() {
    let (server, root) = EtcdServer::shared();
    let pool = patient(server.url_of(&root), ms(20_000)).await;
    cycle(&pool, "order:1").await;
    server.put(&format!("{root}/order:1/theirs"), 60);
    assert!(pool.lock("order:1").try_acquire().await.unwrap().is_none());
    let waiting = acquire_in_task(&pool, "order:1");
    until_queued(server, &root, "order:1", 2).await;
    // Behind ours.
    server.put(&format!("{root}/order:1/another"), 60);
    server.delete(&format!("{root}/order:1/theirs"));
    joined("the waiter", waiting).await.1.release().await.unwrap();
    server.delete(&format!("{root}/order:1/another"));
    cycle(&pool, "order:1").await;
}
