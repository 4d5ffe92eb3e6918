//! Events between two statements of a script, or between a script and what follows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_runtime::{Credentials, LockPool, Wait};
use lock_tests::mysql::OpenTransaction;
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::statements::StatementProxy;
use lock_tests::{FaultProxy, MysqlServer, eventually_async};
use tokio::task::JoinSet;

use super::conformance::until_queued;
use super::faults::{until_nothing_is_left, until_one_waits, waits};

/// Scripts stop at the gate until the value is dropped.
fn closed(server: &MysqlServer, gate: &str) -> OpenTransaction {
    server.transaction(&format!("DO GET_LOCK('{gate}', 0)"))
}

async fn until_stopped(server: &MysqlServer, gate: &str, count: usize) {
    let stopped = format!(
        "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE 'DO GET_LOCK(''{gate}''%'"
    );
    let count = [[count.to_string()]];
    eventually_async(DEADLINE, &format!("scripts stop at {gate}"), async || {
        server.query(&stopped) == count
    })
    .await;
}

/// A pool through the proxy that waits for as long as a test stops its scripts.
async fn stoppable(server: &MysqlServer, proxy: &StatementProxy) -> LockPool {
    let builder = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
    let builder = builder.wait(Wait::Forever).request_timeout(ms(20_000));
    builder.connect().await.unwrap()
}

/// How long the lease of `key` lasts by the server's clock.
fn left(server: &MysqlServer, key: &str) -> Duration {
    let left = server.query(&format!(
        "SELECT until - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) FROM lock_lease WHERE `key` = '{key}'"
    ));
    Duration::from_micros(left[0][0].parse().unwrap_or_default())
}

/// A release passes the lock on while a request of the same waiter is between its two statements. The reservation ends after
/// a second.
#[tokio::test]
async fn a_reservation_is_not_taken_for_a_grant() {
    let server = MysqlServer::start();
    let proxy = StatementProxy::to_port(server.port());
    let holder = patient(server.url(), ms(30_000)).await;
    let pool = stoppable(&server, &proxy).await;
    let guard = holder.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&pool, "order:1");
    until_queued(&server, "locks", "order:1", 1).await;
    let gate = closed(&server, "gate");
    proxy.stop_before("SELECT `key`, owner, until - @now, fence", "gate");
    until_stopped(&server, "gate", 1).await;
    guard.release().await.unwrap();
    drop(gate);
    let (_, guard) = joined("the waiter", waiting).await;
    let (valid_for, left) = (guard.valid_for(), left(&server, "order:1"));
    // Time has passed between the two.
    assert!(valid_for < left + ms(5_000), "valid for {valid_for:?}, and the row for {left:?}");
    guard.release().await.unwrap();
}

/// Neither of two scripts has locked the row, because it was missing. A row that appears behind that is locked by none.
#[tokio::test]
async fn owners_that_queue_while_the_row_is_missing_have_different_positions() {
    let server = MysqlServer::start();
    let proxy = StatementProxy::to_port(server.port());
    let holder = patient(server.url(), ms(30_000)).await;
    let pools = [stoppable(&server, &proxy).await, stoppable(&server, &proxy).await];
    let guard = holder.lock("order:1").acquire().await.unwrap();
    proxy.stop_before("SET @holder = NULL;", "gate-1");
    // Behind the statement that grants, which would lock the row.
    proxy.stop_before("UPDATE `lock_queue` SET channel", "gate-2");
    proxy.stop_before("UPDATE `lock_lease` SET contended = true", "gate-3");
    let [first, second, third] = ["gate-1", "gate-2", "gate-3"].map(|gate| closed(&server, gate));
    let waiting: JoinSet<_> =
        pools.into_iter().map(|pool| async move { cycle(&pool, "order:1").await }).collect();
    until_stopped(&server, "gate-1", 2).await;
    guard.release().await.unwrap();
    server.query("DELETE FROM lock_lease");
    drop(first);
    until_stopped(&server, "gate-2", 2).await;
    let guard = holder.lock("order:1").acquire().await.unwrap();
    drop(second);
    until_stopped(&server, "gate-3", 2).await;
    drop(third);
    until_queued(&server, "locks", "order:1", 2).await;
    assert_eq!(server.query("SELECT COUNT(DISTINCT position) FROM lock_queue"), [["2"]]);
    guard.release().await.unwrap();
    within(DEADLINE, "both waiters", waiting.join_all()).await;
}

