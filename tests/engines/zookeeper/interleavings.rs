//! Events between two steps of a request, each brought about on purpose.

#![allow(clippy::disallowed_methods)]

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, FailureKind, LeaseRef, LeaseStatus, Owner,
    ReleaseOutcome, ReleaseRequest, Successor,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{Credentials, Key, LockPool, Wait};
use lock_tests::poll::poll_n;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::zookeeper::url_at;
use lock_tests::{FaultProxy, Worker, ZooKeeperServer, eventually_async};
use tokio::task::JoinSet;

use super::conformance::{until_nothing_is_left, until_queued};

/// The right to make nodes below one, as a bit.
const CREATE: i32 = 4;
/// The right to delete them.
const DELETE: i32 = 8;

fn request(key: &str, ttl: u64) -> AcquireRequest {
    let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
    AcquireRequest::new(keys, Owner::random().unwrap(), ms(ttl))
}

fn queued_request(key: &str, ttl: u64) -> AcquireRequest {
    let mut request = request(key, ttl);
    request.enqueue = true;
    request
}

async fn acquire(store: &impl Backend, request: &AcquireRequest) -> AcquireOutcome {
    store.acquire(std::slice::from_ref(request)).await.remove(0).unwrap()
}

fn is_granted(outcome: &AcquireOutcome) -> bool {
    matches!(outcome, AcquireOutcome::Acquired { .. })
}

async fn renew(store: &impl Backend, lease: &LeaseRef) -> Result<LeaseStatus, FailureKind> {
    let renewed = store.renew(std::slice::from_ref(lease)).await.remove(0);
    renewed.map_err(|error| error.kind())
}

/// The session is known at the leader only up to its last sign of life, whatever its server answers.
#[tokio::test]
async fn a_process_that_stood_still_connects_anew_before_it_reads_an_answer() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let (url, dir) = (url_at(proxy.port(), &root), tempfile::tempdir().unwrap());
    let program = env!("CARGO_BIN_EXE_waiter");
    let worker = Worker::start(program, &[&url, dir.path().to_str().unwrap(), "one", "8000"]);
    worker.send_line("lock");
    until_queued(server, &root, "k", 1).await;
    worker.wait_for_line(DEADLINE, |line| line.starts_with("in "));
    let node = server.queue(&root, "k");
    let before = proxy.connections();
    worker.pause();
    // Longer than signs of life may be late, and shorter than the session and the lease.
    tokio::time::sleep(ms(2_000)).await;
    worker.resume();
    eventually_async(DEADLINE, "another connection", async || proxy.connections() > before).await;
    assert_eq!(server.queue(&root, "k"), node, "the session goes on");
    worker.send_line("free");
    worker.wait_for_line(DEADLINE, |line| line == "out");
    worker.kill();
}

/// A hold of `k` through `proxy` that a retry over another connection has moved. What tells the first store of it is kept
/// back. Returns both stores.
async fn moved_hold(
    server: &ZooKeeperServer,
    root: &str,
    proxy: &FaultProxy,
) -> (impl Backend, impl Backend, AcquireRequest) {
    let store = open_backend(&url_at(proxy.port(), root)).await.unwrap();
    let other = open_backend(&server.url_of(root)).await.unwrap();
    let mut mine = request("k", 20_000);
    assert!(is_granted(&acquire(&store, &mine).await));
    let before = server.queue(root, "k");
    proxy.hold(Direction::ToClient);
    mine.attempt = 1;
    assert!(is_granted(&acquire(&other, &mine).await));
    let retried = server.queue(root, "k");
    assert!(retried.len() == 1 && retried != before, "{retried:?}");
    (store, other, mine)
}

/// The notification that its node is gone has not arrived when the release is sent.
#[tokio::test]
async fn a_release_ends_the_hold_of_a_retry_over_another_connection() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let (store, _other, mine) = moved_hold(server, &root, &proxy).await;
    let lease = ReleaseRequest::new(LeaseRef::new(mine.keys.clone(), mine.owner, mine.ttl));
    let release = async || store.release(std::slice::from_ref(&lease)).await.remove(0).unwrap();
    let mut releasing = pin!(release());
    assert!(poll_once(releasing.as_mut()).await.is_none(), "its answer is held");
    proxy.release_held();
    assert_eq!(releasing.await, ReleaseOutcome::Freed);
    assert_eq!(server.queue(&root, "k"), [""; 0]);
    assert_eq!(release().await, ReleaseOutcome::NotHeld);
}

