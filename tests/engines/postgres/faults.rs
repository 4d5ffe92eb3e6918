//! Lost replies, cut and silent connections, frozen and killed servers.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, FailureKind, Owner, ReleaseOutcome, ReleaseRequest,
};
use lock_runtime::testing::open_backend;
use lock_runtime::{Credentials, ErrorKind, Key, LockPool};
use lock_tests::crowd::Crowd;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{FaultProxy, PostgresServer, SqlSession, eventually_async};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::conformance::until_queued;

/// A row that another session has locked delays the requests for it, and no others.
#[tokio::test]
async fn a_locked_row_delays_no_other_key() {
    let server = PostgresServer::start();
    let pool = LockPool::builder(server.url()).ttl(ms(20_000)).connect().await.unwrap();
    let guards = [
        pool.lock("held:1").renew(ms(500)).acquire().await.unwrap(),
        pool.lock("held:2").renew(ms(500)).acquire().await.unwrap(),
    ];
    cycle(&pool, "free:1").await;
    let blocker =
        server.transaction("SELECT FROM lock_lease WHERE key IN ('held:1', 'free:1') FOR UPDATE");
    let blocked = tokio::spawn(pool.lock("free:1").wait(ms(20_000)).acquire());
    let began = Instant::now();
    // Renewals of both locks are due meanwhile.
    while began.elapsed() < ms(3_500) {
        cycle(&pool, "free:2").await;
        tokio::time::sleep(ms(50)).await;
    }
    until_renewed(&guards[1..]).await;
    assert!(!blocked.is_finished());
    drop(blocker);
    joined("the request for the locked row", blocked).await.unwrap().release().await.unwrap();
}

/// One key is freed, and the hand-off of the other one fails: the repeated release finds one of them no longer held.
#[tokio::test]
async fn a_release_that_fails_half_way_is_no_loss() {
    let server = PostgresServer::start();
    let [pool, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let guard = pool.lock_all(["a", "b"]).acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "b");
    until_queued(&server, "b", 1).await;
    let blocker = server.transaction("SELECT FROM lock_lease WHERE key = 'b' FOR UPDATE");
    let releasing = tokio::spawn(guard.release());
    let cancelled = "canceling statement due to lock timeout";
    eventually_async(DEADLINE, "the hand-off has failed", async || {
        server.log().contains(cancelled)
    })
    .await;
    drop(blocker);
    joined("the release", releasing).await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
    until_nothing_is_left(&server).await;
}

/// Rows of free locks vanish at any moment, as a sweep deletes them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exclusion_does_not_need_the_rows_of_free_locks() {
    let server = PostgresServer::start();
    let inside = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for n in 0..4 {
        let pool = unhurried(server.url(), ms(60_000)).await;
        let (inside, over) = (inside.clone(), over.clone());
        tasks.spawn(async move {
            for _ in 0..60 {
                let keys: &[&str] = if n % 2 == 0 { &["a", "b"] } else { &["b"] };
                let guard = pool.lock_all(keys.iter().copied()).acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
            over.fetch_add(1, Ordering::SeqCst);
        });
    }
    let mut deleted = 0;
    while over.load(Ordering::SeqCst) < 4 {
        let gone = server.query("DELETE FROM lock_lease WHERE owner = '' RETURNING key");
        deleted += gone.len();
        tokio::task::yield_now().await;
        while let Some(ended) = tasks.try_join_next() {
            ended.unwrap();
        }
    }
    within(4 * DEADLINE, "all tasks", tasks.join_all()).await;
    assert!(deleted > 0);
}

/// The row is locked for a moment, so the release goes on to the transaction.
#[tokio::test]
async fn a_min_hold_is_kept_although_its_row_is_locked() {
    let server = PostgresServer::start();
    let [pool, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let guard = pool.lock("order:1").min_hold(ms(20_000)).acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(&server, "order:1", 1).await;
    let blocker = server.transaction("SELECT FROM lock_lease FOR UPDATE");
    let releasing = tokio::spawn(guard.release());
    let blocked = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    eventually_async(DEADLINE, "the release waits", async || server.query(blocked) == [["t"]])
        .await;
    drop(blocker);
    joined("the release", releasing).await.unwrap();
    let left = "SELECT until > now() + interval '5 seconds' FROM lock_lease WHERE owner <> ''";
    assert_eq!(server.query(left), [["t"]]);
    assert!(!waiting.is_finished());
    waiting.abort();
}

/// No owner has a lease or a place in a queue.
async fn until_nothing_is_left(server: &PostgresServer) {
    let held = "SELECT (SELECT count(*) FROM lock_lease WHERE owner <> '' AND until > now()) \
                + (SELECT count(*) FROM lock_queue)";
    eventually_async(ms(6_000), "nothing is left in the tables", async || {
        server.query(held) == [["0"]]
    })
    .await;
}

#[tokio::test]
async fn an_acquire_with_a_lost_reply_is_undone() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::to_port(server.port());
    for n in 0..3 {
        let key = format!("order:{n}");
        // A pool of its own: one that undoes an earlier request would wait for the held reply.
        let builder = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
        let pool = builder.connect().await.unwrap();
        // Statements are prepared when they are first used.
        cycle(&pool, "order:ready").await;
        proxy.hold(Direction::ToClient);
        let request = pool.lock(key.as_str()).wait(ms(300)).acquire();
        let acquiring = tokio::spawn(request);
        let statement =
            format!("SELECT count(*) FROM lock_lease WHERE key = '{key}' AND until > now()");
        eventually_async(DEADLINE, &format!("the server has granted {key}"), async || {
            server.query(&statement) == [["1"]]
        })
        .await;
        proxy.cut();
        proxy.release_held();
        // Granted by a repeated request, or failed and undone.
        if let Ok(guard) = joined("the acquire", acquiring).await {
            guard.release().await.unwrap();
        }
        until_nothing_is_left(&server).await;
    }
}

