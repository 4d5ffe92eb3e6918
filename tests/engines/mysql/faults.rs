//! Lost replies, cut and silent connections, locked rows, frozen and killed servers.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockPool};
use lock_tests::crowd::Crowd;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{FaultProxy, MysqlServer, eventually_async};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::conformance::{shared, until_queued};

/// How many transactions wait for a row.
pub(super) fn waits(server: &MysqlServer) -> u64 {
    server.status("Innodb_row_lock_current_waits")
}

pub(super) async fn until_one_waits(server: &MysqlServer) {
    eventually_async(DEADLINE, "a statement waits for the row", async || waits(server) == 1).await;
}

/// A row that another session has locked delays the requests for it, and no others.
#[tokio::test]
async fn a_locked_row_delays_no_other_key() {
    let server = MysqlServer::start();
    let pool = LockPool::builder(server.url()).ttl(ms(20_000)).connect().await.unwrap();
    let guards = [
        pool.lock("held:1").renew(ms(500)).acquire().await.unwrap(),
        pool.lock("held:2").renew(ms(500)).acquire().await.unwrap(),
    ];
    cycle(&pool, "free:1").await;
    let blocker = server.transaction(
        "SELECT * FROM locks.lock_lease WHERE `key` IN ('held:1', 'free:1') FOR UPDATE",
    );
    let blocked = tokio::spawn(pool.lock("free:1").wait(ms(20_000)).acquire());
    let (began, mut cycles) = (Instant::now(), 0);
    // Renewals of both locks are due meanwhile.
    while began.elapsed() < ms(3_500) {
        cycle(&pool, "free:2").await;
        cycles += 1;
        tokio::time::sleep(ms(20)).await;
    }
    // Only the first request for the locked row waits for it: a second, and then it is known to be locked.
    let waited = server.status("Innodb_row_lock_waits");
    assert!(waited <= 2, "{waited} waits in {cycles} cycles");
    until_renewed(&guards[1..]).await;
    assert!(!blocked.is_finished());
    drop(blocker);
    joined("the request for the locked row", blocked).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_release_that_waits_for_a_row_is_no_loss() {
    let server = MysqlServer::start();
    let [pool, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let guard = pool.lock_all(["a", "b"]).acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "b");
    until_queued(&server, "locks", "b", 1).await;
    let blocker = server.transaction("SELECT * FROM locks.lock_lease WHERE `key` = 'b' FOR UPDATE");
    let releasing = tokio::spawn(guard.release());
    until_one_waits(&server).await;
    eventually_async(DEADLINE, "the release has failed", async || waits(&server) == 0).await;
    drop(blocker);
    joined("the release", releasing).await.unwrap();
    joined("the waiter", waiting).await.1.release().await.unwrap();
    until_nothing_is_left(&server).await;
}

/// The server counts the lease from before the wait for the row, and so does the pool.
#[tokio::test]
async fn a_grant_that_waited_for_a_row_is_not_believed_for_longer_than_the_row() {
    let server = MysqlServer::start();
    let pool = LockPool::builder(server.url()).request_timeout(ms(3_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    let blocker = server.transaction("SELECT * FROM locks.lock_lease FOR UPDATE");
    let acquiring = tokio::spawn(pool.lock("order:1").ttl(ms(20_000)).renew(false).acquire());
    until_one_waits(&server).await;
    let waited = Instant::now();
    while waited.elapsed() < ms(300) {
        std::thread::sleep(ms(10));
    }
    drop(blocker);
    let guard = joined("the acquire", acquiring).await.unwrap();
    let valid_for = guard.valid_for();
    let left = server.query(
        "SELECT until - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) FROM lock_lease",
    );
    // Time has passed between the two.
    let left = Duration::from_micros(left[0][0].parse().unwrap()) + ms(5_000);
    assert!(valid_for < left, "valid for {valid_for:?}, and the row for {left:?}");
    assert!(valid_for < ms(20_000), "{valid_for:?}");
}

/// Rows of free locks vanish at any moment, as a sweep deletes them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exclusion_does_not_need_the_rows_of_free_locks() {
    let server = shared();
    let url = server.database("vanishing");
    let inside = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for n in 0..4 {
        let pool = patient(&url, ms(20_000)).await;
        let (inside, over) = (inside.clone(), over.clone());
        tasks.spawn(async move {
            for _ in 0..25 {
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
        // The server may choose this statement to end a deadlock.
        let gone = server
            .try_query("DELETE FROM vanishing.lock_lease WHERE owner = ''; SELECT ROW_COUNT()");
        deleted += gone.map_or(0, |rows| rows[0][0].parse::<u64>().unwrap());
        tokio::task::yield_now().await;
        while let Some(ended) = tasks.try_join_next() {
            ended.unwrap();
        }
    }
    within(4 * DEADLINE, "all tasks", tasks.join_all()).await;
    assert!(deleted > 0);
}

#[tokio::test]
async fn a_min_hold_is_kept_although_its_row_is_locked() {
    let server = MysqlServer::start();
    let [pool, other] =
        [patient(server.url(), ms(20_000)).await, patient(server.url(), ms(20_000)).await];
    let guard = pool.lock("order:1").min_hold(ms(20_000)).acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(&server, "locks", "order:1", 1).await;
    let blocker = server.transaction("SELECT * FROM locks.lock_lease FOR UPDATE");
    let releasing = tokio::spawn(guard.release());
    until_one_waits(&server).await;
    drop(blocker);
    joined("the release", releasing).await.unwrap();
    let left = "SELECT until > UNIX_TIMESTAMP(NOW(6)) * 1000000 + 5000000 FROM lock_lease WHERE owner <> ''";
    assert_eq!(server.query(left), [["1"]]);
    assert!(!waiting.is_finished());
    waiting.abort();
}

/// No owner has a lease or a place in a queue.
pub(super) async fn until_nothing_is_left(server: &MysqlServer) {
    let held = "SELECT (SELECT COUNT(*) FROM lock_lease WHERE owner <> '' AND until > UNIX_TIMESTAMP(NOW(6)) * 1000000) \
                + (SELECT COUNT(*) FROM lock_queue)";
    eventually_async(ms(6_000), "nothing is left in the tables", async || {
        server.query(held) == [["0"]]
    })
    .await;
}

#[tokio::test]
async fn an_acquire_with_a_lost_reply_is_undone() {
    let server = MysqlServer::start();
    let proxy = FaultProxy::to_port(server.port());
    for n in 0..3 {
        let key = format!("order:{n}");
        // A pool of its own: one that undoes an earlier request would wait for the held reply.
        let builder = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
        let pool = builder.connect().await.unwrap();
        proxy.hold(Direction::ToClient);
        let request = pool.lock(key.as_str()).wait(ms(300)).acquire();
        let acquiring = tokio::spawn(request);
        let statement = format!(
            "SELECT COUNT(*) FROM lock_lease WHERE `key` = '{key}' AND until > UNIX_TIMESTAMP(NOW(6)) * 1000000"
        );
        eventually_async(DEADLINE, &format!("the server has granted {key}"), async || {
            server.query(&statement) == [["1"]]
        })
        .await;
        proxy.cut();
        proxy.release_held();
        // Granted by a repeated request, or failed and undone. A release that meets the cut is repeated by the pool.
        if let Ok(guard) = joined("the acquire", acquiring).await {
            let _ = guard.release().await;
        }
        until_nothing_is_left(&server).await;
    }
}

/// The statement waits for a row while its caller gives up and its connection is cut.
#[tokio::test]
async fn a_statement_of_a_lost_connection_is_killed_and_grants_nothing_later() {
    let server = MysqlServer::start();
    let proxy = FaultProxy::to_port(server.port());
    let pool = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
    let pool = pool.request_timeout(ms(5_000)).connect().await.unwrap();
    cycle(&pool, "order:1").await;
    let blocker = server.transaction("SELECT * FROM locks.lock_lease FOR UPDATE");
    let acquiring = tokio::spawn(pool.lock("order:1").wait(ms(10_000)).acquire());
    until_one_waits(&server).await;
    let killed = server.status("Com_kill");
    acquiring.abort();
    proxy.cut();
    eventually_async(DEADLINE, "the lost connection has ended", async || {
        server.status("Com_kill") > killed && waits(&server) == 0
    })
    .await;
    drop(blocker);
    until_nothing_is_left(&server).await;
    cycle(&pool, "order:1").await;
}

/// Another program locks rows in the opposite order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlocks_with_statements_of_others_reach_no_caller() {
    let server = MysqlServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    pool.lock_all(["a", "b", "c", "d"]).acquire().await.unwrap().release().await.unwrap();
    let before = server.deadlocks();
    let over = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for keys in [["a", "b"], ["c", "d"]] {
        let (pool, over) = (pool.clone(), over.clone());
        tasks.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                let guard = pool.lock_all(keys).acquire().await.unwrap();
                guard.release().await.unwrap();
            }
        });
    }
    let update = |key: &str| {
        format!("UPDATE lock_lease SET contended = 1 - contended WHERE `key` = '{key}'; ")
    };
    let opposite: String =
        ["d", "c", "b", "a", "d", "c", "b", "a"].into_iter().map(update).collect();
    let opposite = format!("START TRANSACTION; {opposite} COMMIT; ").repeat(20);
    eventually_async(2 * DEADLINE, "deadlocks", async || {
        // The server may choose this transaction to be rolled back.
        let _ = server.try_query(&opposite);
        server.deadlocks() > before + 5
    })
    .await;
    over.store(true, Ordering::Relaxed);
    within(2 * DEADLINE, "all tasks", tasks.join_all()).await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn a_frozen_server_loses_the_lock_in_time_and_serves_again() {
    let server = MysqlServer::start();
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
    let server = MysqlServer::builder().durable().start();
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
    let server = MysqlServer::start();
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
    let held = server
        .query("SELECT COUNT(*) FROM lock_lease WHERE until > UNIX_TIMESTAMP(NOW(6)) * 1000000");
    assert_eq!(held, [["0"]]);
    eventually_async(DEADLINE, "the connections are closed", async || {
        let open = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE USER = 'locks'";
        server.query(open) == [["0"]]
    })
    .await;
}

/// Freezes of processes, some of them longer than the ttl of 300 ms, cuts of all connections, and kills of the server.
#[test]
fn faults_never_make_two_valid_leases() {
    let server = MysqlServer::builder().durable().start();
    let crowd = Crowd::start(env!("CARGO_BIN_EXE_crowd"), &server.url());
    crowd.survives_faults(10, || server.kill_clients(), || server.restart());
}

/// The renewals of very many keys are parts that are sent one after the other. Together they take longer than one request may.
#[tokio::test]
async fn over_a_slow_link_each_part_of_a_large_renewal_counts() {
    // 1,024 such keys fit into a packet.
    let server = MysqlServer::builder().option("max-allowed-packet=512K").start();
    let proxy = FaultProxy::to_port(server.port());
    let builder = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
    let pool = builder.request_timeout(ms(5_000)).wait(DEADLINE).connect().await.unwrap();
    let mut guards = Vec::new();
    // Two parts, of two round trips each. A part has as much time to be computed as its round trips take.
    for n in 0..18 {
        let keys = (0..64).map(|key| format!("key:{n}:{key}"));
        guards.push(pool.lock_all(keys).acquire().await.unwrap());
    }
    proxy.delay(Direction::ToClient, ms(1_300));
    // Beyond the end of what was granted.
    let granted_until = Instant::now() + ms(30_000);
    eventually_async(2 * DEADLINE, "all are renewed", async || {
        for guard in &guards {
            let lost = tokio::time::timeout(Duration::ZERO, guard.lost()).await;
            assert!(lost.is_err(), "{lost:?}");
        }
        guards.iter().all(|guard| Instant::now() + guard.valid_for() > granted_until)
    })
    .await;
    proxy.delay(Direction::ToClient, Duration::ZERO);
}