/// As above, with a successor: there is no node that could be passed on to it.
#[tokio::test]
async fn a_release_for_a_successor_ends_the_hold_of_a_retry_too() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let (store, _other, mine) = moved_hold(server, &root, &proxy).await;
    let mut lease = ReleaseRequest::new(mine.lease());
    lease.successor = Some(Successor::new(Owner::random().unwrap(), ms(20_000)));
    let releases = [lease];
    let mut releasing = pin!(store.release(&releases));
    assert!(poll_n(releasing.as_mut(), 3).await.is_pending(), "its answer is held");
    proxy.release_held();
    let released = within(DEADLINE, "the release", releasing).await.remove(0);
    assert_eq!(released.unwrap(), ReleaseOutcome::Freed);
    assert_eq!(server.queue(&root, "k"), [""; 0]);
}

/// The notification comes in the same bytes as the list that has set the watch.
#[tokio::test]
async fn a_waiter_that_queues_right_behind_the_list_of_a_grant_is_served() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let builder = LockPool::builder(url_at(proxy.port(), &root)).ttl(ms(20_000));
    let builder = builder.wait(Wait::Forever).request_timeout(ms(5_000));
    let pool = builder.connect().await.unwrap();
    let other = patient(server.url_of(&root), ms(20_000)).await;
    cycle(&pool, "order:1").await;
    proxy.hold(Direction::ToClient);
    let over = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let (pool, over) = (pool.clone(), over.clone());
        tasks.spawn(async move {
            while !over.load(Ordering::SeqCst) {
                // Without fences, hand-offs in the process end only with a renewal, after more than six seconds.
                let acquiring = pool.lock("order:1").fencing(false).acquire();
                let guard = acquiring.await.unwrap();
                tokio::time::sleep(ms(2)).await;
                guard.release().await.unwrap();
            }
        });
    }
    until_queued(server, &root, "order:1", 1).await;
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(server, &root, "order:1", 2).await;
    proxy.release_held();
    let granted = Instant::now();
    let (acquired, guard) = joined("the other process", waiting).await;
    let took = acquired.saturating_duration_since(granted);
    assert!(took < ms(3_000) + NOISE, "{took:?}");
    guard.release().await.unwrap();
    over.store(true, Ordering::SeqCst);
    within(DEADLINE, "all tasks", tasks.join_all()).await;
}

/// The watch of a held key is used up, and the list that would set another one is refused.
#[tokio::test]
async fn a_held_key_without_a_watch_is_looked_at() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = open_backend(&url_at(proxy.port(), &root)).await.unwrap();
    let claim = request("order:1", 20_000);
    assert!(is_granted(&acquire(&store, &claim).await));
    let container = format!("{root}/order:1");
    let mut client = server.client();
    let node = server.queue(&root, "order:1").remove(0);
    // The list that answers the notification waits until there is no right to read. Without that, no notification is sent.
    proxy.hold(Direction::ToServer);
    client.create(&format!("{container}/other"), false).unwrap();
    client.set_rights(&container, 2 | 4 | 8 | 16).unwrap();
    client.delete(&format!("{container}/{node}")).unwrap();
    proxy.release_held();
    eventually_async(DEADLINE, "the renewal fails", async || {
        renew(&store, &claim.lease()).await == Err(FailureKind::Rejected)
    })
    .await;
    client.set_rights(&container, 31).unwrap();
    assert_eq!(renew(&store, &claim.lease()).await, Ok(LeaseStatus::NotHeld));
}

/// The node is there, so the request has to be undone.
#[tokio::test]
async fn a_list_that_is_refused_behind_a_creation_is_ambiguous() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let other = patient(server.url_of(&root), ms(20_000)).await;
    cycle(&other, "order:1").await;
    let mut client = server.client();
    client.set_rights(&format!("{root}/order:1"), 2 | 4 | 8 | 16).unwrap();
    let claim = queued_request("order:1", 20_000);
    let error = store.acquire(std::slice::from_ref(&claim)).await.remove(0).unwrap_err();
    assert_eq!(error.kind(), FailureKind::MaybeApplied, "{error}");
    client.set_rights(&format!("{root}/order:1"), 31).unwrap();
    assert_eq!(server.queue(&root, "order:1").len(), 1, "the node is there");
    store.release(&[ReleaseRequest::new(claim.lease())]).await.remove(0).unwrap();
    cycle(&other, "order:1").await;
    until_nothing_is_left(server, &root).await;
}