/// The statement waits for a row while its caller gives up and its connection is cut.
#[tokio::test]
async fn a_statement_of_a_lost_connection_grants_nothing_later() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::to_port(server.port());
    let pool = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
    let pool = pool.request_timeout(ms(5_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    let blocker = server.transaction("SELECT FROM lock_lease FOR UPDATE");
    let acquiring = tokio::spawn(pool.lock("order:1").wait(ms(10_000)).acquire());
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    eventually_async(DEADLINE, "the statement waits", async || server.query(blocked) == [["1"]])
        .await;
    acquiring.abort();
    proxy.cut();
    eventually_async(DEADLINE, "the lost connection has ended", async || {
        server.query(blocked) == [["0"]]
    })
    .await;
    drop(blocker);
    until_nothing_is_left(&server).await;
    cycle(&pool, "order:1").await;
}

/// The user of other credentials may neither end the process of the lost connection nor see when it was started.
#[tokio::test]
async fn a_lost_process_of_another_user_keeps_no_pool_away() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::to_port(server.port());
    // Makes the tables.
    drop(LockPool::connect(&server.url()).await.unwrap());
    for user in ["first", "second"] {
        server.query(&format!("CREATE USER {user}"));
    }
    server.query("GRANT ALL ON ALL TABLES IN SCHEMA public TO PUBLIC");
    let is_second = Arc::new(AtomicBool::new(false));
    let user = is_second.clone();
    let given = move || {
        let user = if user.load(Ordering::SeqCst) { "second" } else { "first" };
        async move { Ok::<_, std::io::Error>(Credentials::new(user, "")) }
    };
    let (far, near) = (proxy.port(), server.port());
    let url = format!("postgres://127.0.0.1:{far},127.0.0.1:{near}/locks");
    let builder = LockPool::builder(url).credentials(given).request_timeout(ms(300));
    let pool = builder.connect_timeout(ms(1_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    let lost = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'first'";
    assert_eq!(server.query(lost), [["2"]]);
    is_second.store(true, Ordering::SeqCst);
    proxy.hold(Direction::ToServer);
    proxy.hold(Direction::ToClient);
    let began = Instant::now();
    // An idle session would end after 20 s.
    eventually_async(ms(15_000), "the pool is back", async || {
        match pool.lock("order:2").wait(ms(500)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    // The silence, the attempt to log in at the first address, and the time for the lost process.
    assert!(began.elapsed() >= ms(600 + 1_000 + 1_100), "{:?}", began.elapsed());
}

/// A statement that waits in that process could still grant a lock.
#[tokio::test]
async fn a_process_that_cannot_be_ended_is_named() {
    let server = PostgresServer::start();
    let builder = LockPool::builder(server.url()).request_timeout(ms(300));
    let pool = builder.connect_timeout(ms(1_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    let claims = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%lock_lease%' \
                  AND pid <> pg_backend_pid() ORDER BY state_change DESC LIMIT 1";
    let stuck = server.query(claims)[0][0].clone();
    server.pause_process(&stuck);
    eventually_async(DEADLINE, "the error names the process", async || {
        let error = pool.lock("order:1").wait(ms(0)).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
        error.to_string().contains(&format!("the PostgreSQL process {stuck} of the last"))
    })
    .await;
    server.resume();
    eventually_async(DEADLINE, "the pool is back", async || {
        pool.lock("order:1").wait(ms(0)).acquire().await.is_ok()
    })
    .await;
}

/// A commit that notifies keeps a lock of the whole server until a standby has it, and this standby is missing. Hand-offs notify,
/// too. One after the other, their waits for that lock would last for ten seconds.
#[tokio::test]
async fn a_long_commit_of_a_notification_delays_no_acquire() {
    const KEYS: usize = 40;
    let server = PostgresServer::builder()
        .setting("wal_level", "replica")
        .setting("max_wal_senders", "10")
        .setting("synchronous_standby_names", "nobody")
        .setting("synchronous_commit", "local")
        .start();
    let store = open_backend(&server.url()).await.unwrap();
    let request = |key: String, enqueue| {
        let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
        let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(60_000));
        request.enqueue = enqueue;
        request
    };
    let requests =
        |enqueue| -> Vec<_> { (0..KEYS).map(|n| request(format!("order:{n}"), enqueue)).collect() };
    let held = requests(false);
    for outcome in store.acquire(&held).await {
        assert!(matches!(outcome, Ok(AcquireOutcome::Acquired { .. })), "{outcome:?}");
    }
    for outcome in store.acquire(&requests(true)).await {
        assert!(matches!(outcome, Ok(AcquireOutcome::Contended { .. })), "{outcome:?}");
    }
    let url = format!("postgres://locks@127.0.0.1:{}/locks", server.port());
    let mut other = SqlSession::open(&url).await;
    other.run("CREATE TABLE other (n integer)").await;
    other.run("SET synchronous_commit = on").await;
    let write = "BEGIN; INSERT INTO other VALUES (1); NOTIFY other; COMMIT";
    let mut committing = Box::pin(other.run(write));
    assert!(poll_once(committing.as_mut()).await.is_none());
    let waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    eventually_async(DEADLINE, "the commit waits for the standby", async || {
        server.query(&format!("SELECT count(*) {waiting}")) == [["1"]]
    })
    .await;
    let releases: Vec<_> = held.iter().map(|it| ReleaseRequest::new(it.lease())).collect();
    let free = [request("free:1".to_owned(), false)];
    let both = async { tokio::join!(store.release(&releases), store.acquire(&free)) };
    let (released, granted) = within(ms(5_000), "all answers", both).await;
    for outcome in released {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), FailureKind::NotApplied, "{error}");
        assert!(error.to_string().contains("NOTIFY"), "{error}");
    }
    assert!(matches!(granted[0], Ok(AcquireOutcome::Acquired { .. })), "{granted:?}");
    server.query(&format!("SELECT pg_cancel_backend(pid) {waiting}"));
    within(DEADLINE, "the commit", committing).await;
    for outcome in store.release(&releases).await {
        assert!(matches!(outcome, Ok(ReleaseOutcome::Freed)), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_frozen_server_loses_the_lock_in_time_and_serves_again() {
    let server = PostgresServer::start();
    let pool = LockPool::builder(server.url()).request_timeout(ms(300)).connect().await.unwrap();
    let guard = pool.lock("order:1").ttl(ms(1_500)).acquire().await.unwrap();
    let paused = Instant::now();
    server.pause();
    let error = within(DEADLINE, "the loss", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(paused.elapsed() < ms(1_500) + ms(10_000), "{:?}", paused.elapsed());
    let error = pool.lock("order:2").wait(ms(300)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    server.resume();
    drop(guard);
    eventually_async(DEADLINE, "it serves again", async || {
        match pool.lock("order:1").wait(ms(1_000)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn a_killed_server_keeps_the_locks_of_others_and_serves_again() {
    let server = PostgresServer::builder().setting("fsync", "on").start();
    let pool = patient(server.url(), ms(10_000)).await;
    for _ in 0..3 {
        let guard = pool.lock("order:1").acquire().await.unwrap();
        server.kill();
        let error = pool.lock("order:2").wait(ms(100)).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
        server.restart();
        eventually_async(DEADLINE, "it is connected", async || guard.verify().await.is_ok()).await;
        guard.release().await.unwrap();
    }
    until_nothing_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_locks_are_released_at_a_shutdown() {
    const LOCKS: usize = 1_000;
    let server = PostgresServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let inside = Arc::new(Barrier::new(LOCKS + 1));
    let mut bodies = JoinSet::new();
    for n in 0..LOCKS {
        let inside = inside.clone();
        bodies.spawn(pool.lock(format!("body:{n}")).run(async move {
            inside.wait().await;
            std::future::pending::<()>().await;
        }));
    }
    within(DEADLINE, "all are inside", inside.wait()).await;
    let report = within(DEADLINE, "the end", pool.shutdown(ms(100))).await;
    assert!(report.released >= LOCKS && report.abandoned == 0, "{report:?}");
    bodies.join_all().await;
    let held = server.query("SELECT count(*) FROM lock_lease WHERE until > now()");
    assert_eq!(held, [["0"]]);
    eventually_async(DEADLINE, "the connections are closed", async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lock_runtime'";
        server.query(open) == [["0"]]
    })
    .await;
}

/// Freezes of processes, some of them longer than the ttl of 300 ms, cuts of all connections, and kills of the server.
#[test]
fn faults_never_make_two_valid_leases() {
    let server = PostgresServer::builder().setting("fsync", "on").start();
    let crowd = Crowd::start(env!("CARGO_BIN_EXE_crowd"), &server.url());
    crowd.survives_faults(7, || server.kill_clients(), || server.restart());
}