/// No request for this key alone has shown before that its row is locked.
#[tokio::test]
async fn requests_for_several_keys_wait_for_a_locked_row_once() {
    let server = MysqlServer::start();
    let pool = LockPool::builder(server.url()).request_timeout(ms(5_000)).connect().await.unwrap();
    cycle(&pool, "stuck:1").await;
    let blocker = server.transaction("SELECT * FROM locks.lock_lease FOR UPDATE");
    let before = server.status("Innodb_row_lock_waits");
    for n in 0..4 {
        let request = pool.lock_all(["stuck:1".to_owned(), format!("more:{n}")]);
        assert!(request.wait(Duration::ZERO).acquire().await.is_err());
    }
    assert_eq!(server.status("Innodb_row_lock_waits") - before, 1);
    drop(blocker);
    cycle(&pool, "stuck:1").await;
}

/// Between the end of a script and its `ROLLBACK`, the network is silent.
#[tokio::test]
async fn rows_of_a_failed_script_do_not_stay_locked_in_a_partition() {
    let server = MysqlServer::start();
    let proxy = FaultProxy::to_port(server.port());
    let pool = LockPool::builder(server.url_at(proxy.port())).request_timeout(ms(5_000));
    let pool = pool.connect().await.unwrap();
    pool.lock_all(["a", "b"]).acquire().await.unwrap().release().await.unwrap();
    let blocker = server.transaction("SELECT * FROM locks.lock_lease WHERE `key` = 'b' FOR UPDATE");
    let acquiring = tokio::spawn(pool.lock_all(["a", "b"]).wait(ms(1)).acquire());
    until_one_waits(&server).await;
    proxy.hold(Direction::ToServer);
    // MariaDB rolls back before the idle session ends, MySQL as it ends.
    let limit = if server.is_mariadb() { ms(15_000) } else { ms(35_000) };
    eventually_async(limit, "the other row is unlocked", async || {
        let row = "SELECT * FROM lock_lease WHERE `key` = 'a' FOR UPDATE NOWAIT";
        waits(&server) == 0 && server.try_query(row).is_ok()
    })
    .await;
    drop(blocker);
    proxy.release_held();
    let _ = joined("the acquire", acquiring).await;
    until_nothing_is_left(&server).await;
}