/// A request outside of the queue is dropped behind its creation, and repeated when another owner is before it.
#[tokio::test]
async fn a_refused_try_leaves_nothing_in_the_queue() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    for polls in 1..6 {
        let key = format!("order:{polls}");
        for _ in 0..2 {
            let claim = request(&key, 20_000);
            assert!(is_granted(&acquire(&store, &claim).await));
            store.release(&[ReleaseRequest::new(claim.lease())]).await.remove(0).unwrap();
        }
        let mut claim = request(&key, 20_000);
        let _ = poll_n(store.acquire(std::slice::from_ref(&claim)), polls).await;
        let mut client = server.client();
        let before = "lock-0000000000".to_owned();
        client.create(&format!("{root}/{key}/{before}"), false).unwrap();
        claim.attempt = 1;
        assert!(!is_granted(&acquire(&store, &claim).await), "another owner is before it");
        assert_eq!(server.queue(&root, &key), [before], "after {polls} polls");
    }
}

/// The servers delete a container only if it had a node.
#[tokio::test]
async fn a_dropped_acquire_leaves_no_container_that_was_never_used() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    for polls in 1..7 {
        let mut claim = request(&format!("order:{polls}"), 300);
        claim.enqueue = polls % 2 == 0;
        let _ = poll_n(store.acquire(std::slice::from_ref(&claim)), polls).await;
    }
    // Behind all that was sent before.
    assert!(is_granted(&acquire(&store, &request("last", 300)).await));
    let mut client = server.client();
    let keys = client.children(&root).unwrap();
    assert!(keys.len() > 1, "{keys:?}");
    for key in keys {
        assert!(client.changes_of_children(&format!("{root}/{key}")) > 0, "{key}");
    }
    until_nothing_is_left(server, &root).await;
}

/// An acquire of the one owner is in progress, and does not end.
#[tokio::test]
async fn a_lease_without_an_answer_delays_no_other_renewal() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let (held, stuck) = (request("order:1", 20_000), request("order:2", 20_000));
    assert!(is_granted(&acquire(&store, &held).await));
    let mut acquiring = pin!(store.acquire(std::slice::from_ref(&stuck)));
    assert!(poll_once(acquiring.as_mut()).await.is_none());
    let leases = [stuck.lease(), held.lease()];
    let renewed = within(DEADLINE, "the renewals", store.renew(&leases)).await;
    assert_eq!(renewed[0].as_ref().unwrap_err().kind(), FailureKind::MaybeApplied);
    assert_eq!(*renewed[1].as_ref().unwrap(), LeaseStatus::Held);
    assert!(is_granted(acquiring.await[0].as_ref().unwrap()));
}

/// A former call of the one owner is in progress, and does not end.
#[tokio::test]
async fn an_acquire_without_an_answer_withholds_no_other() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let (free, stuck) = (request("order:1", 20_000), request("order:2", 20_000));
    let mut acquiring = pin!(store.acquire(std::slice::from_ref(&stuck)));
    assert!(poll_once(acquiring.as_mut()).await.is_none());
    let requests = [stuck.clone(), free];
    let outcomes = within(DEADLINE, "the outcomes", store.acquire(&requests)).await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().kind(), FailureKind::MaybeApplied);
    assert!(is_granted(outcomes[1].as_ref().unwrap()));
    assert!(is_granted(acquiring.await[0].as_ref().unwrap()));
}

/// New connections reach an address that takes them and is silent, and the one class of ttls has no session yet.
#[tokio::test]
async fn a_session_that_does_not_open_fails_only_the_requests_of_its_ttls() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = open_backend(&url_at(proxy.port(), &root)).await.unwrap();
    // The first one uses the session that is always open.
    let requests = [request("order:1", 37_000), request("order:2", 1_000)];
    assert!(is_granted(&acquire(&store, &request("order:3", 37_000)).await));
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    proxy.redirect(silent.local_addr().unwrap().port());
    // Shorter than an attempt to connect.
    let outcomes = within(ms(4_000), "the outcomes", store.acquire(&requests)).await;
    assert!(is_granted(outcomes[0].as_ref().unwrap()));
    let error = outcomes[1].as_ref().unwrap_err();
    assert_eq!(error.kind(), FailureKind::NotApplied, "{error}");
    assert!(error.to_string().contains("not opened a session"), "{error}");
    proxy.redirect(server.port());
    proxy.cut();
    eventually_async(DEADLINE, "the session opens", async || {
        let acquired = store.acquire(&requests[1..]).await.remove(0);
        acquired.as_ref().is_ok_and(is_granted)
    })
    .await;
}

