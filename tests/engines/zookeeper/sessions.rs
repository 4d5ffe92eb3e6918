//! Sessions as leases: expiry, renewals, moves between sessions, and the end of a process.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Instant;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, LeaseRef, LeaseStatus, Owner, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, Key, LockPool};
use lock_tests::history::History;
use lock_tests::poll::drop_at_every_poll;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::zookeeper::url_at;
use lock_tests::{FaultProxy, Worker, ZooKeeperServer, eventually_async};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::conformance::{until_nothing_is_left, until_queued};

/// The connection is silent for longer than the session: the holder knows before another owner has the lock.
#[tokio::test]
async fn an_expired_session_loses_its_locks_in_time() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let pool = LockPool::builder(url_at(proxy.port(), &root)).request_timeout(ms(300));
    let pool = pool.ttl(ms(1_000)).connect().await.unwrap();
    let other = patient(server.url_of(&root), ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(server, &root, "order:1", 2).await;
    proxy.hold(Direction::ToServer);
    proxy.hold(Direction::ToClient);
    let error = within(DEADLINE, "the loss", guard.lost()).await;
    let lost = Instant::now();
    assert_eq!(error.kind(), ErrorKind::Lost);
    let (acquired, theirs) = joined("the waiter", waiting).await;
    assert!(acquired > lost, "{:?} too early", lost.saturating_duration_since(acquired));
    proxy.release_held();
    drop(guard);
    let next = pool.lock("order:1").wait(DEADLINE).acquire();
    let next = tokio::spawn(next);
    until_queued(server, &root, "order:1", 2).await;
    assert!(!next.is_finished());
    theirs.release().await.unwrap();
    joined("the pool with another session", next).await.unwrap().release().await.unwrap();
    until_nothing_is_left(server, &root).await;
}