/// The path to the server is silent, so the lost session stays. The user of the next one may not kill it.
#[tokio::test]
async fn a_lost_session_of_another_user_keeps_no_pool_away() {
    let server = MysqlServer::start();
    let proxy = FaultProxy::to_port(server.port());
    for user in ["first", "second"] {
        server.query(&format!("CREATE USER {user}@'%'; GRANT ALL ON locks.* TO {user}@'%'"));
    }
    let is_second = Arc::new(AtomicBool::new(false));
    let user = is_second.clone();
    let given = move || {
        let user = if user.load(Ordering::SeqCst) { "second" } else { "first" };
        async move { Ok::<_, std::io::Error>(Credentials::new(user, "")) }
    };
    let url = format!(
        "mysql://127.0.0.1:{},127.0.0.1:{}/locks?create=on&connect_timeout=1s",
        proxy.port(),
        server.port()
    );
    let builder = LockPool::builder(url).credentials(given).request_timeout(ms(300));
    let pool = builder.connect().await.unwrap();
    cycle(&pool, "order:1").await;
    is_second.store(true, Ordering::SeqCst);
    proxy.hold(Direction::ToServer);
    proxy.hold(Direction::ToClient);
    // The idle session would end after 20 s.
    eventually_async(ms(15_000), "the pool is back", async || {
        match pool.lock("order:2").wait(ms(500)).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    let lost = "SELECT COUNT(*) > 0 FROM information_schema.PROCESSLIST WHERE USER = 'first'";
    assert_eq!(server.query(lost), [["1"]]);
}

/// A row that is locked for the time of a commit is none that another session keeps locked, also not beside such a one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_locked_for_a_moment_fails_no_request() {
    const STUCK: [&str; 4] = ["stuck:0", "stuck:1", "stuck:2", "stuck:3"];
    let server = Arc::new(MysqlServer::start());
    let pool = LockPool::builder(server.url()).request_timeout(ms(5_000)).connect().await.unwrap();
    for key in STUCK {
        cycle(&pool, key).await;
    }
    cycle(&pool, "busy:1").await;
    let blocker =
        server.transaction("SELECT * FROM locks.lock_lease WHERE `key` LIKE 'stuck:%' FOR UPDATE");
    let over = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for key in STUCK {
        let (pool, over) = (pool.clone(), over.clone());
        // The first request waits for a second, and the others find the row locked.
        assert!(pool.lock(key).try_acquire().await.is_err());
        tasks.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                assert!(pool.lock(key).try_acquire().await.is_err());
            }
        });
    }
    let commits = "START TRANSACTION; SELECT * FROM lock_lease WHERE `key` = 'busy:1' FOR UPDATE; \
        DO SLEEP(0.003); COMMIT; "
        .repeat(20);
    let (busy, ended) = (server.clone(), over.clone());
    let committing = std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            busy.query(&commits);
        }
    });
    for _ in 0..40 {
        let guard = pool.lock("busy:1").try_acquire().await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    over.store(true, Ordering::Relaxed);
    within(DEADLINE, "all tasks", tasks.join_all()).await;
    committing.join().unwrap();
    drop(blocker);
    for key in STUCK {
        cycle(&pool, key).await;
    }
}

/// Each script is split by what fits: keys of the greatest length, for a server with short packets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_keys_fit_into_short_packets() {
    const KEYS: usize = 60;
    let server = MysqlServer::builder().option("max-allowed-packet=65536").start();
    // Sixty statements at a time take a busy machine seconds.
    let [one, other] =
        [unhurried(server.url(), ms(12_000)).await, unhurried(server.url(), ms(12_000)).await];
    let sessions = || {
        let list = "SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'locks' ORDER BY ID";
        server.query(list)
    };
    let before = sessions();
    let key = |n: usize| format!("{n:0>500}");
    let acquiring: JoinSet<_> = (0..KEYS).map(|n| one.lock(key(n)).acquire()).collect();
    let guards: Vec<_> = acquiring.join_all().await.into_iter().map(Result::unwrap).collect();
    let waiting: Vec<_> = (0..KEYS).map(|n| acquire_in_task(&other, &key(n))).collect();
    let queued = "SELECT COUNT(*) FROM lock_queue";
    eventually_async(DEADLINE, "all are queued", async || {
        server.query(queued) == [[KEYS.to_string()]]
    })
    .await;
    let first: u64 = server.query("SELECT MAX(until) FROM lock_lease")[0][0].parse().unwrap();
    eventually_async(DEADLINE, "all are renewed", async || {
        server.query("SELECT MIN(until) FROM lock_lease")[0][0].parse::<u64>().unwrap() > first
    })
    .await;
    let error = one.lock_all((0..KEYS).map(|n| format!("{n:0>511}"))).acquire().await.unwrap_err();
    assert!(error.to_string().contains("max_allowed_packet"), "{error}");
    for guard in guards {
        guard.release().await.unwrap();
    }
    for waiter in waiting {
        joined("a waiter", waiter).await.1.release().await.unwrap();
    }
    assert_eq!(sessions(), before, "no connection was lost");
}