/// The claims of a pool hold its sessions, and sessions report to the claims.
#[tokio::test]
async fn a_pool_that_is_dropped_ends_its_sessions() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let claims = ["order:1", "order:2"].map(|key| request(key, 20_000));
    for claim in &claims {
        assert!(is_granted(&acquire(&store, claim).await));
    }
    let queued = queued_request("order:2", 8_000);
    assert!(!is_granted(&acquire(&store, &queued).await));
    // A key that stays locked for a minute has a session that goes on until its timeout.
    let kept = request("order:3", 500);
    assert!(is_granted(&acquire(&store, &kept).await));
    let mut release = ReleaseRequest::new(kept.lease());
    release.free_after = ms(1_000);
    let released = store.release(&[release]).await.remove(0).unwrap();
    assert_eq!(released, ReleaseOutcome::Freed);
    drop(store);
    eventually_async(ms(3_000) + NOISE, "the sessions are closed", async || {
        ["order:1", "order:2"].iter().all(|key| server.queue(&root, key).is_empty())
    })
    .await;
    eventually_async(DEADLINE, "the session has timed out", async || {
        server.queue(&root, "order:3").is_empty()
    })
    .await;
}

/// The watch of a held key reports that another owner queues, and nothing more until it is set again.
#[tokio::test]
async fn a_node_that_is_deleted_after_the_report_of_its_watch_is_not_renewed() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = Arc::new(open_backend(&url_at(proxy.port(), &root)).await.unwrap());
    let mut client = server.client();
    let mut renewed = Err(FailureKind::NotApplied);
    // A renewal that comes after the time limit proves nothing.
    eventually_async(DEADLINE, "a renewal is answered", async || {
        let claim = request("order:1", 20_000);
        assert!(is_granted(&acquire(&*store, &claim).await));
        let container = format!("{root}/order:1");
        let node = format!("{container}/{}", client.children(&container).unwrap()[0]);
        proxy.hold(Direction::ToServer);
        let (renewing, lease) = (store.clone(), claim.lease());
        let renewing = tokio::spawn(async move { renew(&*renewing, &lease).await });
        eventually_async(DEADLINE, "it is sent", async || proxy.has_held(&root)).await;
        let other = client.create(&format!("{container}/other-lock-"), true).unwrap();
        client.delete(&other).unwrap();
        client.delete(&node).unwrap();
        proxy.release_held();
        renewed = renewing.await.unwrap();
        renewed.is_ok()
    })
    .await;
    assert_eq!(renewed, Ok(LeaseStatus::NotHeld));
}

/// The connection is down for a moment: the release that is repeated passes the key on as the first one would have.
#[tokio::test]
async fn a_release_that_was_not_sent_is_repeated_with_its_successor() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let store = open_backend(&url_at(proxy.port(), &root)).await.unwrap();
    let claim = request("order:1", 20_000);
    assert!(is_granted(&acquire(&store, &claim).await));
    let mut release = ReleaseRequest::new(claim.lease());
    let successor = Owner::random().unwrap();
    release.successor = Some(Successor::new(successor, ms(20_000)));
    let release = [release];
    proxy.refuse(true);
    proxy.cut();
    eventually_async(DEADLINE, "nothing is sent", async || {
        let held = store.is_held(&claim.lease()).await;
        held.is_err_and(|error| error.kind() == FailureKind::NotApplied)
    })
    .await;
    let refused = store.release(&release).await.remove(0).unwrap_err();
    assert_eq!(refused.kind(), FailureKind::NotApplied, "{refused}");
    proxy.refuse(false);
    let mut outcome = None;
    eventually_async(DEADLINE, "it is sent", async || {
        outcome = store.release(&release).await.remove(0).ok();
        outcome.is_some()
    })
    .await;
    assert_eq!(outcome, Some(ReleaseOutcome::SuccessorGranted));
    let lease = LeaseRef::new(claim.keys.clone(), successor, ms(20_000));
    assert_eq!(renew(&store, &lease).await, Ok(LeaseStatus::Held));
}

/// The release needs no right to make nodes.
#[tokio::test]
async fn a_refused_successor_does_not_keep_the_lock() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let claim = request("order:1", 20_000);
    assert!(is_granted(&acquire(&store, &claim).await));
    let mut client = server.client();
    client.set_rights(&format!("{root}/order:1"), 31 & !CREATE).unwrap();
    let mut release = ReleaseRequest::new(claim.lease());
    release.successor = Some(Successor::new(Owner::random().unwrap(), ms(20_000)));
    let released = store.release(&[release]).await.remove(0);
    assert_eq!(released.unwrap(), ReleaseOutcome::Freed);
    assert!(server.queue(&root, "order:1").is_empty());
}

