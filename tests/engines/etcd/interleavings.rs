//! Events between two steps of a request, each brought about on purpose.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Instant;

use lock_runtime::Key;
use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, FailureKind, LeaseRef, Owner, ReleaseOutcome,
    ReleaseRequest, Successor, WaitMode,
};
use lock_runtime::testing::open_backend;
use lock_tests::etcd::{StoredKey, url_at};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{EtcdServer, FaultProxy, Latency, eventually_async};
use serde_json::{Value, json};

use super::conformance::{until_nothing_is_left, until_queued};

fn request(key: &str) -> AcquireRequest {
    let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
    AcquireRequest::new(keys, Owner::random().unwrap(), ms(20_000))
}

fn queued_request(key: &str) -> AcquireRequest {
    let mut request = request(key);
    request.enqueue = true;
    request
}

async fn acquire(store: &impl Backend, request: &AcquireRequest) -> AcquireOutcome {
    store.acquire(std::slice::from_ref(request)).await.remove(0).unwrap()
}

fn is_granted(outcome: &AcquireOutcome) -> bool {
    matches!(outcome, AcquireOutcome::Acquired { .. })
}

fn is_queued(outcome: &AcquireOutcome) -> bool {
    matches!(outcome, AcquireOutcome::Contended { wait_mode: WaitMode::Queued { .. }, .. })
}

/// The one key below `root` that says which connection may put keys under the lease of the pool.
fn lease_key(server: &EtcdServer, root: &str) -> StoredKey {
    let mut keys = server.keys(&format!("{root}/%lease/"));
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.remove(0)
}

/// The number of the connection that may.
fn number(server: &EtcdServer, lease: &StoredKey) -> String {
    server.etcdctl(&["get", "--print-value-only", &lease.name]).trim().to_owned()
}

/// Sends a put of `key` as an acquire on connection `number` has it. Whether it was executed.
fn put_as(server: &EtcdServer, lease: &StoredKey, number: &str, key: &str) -> bool {
    let base64 = |text: &str| lock_tests::etcd::base64(text.as_bytes());
    let transaction = json!({
        "compare": [{
            "target": "VALUE", "result": "EQUAL",
            "key": base64(&lease.name), "value": base64(number),
        }],
        "success": [{ "requestPut": {
            "key": base64(key), "lease": lease.lease.to_string(),
        }}],
    });
    server.post("kv/txn", &transaction)["succeeded"] == Value::Bool(true)
}

/// What a connection has left on its way puts no key once another connection serves.
///
/// The conditions of the pool's own transactions are the subject of `each_put_wants_the_number_of_its_connection`.
#[tokio::test]
async fn a_late_transaction_of_a_former_connection_puts_nothing() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let pool = patient(url_at(proxy.port(), &root), ms(20_000)).await;
    cycle(&pool, "order:1").await;
    let (lease, late) = (lease_key(server, &root), format!("{root}/order:1/late"));
    let former = number(server, &lease);
    assert!(put_as(server, &lease, &former, &late), "the connection serves");
    server.delete(&late);
    proxy.cut();
    cycle(&pool, "order:1").await;
    assert_ne!(number(server, &lease), former);
    assert!(!put_as(server, &lease, &former, &late), "another connection serves");
    until_nothing_is_left(server, &root).await;
}

/// The number of another connection stands there: an acquire in and outside of the queue, a renewal that moves the key, and a release
/// with a successor find it, and write the present one first.
#[tokio::test]
async fn each_put_wants_the_number_of_its_connection() {
    const FOREIGN: &str = "1000000007";
    let (server, root) = EtcdServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let release = async |request: &AcquireRequest| {
        store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0).unwrap()
    };
    let first = request("order:1");
    assert!(is_granted(&acquire(&store, &first).await));
    let lease = lease_key(server, &root);
    let own = number(server, &lease);
    release(&first).await;
    for acquired in [request("order:1"), queued_request("order:1")] {
        server.change(&lease.name, FOREIGN);
        assert!(is_granted(&acquire(&store, &acquired).await));
        assert_eq!(number(server, &lease), own, "an acquire");
        assert!(!put_as(server, &lease, FOREIGN, &format!("{root}/order:1/late")));
        let next = queued_request("order:1");
        let mut passing = ReleaseRequest::new(acquired.lease());
        passing.successor = Some(Successor::new(next.owner, next.ttl));
        server.change(&lease.name, FOREIGN);
        let passed = store.release(&[passing]).await.remove(0).unwrap();
        assert_eq!(passed, ReleaseOutcome::Freed, "it is released without the successor");
        assert_eq!(number(server, &lease), own, "a release with a successor");
    }
    // A key under the lease of a shorter ttl goes under that of a longer one.
    let mut short = request("order:1");
    short.ttl = ms(3_000);
    assert!(is_granted(&acquire(&store, &short).await));
    let longer = LeaseRef::new(short.keys.clone(), short.owner, ms(20_000));
    server.change(&lease.name, FOREIGN);
    eventually_async(DEADLINE, "it is renewed", async || {
        store.renew(std::slice::from_ref(&longer)).await.remove(0).is_ok()
    })
    .await;
    assert_eq!(number(server, &lease), own, "a renewal");
    assert_eq!(server.queue(&root, "order:1")[0].lease, lease.lease);
    release(&short).await;
    until_nothing_is_left(server, &root).await;
}