/// The server is frozen for less than the session's timeout, and for longer than a request's.
#[tokio::test]
async fn a_short_silence_loses_nothing() {
    let (server, root) = ZooKeeperServer::shared();
    let proxy = FaultProxy::to_port(server.port());
    let builder = LockPool::builder(url_at(proxy.port(), &root)).request_timeout(ms(300));
    let pool = builder.ttl(ms(20_000)).connect().await.unwrap();
    let guard = pool.lock("order:1").acquire().await.unwrap();
    proxy.hold(Direction::ToServer);
    let error = pool.lock("order:2").wait(ms(600)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    proxy.release_held();
    eventually_async(DEADLINE, "it answers", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    until_nothing_is_left(server, &root).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_of_several_locks_share_requests() {
    const LOCKS: usize = 300;
    let server = ZooKeeperServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let mut guards = Vec::new();
    for n in 0..LOCKS {
        guards.push(pool.lock(format!("order:{n}")).renew(ms(1_000)).acquire().await.unwrap());
    }
    let (began, before) = (Instant::now(), server.packets());
    while began.elapsed() < ms(4_000) {
        tokio::time::sleep(ms(50)).await;
    }
    let packets = server.packets() - before;
    println!("{packets} packets for {LOCKS} locks in {:?}", began.elapsed());
    // Each lock is renewed four times.
    assert!(packets < LOCKS, "{packets}");
    until_renewed(&guards).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_locks_are_released_at_a_shutdown() {
    const LOCKS: usize = 1_000;
    let server = ZooKeeperServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let inside = Arc::new(Barrier::new(LOCKS + 1));
    let mut bodies = JoinSet::new();
    for n in 0..LOCKS {
        let inside = inside.clone();
        let ttl = ms(if n % 2 == 0 { 30_000 } else { 12_000 });
        bodies.spawn(pool.lock(format!("body:{n}")).ttl(ttl).wait(DEADLINE).run(async move {
            inside.wait().await;
            std::future::pending::<()>().await;
        }));
    }
    within(DEADLINE, "all are inside", inside.wait()).await;
    assert_eq!(server.ephemerals(), LOCKS);
    let report = within(DEADLINE, "the end", pool.shutdown(ms(100))).await;
    assert!(report.released >= LOCKS && report.abandoned == 0, "{report:?}");
    bodies.join_all().await;
    assert_eq!(server.ephemerals(), 0);
    eventually_async(DEADLINE, "the sessions are closed", async || {
        server.sessions() == 0 && server.connections() == 1
    })
    .await;
}

/// Without a shutdown, and with a ttl that is longer than this waits.
#[tokio::test]
async fn a_dropped_pool_leaves_no_session() {
    let server = ZooKeeperServer::start();
    for _ in 0..3 {
        let pool = patient(server.url_of("/dropped"), ms(57_000)).await;
        pool.lock("order:1").acquire().await.unwrap().release().await.unwrap();
    }
    eventually_async(DEADLINE, "the sessions end", async || server.sessions() == 0).await;
}

/// The session is open by the time the servers refuse the path. Its timeout is longer than this waits.
#[tokio::test]
async fn a_failed_connect_leaves_no_session() {
    let server = ZooKeeperServer::start();
    let url =
        |login: &str, path: &str| format!("zookeeper://{login}127.0.0.1:{}{path}", server.port());
    let pool = LockPool::connect(&url("worker:secret@", "/private")).await.unwrap();
    cycle(&pool, "order:1").await;
    assert!(server.sessions() > 0);
    pool.shutdown(DEADLINE).await;
    eventually_async(DEADLINE, "the session of the pool ends", async || server.sessions() == 0)
        .await;
    let error = LockPool::connect(&url("", "/private/below")).await.unwrap_err();
    assert!(error.to_string().contains("refuses access"), "{error}");
    eventually_async(DEADLINE, "the session of the connect ends", async || server.sessions() == 0)
        .await;
}

/// The connect is dropped at each of its polls. The timeout of the session is longer than this waits.
#[tokio::test]
async fn a_dropped_connect_leaves_no_session() {
    let server = ZooKeeperServer::start();
    let url = server.url_of("/dropped");
    drop_at_every_poll(|| open_backend(&url), async |_| {}).await;
    eventually_async(DEADLINE, "the sessions end", async || server.sessions() == 0).await;
}

/// The operation in the header of the request that ends a session: -11, after which nothing follows.
const CLOSE: &[u8] = &(-11_i32).to_be_bytes();

/// The connection is being opened again when the pool is dropped, or ends before the answer.
#[tokio::test]
async fn a_pool_that_is_dropped_without_a_connection_leaves_no_session() {
    let server = ZooKeeperServer::start();
    for is_cut in [true, false] {
        let proxy = FaultProxy::to_port(server.port());
        // The session is longer than this waits, and the end has as much time as a request.
        let pool = LockPool::builder(url_at(proxy.port(), "/dropped")).ttl(ms(40_000));
        let pool = pool.request_timeout(ms(20_000)).connect().await.unwrap();
        cycle(&pool, "order:1").await;
        assert!(server.sessions() > 0);
        if is_cut {
            proxy.refuse(true);
            proxy.cut();
            until_it_connects(&proxy).await;
            drop(pool);
            until_it_connects(&proxy).await;
            proxy.refuse(false);
        } else {
            proxy.hold(Direction::ToServer);
            drop(pool);
            eventually_async(DEADLINE, "the end is sent", async || proxy.has_held_bytes(CLOSE))
                .await;
            proxy.cut();
            proxy.release_held();
        }
        eventually_async(DEADLINE, "the session ends", async || server.sessions() == 0).await;
    }
}

/// Waits for two further attempts.
async fn until_it_connects(proxy: &FaultProxy) {
    let before = proxy.refusals();
    let has_tried = async || proxy.refusals() >= before + 2;
    eventually_async(DEADLINE, "it connects again", has_tried).await;
}

/// The session of a ttl ends with the process, so it must be long enough for the time that the keys stay locked.
#[tokio::test]
async fn a_min_hold_is_kept_when_the_pool_is_closed() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let other = patient(&url, ms(20_000)).await;
    let pool = LockPool::builder(&url).ttl(ms(1_000)).connect().await.unwrap();
    let began = Instant::now();
    let hold = ms(2_500);
    let guard = pool.lock("order:1").min_hold(hold).acquire().await.unwrap();
    let also = pool.lock("order:2").acquire().await.unwrap();
    guard.release().await.unwrap();
    pool.shutdown(ms(100)).await;
    drop((also, pool));
    let waiting = acquire_in_task(&other, "order:1");
    // What has no `min_hold` is free at once.
    cycle(&other, "order:2").await;
    assert!(!waiting.is_finished(), "both were kept");
    let (acquired, guard) = joined("the waiter", waiting).await;
    let kept = acquired.saturating_duration_since(began);
    println!("kept for {kept:?}");
    assert!(kept >= hold, "{kept:?}");
    assert!(kept < ms(8_000) + NOISE, "{kept:?}");
    guard.release().await.unwrap();
}

/// Its node is made anew in the same position, in a session that is long enough.
#[tokio::test]
async fn a_lease_that_becomes_longer_moves_to_a_longer_session() {
    let (server, root) = ZooKeeperServer::shared();
    let url = server.url_of(&root);
    let store = open_backend(&url).await.unwrap();
    let other = patient(&url, ms(20_000)).await;
    let keys: Arc<[Key]> = Arc::new([Key::from("order:1")]);
    let mut request = AcquireRequest::new(keys.clone(), Owner::random().unwrap(), ms(1_000));
    request.fencing = true;
    let granted = store.acquire(std::slice::from_ref(&request)).await.remove(0).unwrap();
    let AcquireOutcome::Acquired { fence, .. } = granted else { panic!("it is free: {granted:?}") };
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(server, &root, "order:1", 2).await;
    let before = server.queue(&root, "order:1");
    let lease = LeaseRef::new(keys, request.owner, ms(12_000));
    let renewed = store.renew(std::slice::from_ref(&lease)).await.remove(0);
    assert_eq!(renewed.unwrap(), LeaseStatus::Held);
    let moved = server.queue(&root, "order:1");
    assert!(moved.len() == 2 && moved[0] != before[0], "{moved:?} after {before:?}");
    assert_eq!(moved[1], before[1]);
    let began = Instant::now();
    while began.elapsed() < ms(2_500) {
        assert!(!waiting.is_finished());
        tokio::time::sleep(ms(20)).await;
    }
    let again = store.acquire(std::slice::from_ref(&request)).await.remove(0).unwrap();
    assert!(
        matches!(again, AcquireOutcome::Acquired { fence: same, .. } if same == fence),
        "{again:?}"
    );
    store.release(&[ReleaseRequest::new(lease)]).await.remove(0).unwrap();
    let (_, next) = joined("the waiter", waiting).await;
    assert!(next.fence() > fence);
    next.release().await.unwrap();
    until_nothing_is_left(server, &root).await;
}

#[tokio::test]
async fn a_process_is_frozen_past_its_session() {
    let (server, root) = ZooKeeperServer::shared();
    let (url, dir) = (server.url_of(&root), tempfile::tempdir().unwrap());
    let other = patient(&url, ms(20_000)).await;
    let program = env!("CARGO_BIN_EXE_waiter");
    let frozen = Worker::start(program, &[&url, dir.path().to_str().unwrap(), "frozen", "1000"]);
    frozen.send_line("loop 1");
    let guard = other.lock("k").acquire().await.unwrap();
    until_queued(server, &root, "k", 2).await;
    // Released to a process that is frozen: it holds the lock until the end of its session.
    frozen.pause();
    guard.release().await.unwrap();
    let began = Instant::now();
    let guard = other.lock("k").acquire().await.unwrap();
    println!("free after {:?}", began.elapsed());
    frozen.resume();
    // It finds itself without a lock, and queues again.
    until_queued(server, &root, "k", 2).await;
    guard.verify().await.unwrap();
    guard.release().await.unwrap();
    let grants = History::read(dir.path()).unwrap().grants().len();
    eventually_async(DEADLINE, "it has locks again", async || {
        History::read(dir.path()).unwrap().grants().len() > grants
    })
    .await;
    frozen.kill();
    History::read(dir.path()).unwrap().assert_safe();
}