/// The servers check no rights when they delete the nodes of a session that ends.
#[tokio::test]
async fn a_lock_that_may_no_longer_be_deleted_ends_with_its_session() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    let [refused, other] = [1, 2].map(|number| request(&format!("order:{number}"), 3_000));
    for claim in [&refused, &other] {
        assert!(is_granted(&acquire(&store, claim).await));
    }
    let mut client = server.client();
    client.set_rights(&format!("{root}/order:1"), 31 & !DELETE).unwrap();
    let release = |claim: &AcquireRequest| [ReleaseRequest::new(claim.lease())];
    let error = store.release(&release(&refused)).await.remove(0).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Rejected, "{error}");

    let mut session_of = |key: &str| {
        let node = server.queue(&root, key).remove(0);
        client.session_of(&format!("{root}/{key}/{node}"))
    };
    let session = session_of("order:2");
    let mut number = 2;
    eventually_async(DEADLINE, "new locks get another session", async || {
        assert_eq!(renew(&store, &other.lease()).await, Ok(LeaseStatus::Held));
        number += 1;
        let key = format!("order:{number}");
        let claim = request(&key, 3_000);
        assert!(is_granted(&acquire(&store, &claim).await));
        let is_another = session_of(&key) != session;
        store.release(&release(&claim)).await.remove(0).unwrap();
        is_another
    })
    .await;
    assert_eq!(session_of("order:1"), session, "the session has another lock");
    assert_eq!(renew(&store, &other.lease()).await, Ok(LeaseStatus::Held));
    store.release(&release(&other)).await.remove(0).unwrap();
    eventually_async(DEADLINE, "the session ends", async || {
        server.queue(&root, "order:1").is_empty()
    })
    .await;
}

/// A server compares the passwords of a connection with those that nodes were made with.
#[tokio::test]
async fn locks_outlive_a_change_of_the_password() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let password = Arc::new(Mutex::new("c4n4ry-one"));
    let given = {
        let password = password.clone();
        move || {
            let credentials = Credentials::new("worker", *password.lock().unwrap());
            async move { Ok::<_, std::io::Error>(credentials) }
        }
    };
    let url = |login: &str| format!("zookeeper://{login}127.0.0.1:{}{root}", server.port());
    let builder = LockPool::builder(url_at(proxy.port(), &root)).ttl(ms(20_000));
    let pool = builder.wait(DEADLINE).credentials(given).connect().await.unwrap();
    let held = pool.lock("order:1").acquire().await.unwrap();
    let former = patient(url("worker:c4n4ry-one@"), ms(20_000)).await;
    let waiting = acquire_in_task(&former, "order:1");
    eventually_async(DEADLINE, "the other owner waits", async || {
        pool.inspect("order:1").await.unwrap().waiting == Some(1)
    })
    .await;

    *password.lock().unwrap() = "c4n4ry-two";
    let connections = proxy.connections();
    proxy.cut();
    eventually_async(DEADLINE, "the pool connects again", async || {
        proxy.connections() > connections && held.verify().await.is_ok()
    })
    .await;
    // Its nodes belong to both passwords.
    cycle(&pool, "order:2").await;
    let later = patient(url("worker:c4n4ry-two@"), ms(20_000)).await;
    cycle(&later, "order:2").await;
    held.release().await.unwrap();
    joined("the other owner", waiting).await.1.release().await.unwrap();
}

/// A renewal that moves the node is dropped behind its request: the owner's number stays.
#[tokio::test]
async fn a_moved_node_keeps_its_fence_when_no_answer_was_read() {
    let (server, root) = ZooKeeperServer::shared();
    let store = open_backend(&server.url_of(&root)).await.unwrap();
    // The longer session is open before, so that a few polls suffice.
    assert!(is_granted(&acquire(&store, &request("other", 12_000)).await));
    let mut moved = 0;
    for polls in 1..8 {
        let mut claim = request(&format!("order:{polls}"), 1_000);
        claim.fencing = true;
        let AcquireOutcome::Acquired { fence, .. } = acquire(&store, &claim).await else {
            panic!("it is free");
        };
        let node = server.queue(&root, &format!("order:{polls}"));
        (claim.ttl, claim.attempt) = (ms(12_000), 1);
        let _ = poll_n(store.acquire(std::slice::from_ref(&claim)), polls).await;
        let AcquireOutcome::Acquired { fence: again, .. } = acquire(&store, &claim).await else {
            panic!("it is held by this owner");
        };
        assert_eq!(again, fence, "after {polls} polls");
        moved += usize::from(server.queue(&root, &format!("order:{polls}")) != node);
    }
    assert_eq!(moved, 7);
}