/// A connection begins with a full database, so that its number cannot be written. Then there is space again.
#[tokio::test]
async fn a_late_transaction_puts_nothing_when_a_full_database_has_space_again() {
    let server = EtcdServer::builder().setting("quota-backend-bytes", 1 << 20).start();
    let proxy = FaultProxy::to_port(server.port());
    let pool = patient(url_at(proxy.port(), "/locks"), ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let (lease, late) = (lease_key(&server, "/locks"), "/locks/order:1/late");
    let former = number(&server, &lease);
    let full = json!({ "key": "Zg==", "value": "A".repeat(400_000) });
    eventually_async(DEADLINE, "the alarm is raised", async || {
        server.try_post("kv/put", &full, DEADLINE).is_err()
    })
    .await;
    proxy.cut();
    eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    server.delete("f");
    server.compact();
    server.etcdctl(&["defrag"]);
    server.etcdctl(&["alarm", "disarm"]);
    assert!(!put_as(&server, &lease, &former, late), "another connection serves");
    eventually_async(DEADLINE, "it grants", async || {
        match pool.lock("order:1").wait(ms(1_000)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    assert!(!put_as(&server, &lease, &former, late), "another connection serves");
    assert!(put_as(&server, &lease, &number(&server, &lease), late), "there is space");
}

/// The deletion may still be executed, so the owner's next grant is by a key of its own.
#[tokio::test]
async fn a_key_whose_deletion_has_no_answer_is_not_granted_again() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = open_backend(&url_at(proxy.port(), &root)).await.unwrap();
    let mut request = request("order:1");
    request.fencing = true;
    let fence = |outcome| match outcome {
        AcquireOutcome::Acquired { fence: Some(fence), .. } => fence,
        other => panic!("not granted with a fence: {other:?}"),
    };
    let first = fence(acquire(&store, &request).await);
    proxy.hold(Direction::ToServer);
    let release = [ReleaseRequest::new(request.lease())];
    let released = tokio::time::timeout(ms(300), store.release(&release)).await;
    assert!(released.is_err(), "the deletion is held: {released:?}");
    proxy.cut();
    proxy.release_held();
    request.attempt = 1;
    let second = loop {
        // The connection is made again meanwhile.
        match store.acquire(std::slice::from_ref(&request)).await.remove(0) {
            Ok(outcome) => break fence(outcome),
            Err(error) => assert!(error.kind() != FailureKind::Rejected, "{error}"),
        }
        tokio::time::sleep(ms(5)).await;
    };
    assert!(second > first, "{second:?} is of the key that was about to be deleted: {first:?}");
    assert_eq!(store.release(&release).await.remove(0).unwrap(), ReleaseOutcome::Freed);
    until_nothing_is_left(server, &root).await;
}

/// An operator deletes the key that says which connection may put keys.
#[tokio::test]
async fn the_key_of_a_lease_is_made_again() {
    let (server, root) = EtcdServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    for enqueue in [false, true] {
        let mut first = request("order:1");
        first.enqueue = enqueue;
        assert!(is_granted(&acquire(&store, &first).await));
        for key in server.keys(&format!("{root}/%lease/")) {
            server.delete(&key.name);
        }
        let mut other = request("order:2");
        other.enqueue = enqueue;
        assert!(is_granted(&acquire(&store, &other).await));
        for request in [first, other] {
            let release = [ReleaseRequest::new(request.lease())];
            let released = store.release(&release).await.remove(0).unwrap();
            assert_eq!(released, ReleaseOutcome::Freed);
        }
    }
}

/// While the connection is down, the predecessor goes and the server forgets when.
///
/// The server is its own: a compaction ends each `etcdctl lock` that waits.
#[tokio::test]
async fn a_watch_that_misses_changes_by_a_compaction_looks_again() {
    let (server, root) = (&EtcdServer::start(), "/locks".to_owned());
    let proxy = FaultProxy::to_port(server.port());
    let one = patient(server.url_of(&root), ms(20_000)).await;
    let other = patient(url_at(proxy.port(), &root), ms(20_000)).await;
    let forget = || {
        server.put(&format!("{root}-other/key"), 60);
        server.compact();
    };
    let (mut took, mut told) =
        (Latency::below(ms(1_000) + NOISE, 3), Latency::below(ms(2_000) + NOISE, 3));
    while took.wants_more() || told.wants_more() {
        let guard = one.lock("order:1").acquire().await.unwrap();
        let held = other.lock("order:2").acquire().await.unwrap();
        let waiting = acquire_in_task(&other, "order:1");
        until_queued(server, &root, "order:1", 2).await;
        proxy.refuse(true);
        proxy.cut();
        eventually_async(DEADLINE, "it is cut", async || proxy.open_connections() == 0).await;
        forget();
        release(guard).await;
        forget();
        let reachable = Instant::now();
        proxy.refuse(false);
        let (acquired, guard) = joined("the waiter", waiting).await;
        took.push(acquired.saturating_duration_since(reachable));
        // The held key is watched again too.
        let key = server.queue(&root, "order:2").remove(0);
        server.delete(&key.name);
        let deleted = Instant::now();
        let error = within(DEADLINE, "the loss", held.lost()).await;
        assert!(error.is_lost(), "{error}");
        told.push(deleted.elapsed());
        guard.release().await.unwrap();
    }
    until_nothing_is_left(server, &root).await;
}

/// A renewal asks the server, whatever the pool remembers.
#[tokio::test]
async fn a_renewal_is_an_answer_to_its_own_question() {
    let (server, root) = EtcdServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = open_backend(&url_at(proxy.port(), &root)).await.unwrap();
    let request = request("order:1");
    assert!(is_granted(&acquire(&store, &request).await));
    let lease = [request.lease()];
    store.renew(&lease).await.remove(0).unwrap();
    // Answers that were sent before the call do not count.
    proxy.hold(Direction::ToServer);
    let renewed = store.renew(&lease).await.remove(0);
    assert!(renewed.is_err(), "{renewed:?}");
    proxy.release_held();
    eventually_async(DEADLINE, "it answers", async || store.renew(&lease).await.remove(0).is_ok())
        .await;
    store.release(&[ReleaseRequest::new(request.lease())]).await.remove(0).unwrap();
}

#[tokio::test]
async fn a_successor_is_granted_or_queued_in_the_step_of_the_release() {
    let (server, root) = EtcdServer::shared();
    let url = server.url_of(&root);
    let [one, other] = [open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()];
    for is_wanted in [false, true] {
        let first = request("order:1");
        assert!(is_granted(&acquire(&one, &first).await));
        let theirs = queued_request("order:1");
        if is_wanted {
            assert!(is_queued(&acquire(&other, &theirs).await));
        }
        let mut next = queued_request("order:1");
        let mut release = ReleaseRequest::new(first.lease());
        release.successor = Some(Successor::new(next.owner, next.ttl));
        let released = one.release(&[release]).await.remove(0).unwrap();
        next.attempt = 1;
        let outcome = acquire(&one, &next).await;
        if is_wanted {
            assert!(matches!(released, ReleaseOutcome::SuccessorQueued { .. }), "{released:?}");
            assert!(is_queued(&outcome), "{outcome:?}");
            assert!(is_granted(&acquire(&other, &theirs).await));
            other.release(&[ReleaseRequest::new(theirs.lease())]).await.remove(0).unwrap();
            assert!(is_granted(&acquire(&one, &next).await));
        } else {
            assert_eq!(released, ReleaseOutcome::SuccessorGranted);
            assert!(is_granted(&outcome), "{outcome:?}");
        }
        let release = [ReleaseRequest::new(next.lease())];
        assert_eq!(one.release(&release).await.remove(0).unwrap(), ReleaseOutcome::Freed);
        until_nothing_is_left(server, &root).await;
    }
}

/// A request outside of the queue behind an earlier one in it.
#[tokio::test]
async fn a_request_outside_of_the_queue_leaves_it() {
    let (server, root) = EtcdServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let first = request("order:1");
    assert!(is_granted(&acquire(&store, &first).await));
    let mut queued = queued_request("order:1");
    assert!(is_queued(&acquire(&store, &queued).await));
    (queued.enqueue, queued.attempt) = (false, 1);
    let outcome = acquire(&store, &queued).await;
    assert!(!is_granted(&outcome) && !is_queued(&outcome), "{outcome:?}");
    assert_eq!(server.queue(&root, "order:1").len(), 1);
    store.release(&[ReleaseRequest::new(first.lease())]).await.remove(0).unwrap();
}

/// Several keys are in no queue, whatever the request says.
#[tokio::test]
async fn a_request_for_several_keys_does_not_queue() {
    let (server, root) = EtcdServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let mut both = request("order:1");
    both.keys = Arc::new([Key::from("order:1"), Key::from("order:2")]);
    both.enqueue = true;
    let first = request("order:2");
    assert!(is_granted(&acquire(&store, &first).await));
    let outcome = acquire(&store, &both).await;
    assert!(!is_granted(&outcome) && !is_queued(&outcome), "{outcome:?}");
    assert!(server.queue(&root, "order:1").is_empty());
    store.release(&[ReleaseRequest::new(first.lease())]).await.remove(0).unwrap();
    assert!(is_granted(&acquire(&store, &both).await));
    store.release(&[ReleaseRequest::new(both.lease())]).await.remove(0).unwrap();
    until_nothing_is_left(server, &root).await;
}