/// A way to `server` on which it has no named locks.
fn without_named_locks(server: &MysqlServer) -> StatementProxy {
    let proxy = StatementProxy::to_port(server.port());
    // It returns a text, and locks nothing.
    proxy.replace("GET_LOCK(", "CONCAT(");
    proxy
}

/// A server without named locks: the lost session is found by its number.
#[tokio::test]
async fn a_lost_session_without_a_name_is_killed() {
    let server = MysqlServer::start();
    let nameless = without_named_locks(&server);
    let proxy = FaultProxy::to_port(nameless.port());
    let pool = LockPool::builder(server.url_at(proxy.port())).ttl(ms(30_000));
    let pool = pool.request_timeout(ms(5_000)).connect().await.unwrap();
    let warnings = format!("{:?}", pool.health().await.unwrap().warnings);
    assert!(warnings.contains("GET_LOCK"), "{warnings}");
    cycle(&pool, "order:1").await;
    let blocker = server.transaction("SELECT * FROM locks.lock_lease FOR UPDATE");
    let acquiring = tokio::spawn(pool.lock("order:1").wait(ms(10_000)).acquire());
    until_one_waits(&server).await;
    let killed = server.status("Com_kill");
    acquiring.abort();
    proxy.cut();
    eventually_async(DEADLINE, "the lost session is killed", async || {
        server.status("Com_kill") > killed
    })
    .await;
    drop(blocker);
    until_nothing_is_left(&server).await;
    cycle(&pool, "order:1").await;
}

/// A server without named locks, as before. Numbers of sessions begin anew with the server.
#[tokio::test]
async fn a_session_of_another_process_with_the_number_of_a_lost_one_is_not_killed() {
    let server = MysqlServer::start();
    let nameless = without_named_locks(&server);
    let proxy = FaultProxy::to_port(nameless.port());
    let pool = LockPool::connect(&server.url_at(proxy.port())).await.unwrap();
    cycle(&pool, "order:1").await;
    let ids = "SELECT ID FROM information_schema.PROCESSLIST \
        WHERE USER = 'locks' AND DB = 'locks' AND ID <> CONNECTION_ID() ORDER BY ID";
    let lost = server.query(ids);
    let last: usize = lost.last().unwrap()[0].parse().unwrap();
    proxy.refuse(true);
    server.restart();
    let mut others = Vec::new();
    for _ in 0..last {
        others.push(LockPool::connect(&server.url()).await.unwrap());
    }
    let there = server.query(ids);
    assert!(lost.iter().any(|id| there.contains(id)), "{lost:?} of the pool, {there:?} of others");
    proxy.refuse(false);
    eventually_async(DEADLINE, "the pool is back", async || {
        let acquired = pool.lock("order:2").wait(ms(500)).acquire().await;
        acquired.is_ok()
    })
    .await;
    assert_eq!(server.status("Com_kill"), 0);
    drop(others);
}

/// The holder's row names a channel that has ended, and no look finds it by that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_with_a_cut_connection_learns_of_waiters() {
    let server = MysqlServer::start();
    // Renewals are no help: the first one is due after minutes.
    let ttl = ms(600_000);
    let [one, other] = [patient(server.url(), ttl).await, patient(server.url(), ttl).await];
    let guard = one.lock("order:1").acquire().await.unwrap();
    server.kill_clients();
    // Tasks of the holder's pool take the lock from each other until the pool knows of a waiter elsewhere.
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let pool = one.clone();
            tokio::spawn(async move {
                loop {
                    let Ok(guard) = pool.lock("order:1").acquire().await else { continue };
                    tokio::time::sleep(ms(1)).await;
                    let _ = guard.release().await;
                }
            })
        })
        .collect();
    eventually_async(DEADLINE, "the holder is back", async || guard.verify().await.is_ok()).await;
    guard.release().await.unwrap();
    let turn = within(DEADLINE, "a turn", other.lock("order:1").acquire()).await.unwrap();
    for task in tasks {
        task.abort();
    }
    turn.release().await.unwrap();
}
