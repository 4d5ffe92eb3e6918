//! Pins: a transaction of the holder that depends on the grant, on PostgreSQL and MariaDB.

#![allow(clippy::disallowed_methods)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::testing::{
    Fault, FaultPlan, FaultyBackend, Operation, conformance, open_backend,
};
use lock_runtime::{ErrorKind, Fence, LockGuard, LockPool, Wait};
use lock_tests::prelude::*;
use lock_tests::{SqlServer, SqlSession, eventually_async};
use tokio::task::JoinSet;

/// Each test on both databases; behind the semicolon are tests of PostgreSQL alone.
macro_rules! on_both {
    ($($name:ident),*; $($only:ident),*) => {
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $only() {
                    super::$only(super::Bench::new(lock_tests::SqlServer::postgres()).await).await;
                }
            )*
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $name() {
                    super::$name(super::Bench::new(lock_tests::SqlServer::postgres()).await).await;
                }
            )*
        }
        mod mysql {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $name() {
                    super::$name(super::Bench::new(lock_tests::SqlServer::mysql()).await).await;
                }
            )*
        }
    };
}

on_both!(
    the_store_conforms,
    a_pinned_transaction_of_an_expired_holder_commits_before_the_next_grant,
    a_holder_that_was_frozen_before_the_pin_cannot_commit,
    a_connection_that_ends_with_a_pin_frees_the_key,
    a_release_with_an_open_pin_is_granted_behind_the_commit,
    a_hand_off_with_an_open_pin_is_granted_behind_the_commit,
    a_holder_without_a_fence_waits_for_pins_and_fails_them,
    several_keys_are_pinned_together,
    several_keys_are_not_granted_while_one_is_pinned,
    a_step_to_several_keys_fails_the_pin_of_the_former_holder,
    renewals_and_reads_do_not_wait_for_pins,
    a_request_that_does_not_wait_is_refused_at_once,
    the_retry_of_a_lost_reply_has_the_fence_of_the_row,
    a_snapshot_of_before_the_next_grant_pins_nothing,
    a_missing_table_is_told_with_its_statement,
    a_user_with_the_documented_rights_may_pin,
    without_pins_there_is_no_statement,
    with_holders_frozen_at_random_no_stale_one_commits,
    without_the_pin_some_stale_holders_commit;
    a_grant_between_two_statements_raises_the_row
);

const KEY: &str = "order:1";

/// The key is pinned for the first statement of a request, and free for the second one, which grants it.
async fn a_grant_between_two_statements_raises_the_row(bench: Bench) {
    // A row may be locked for a quarter of it.
    let slow =
        LockPool::builder(url_of(&bench.server)).request_timeout(ms(60_000)).wait(ms(60_000));
    let slow = slow.connect().await.unwrap();
    let guard = bench.pool.lock(KEY).acquire().await.unwrap();
    let mut pinned = bench.pinned(&guard).await;
    guard.release().await.unwrap();
    let mut locked = bench.server.session().await;
    locked.begin().await;
    locked.run("SELECT 1 FROM lock_lease FOR UPDATE").await;
    let waiting = acquire_in_task(&slow, KEY);
    let mut session = bench.server.session().await;
    // The first one inserts, and waits for no row.
    let blocked = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'
        AND application_name = 'lock_runtime' AND query LIKE '%lock_lease%FOR UPDATE%'
        AND query NOT LIKE '%INSERT INTO%'";
    eventually_async(DEADLINE, "the second statement waits for the row", async || {
        !session.rows(blocked).await.is_empty()
    })
    .await;
    pinned.run("COMMIT").await;
    locked.run("COMMIT").await;
    let next = joined("the next holder", waiting).await.1;
    bench.pinned(&next).await.run("COMMIT").await;
}

/// A server with a table of writes, and pools that pin.
struct Bench {
    server: SqlServer,
    pool: LockPool,
    other: LockPool,
    /// What counts the requests of each pool.
    counts: [FaultPlan; 2],
}

impl Bench {
    async fn new(server: SqlServer) -> Self {
        let [(pool, counts), (other, others)] =
            [counted_pool_on(&server).await, counted_pool_on(&server).await];
        let mut session = server.session().await;
        session.run("CREATE TABLE written (resource varchar(64), fence bigint)").await;
        Self { server, pool, other, counts: [counts, others] }
    }

    /// A lease that is not renewed.
    async fn short(&self) -> LockGuard {
        self.pool.lock(KEY).ttl(ms(3_000)).renew(false).acquire().await.unwrap()
    }

    /// Waits until the lease is over at the store too.
    async fn until_expired(&self, guard: &LockGuard) {
        within(DEADLINE, "the loss", guard.lost()).await;
        for key in guard.keys() {
            eventually_async(DEADLINE, "the lease is over at the store", async || {
                let Ok(found) = self.pool.inspect(key.clone()).await else { return false };
                found.holder.is_none_or(|holder| holder.fence != guard.fence())
            })
            .await;
        }
    }

    /// Waits until a waiter is in the queue of the store, or in that of the holder's process.
    async fn until_queued(&self) {
        eventually_async(DEADLINE, "the waiter is queued", async || {
            let held = self.pool.snapshot().held;
            held.iter().any(|held| held.waiting == 1)
                || self.pool.inspect(KEY).await.is_ok_and(|found| found.waiting == Some(1))
        })
        .await;
    }

    /// Waits until requests of a waiter, sent from now on, are refused. Each but the last one has its answer before the next
    /// one is sent.
    async fn until_refused(&self) {
        let sent =
            || -> usize { self.counts.iter().map(|counts| counts.count(Operation::Acquire)).sum() };
        let before = sent();
        eventually_async(DEADLINE, "the waiter asks again", async || sent() >= before + 3).await;
    }

    async fn written(&self) -> Vec<String> {
        self.server.session().await.rows("SELECT fence FROM written ORDER BY fence").await
    }

    /// A transaction that is pinned by `guard`, and has written.
    async fn pinned(&self, guard: &LockGuard) -> SqlSession {
        let mut session = self.server.session().await;
        session.begin().await;
        session.run(&guard.pin_sql().unwrap()).await;
        write(&mut session, guard.fence().unwrap()).await;
        session
    }

    /// What keeps a transaction of a former holder from being committed.
    #[track_caller]
    fn is_refused(&self, outcome: Result<(), String>) {
        let error = outcome.unwrap_err();
        let expected = match self.server {
            SqlServer::Postgres(_) => ["LK001", "Roll the transaction back"],
            SqlServer::Mysql(_) => ["1690", "the_lock_is_lost"],
        };
        assert!(expected.iter().all(|text| error.contains(text)), "{error}");
    }
}

fn url_of(server: &SqlServer) -> String {
    format!("{}&pin=on", server.url())
}

async fn pool_on(server: &SqlServer) -> LockPool {
    patient(url_of(server), ms(20_000)).await
}

async fn counted_pool_on(server: &SqlServer) -> (LockPool, FaultPlan) {
    let (backend, counts) = FaultyBackend::new(open_backend(&url_of(server)).await.unwrap());
    let pool = LockPool::with_backend(backend).ttl(ms(20_000)).wait(Wait::Forever);
    (pool.connect().await.unwrap(), counts)
}

async fn write(session: &mut SqlSession, fence: Fence) {
    session.run(&format!("INSERT INTO written VALUES ('{KEY}', {fence})")).await;
}

async fn the_store_conforms(bench: Bench) {
    let url = url_of(&bench.server);
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

async fn a_pinned_transaction_of_an_expired_holder_commits_before_the_next_grant(bench: Bench) {
    let guard = bench.short().await;
    let (pin, mut transaction) = (guard.pin_sql().unwrap(), bench.pinned(&guard).await);
    let waiting = acquire_in_task(&bench.other, KEY);
    bench.until_expired(&guard).await;
    bench.until_refused().await;
    assert!(!waiting.is_finished(), "the next grant waits for the pinned transaction");
    let committing = Instant::now();
    transaction.run("COMMIT").await;
    let (granted, next) = joined("the next holder", waiting).await;
    assert!(granted > committing && next.fence() > guard.fence());
    assert_eq!(bench.written().await, [guard.fence().unwrap().to_string()]);
    // It cannot begin another one.
    transaction.begin().await;
    bench.is_refused(transaction.try_run(&pin).await);
    transaction.run("ROLLBACK").await;
    let mut transaction = bench.pinned(&next).await;
    transaction.run("COMMIT").await;
    assert_eq!(bench.written().await.len(), 2);
    assert_eq!(guard.pin_sql().unwrap_err().kind(), ErrorKind::Lost);
}

async fn a_holder_that_was_frozen_before_the_pin_cannot_commit(bench: Bench) {
    let guard = bench.short().await;
    let pin = guard.pin_sql().unwrap();
    let next = bench.other.lock(KEY).acquire().await.unwrap();
    let mut transaction = bench.server.session().await;
    transaction.begin().await;
    bench.is_refused(transaction.try_run(&pin).await);
    if let SqlServer::Postgres(_) = bench.server {
        // Also if the program goes on.
        assert!(transaction.try_run("INSERT INTO written VALUES ('x', 1)").await.is_err());
        transaction.run("COMMIT").await;
        assert_eq!(bench.written().await, [""; 0]);
    }
    next.release().await.unwrap();
}

async fn a_connection_that_ends_with_a_pin_frees_the_key(bench: Bench) {
    let guard = bench.short().await;
    let transaction = bench.pinned(&guard).await;
    let waiting = acquire_in_task(&bench.other, KEY);
    bench.until_expired(&guard).await;
    bench.until_refused().await;
    assert!(!waiting.is_finished());
    drop(transaction);
    drop(joined("the next holder", waiting).await);
    assert_eq!(bench.written().await, [""; 0]);
}

async fn a_release_with_an_open_pin_is_granted_behind_the_commit(bench: Bench) {
    let guard = bench.pool.lock(KEY).acquire().await.unwrap();
    let fence = guard.fence().unwrap();
    let mut transaction = bench.pinned(&guard).await;
    guard.release().await.unwrap();
    let waiting = acquire_in_task(&bench.other, KEY);
    bench.until_refused().await;
    assert!(!waiting.is_finished());
    transaction.run("COMMIT").await;
    let next = joined("the next holder", waiting).await.1;
    assert!(next.fence() > Some(fence));
    bench.pinned(&next).await.run("COMMIT").await;
}

/// To a waiter of another process, and to one of the same.
async fn a_hand_off_with_an_open_pin_is_granted_behind_the_commit(bench: Bench) {
    for waiter in [&bench.other, &bench.pool] {
        let guard = bench.pool.lock(KEY).acquire().await.unwrap();
        let fence = guard.fence().unwrap();
        let mut transaction = bench.pinned(&guard).await;
        let waiting = acquire_in_task(waiter, KEY);
        bench.until_queued().await;
        guard.release().await.unwrap();
        bench.until_refused().await;
        assert!(!waiting.is_finished(), "the grant waits for the pinned transaction");
        transaction.run("COMMIT").await;
        let next = joined("the next holder", waiting).await.1;
        assert!(next.fence() > Some(fence));
        bench.pinned(&next).await.run("COMMIT").await;
        next.release().await.unwrap();
    }
}

async fn a_holder_without_a_fence_waits_for_pins_and_fails_them(bench: Bench) {
    let guard = bench.pool.lock(KEY).acquire().await.unwrap();
    let pin = guard.pin_sql().unwrap();
    let mut transaction = bench.pinned(&guard).await;
    let waiting = run_in_task(bench.pool.lock(KEY).fencing(false));
    bench.until_queued().await;
    guard.release().await.unwrap();
    bench.until_refused().await;
    assert!(!waiting.is_finished());
    transaction.run("COMMIT").await;
    let next = joined("the next holder", waiting).await.1;
    transaction.begin().await;
    bench.is_refused(transaction.try_run(&pin).await);
    let error = next.pin_sql().unwrap_err();
    assert!(error.to_string().contains(".fencing(false)"), "{error}");
}

async fn several_keys_are_pinned_together(bench: Bench) {
    let keys = ["a", "b'; --", "c"];
    let guard = bench.pool.lock_all(keys).ttl(ms(3_000)).renew(false).acquire().await.unwrap();
    let pin = guard.pin_sql().unwrap();
    let mut transaction = bench.pinned(&guard).await;
    let waiting = acquire_in_task(&bench.other, keys[1]);
    bench.until_expired(&guard).await;
    bench.until_refused().await;
    assert!(!waiting.is_finished());
    transaction.run("COMMIT").await;
    drop(joined("the next holder", waiting).await);
    transaction.begin().await;
    // One of the keys has been granted since.
    bench.is_refused(transaction.try_run(&pin).await);
}

async fn several_keys_are_not_granted_while_one_is_pinned(bench: Bench) {
    let guard = bench.short().await;
    let mut transaction = bench.pinned(&guard).await;
    let waiting = run_in_task(bench.other.lock_all(["a", KEY, "z"]));
    bench.until_expired(&guard).await;
    bench.until_refused().await;
    assert!(!waiting.is_finished());
    transaction.run("COMMIT").await;
    let next = joined("the next holder", waiting).await.1;
    bench.pinned(&next).await.run("COMMIT").await;
}

/// The keys are taken one by one, since one is held at first.
async fn a_step_to_several_keys_fails_the_pin_of_the_former_holder(bench: Bench) {
    let (short, held) = (bench.short().await, bench.pool.lock("z").acquire().await.unwrap());
    let pin = short.pin_sql().unwrap();
    let waiting = run_in_task(bench.other.lock_all([KEY, "z"]));
    let mut transaction = bench.server.session().await;
    let fence = short.fence().unwrap().to_string();
    eventually_async(DEADLINE, "the first key is taken", async || {
        !transaction.rows("SELECT fence FROM lock_fence").await.contains(&fence)
    })
    .await;
    held.release().await.unwrap();
    let next = joined("the next holder", waiting).await.1;
    transaction.begin().await;
    bench.is_refused(transaction.try_run(&pin).await);
    bench.pinned(&next).await.run("COMMIT").await;
}

async fn renewals_and_reads_do_not_wait_for_pins(bench: Bench) {
    let request = bench.pool.lock(KEY).ttl(ms(6_000)).renew(ms(200));
    let guard = request.acquire().await.unwrap();
    let mut transaction = bench.pinned(&guard).await;
    let waiting = acquire_in_task(&bench.other, KEY);
    bench.until_queued().await;
    let (mut valid_for, mut renewals) = (guard.valid_for(), 0);
    eventually_async(DEADLINE, "renewals are answered", async || {
        let before = std::mem::replace(&mut valid_for, guard.valid_for());
        renewals += u32::from(valid_for > before);
        renewals == 3
    })
    .await;
    guard.verify().await.unwrap();
    assert!(guard.is_held() && !waiting.is_finished());
    transaction.run("COMMIT").await;
    guard.release().await.unwrap();
    drop(joined("the next holder", waiting).await);
}

async fn a_request_that_does_not_wait_is_refused_at_once(bench: Bench) {
    let guard = bench.pool.lock(KEY).acquire().await.unwrap();
    let mut transaction = bench.pinned(&guard).await;
    guard.release().await.unwrap();
    let error = bench.other.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
    let error = bench.other.lock_all([KEY, "z"]).wait(Duration::ZERO).acquire().await.unwrap_err();
    assert!(error.is_conflict(), "{error}");
    // Other keys of the same batch are granted.
    let free = bench.other.lock("free").wait(Duration::ZERO);
    let (free, pinned) =
        tokio::join!(free.acquire(), bench.other.lock(KEY).wait(Duration::ZERO).acquire());
    assert!(free.is_ok() && pinned.is_err());
    transaction.run("COMMIT").await;
    drop(bench.other.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap());
}

async fn the_retry_of_a_lost_reply_has_the_fence_of_the_row(bench: Bench) {
    let url = url_of(&bench.server);
    let (backend, faults) = FaultyBackend::new(open_backend(&url).await.unwrap());
    let pool = LockPool::with_backend(backend).request_timeout(ms(300)).wait(ms(20_000));
    let pool = pool.connect().await.unwrap();
    faults.plan(Operation::Acquire, Fault::LoseReply);
    let guard = pool.lock(KEY).acquire().await.unwrap();
    assert!(faults.count(Operation::Acquire) > 1);
    bench.pinned(&guard).await.run("COMMIT").await;
}

async fn a_snapshot_of_before_the_next_grant_pins_nothing(bench: Bench) {
    let guard = bench.short().await;
    let pin = guard.pin_sql().unwrap();
    let mut transaction = bench.server.session().await;
    match bench.server {
        SqlServer::Postgres(_) => transaction.run("BEGIN ISOLATION LEVEL REPEATABLE READ").await,
        SqlServer::Mysql(_) => {
            let level = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ";
            transaction.run(level).await;
            transaction.begin().await;
        }
    }
    let fence = guard.fence().unwrap().to_string();
    assert_eq!(
        transaction.rows("SELECT fence FROM lock_fence").await,
        std::slice::from_ref(&fence)
    );
    let next = bench.other.lock(KEY).acquire().await.unwrap();
    assert_eq!(transaction.rows("SELECT fence FROM lock_fence").await, [fence]);
    let error = transaction.try_run(&pin).await.unwrap_err();
    assert!(error.contains("40001") || error.contains("1690") || error.contains("1020"), "{error}");
    next.release().await.unwrap();
}

async fn a_missing_table_is_told_with_its_statement(bench: Bench) {
    let mut session = bench.server.session().await;
    session.run("DROP TABLE lock_fence").await;
    let url = bench.server.url().replace("create=on", "pin=on");
    let error = LockPool::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    for text in ["CREATE TABLE lock_fence", "fence bigint NOT NULL", "?create=on"] {
        assert!(error.to_string().contains(text), "{error}");
    }
    // Made by hand.
    let text = error.to_string();
    let at = text.find("CREATE TABLE").unwrap();
    let end = text[at..].find("bigint NOT NULL)").unwrap() + "bigint NOT NULL)".len();
    session.run(&text[at..at + end]).await;
    LockPool::connect(&url).await.unwrap();
}

/// `SELECT` and `UPDATE` on one table.
async fn a_user_with_the_documented_rights_may_pin(bench: Bench) {
    let mut session = bench.server.session().await;
    let (statements, url) = match &bench.server {
        SqlServer::Postgres(server) => (
            ["CREATE ROLE clerk LOGIN", "GRANT SELECT, UPDATE ON lock_fence TO clerk"],
            format!("postgres://clerk@127.0.0.1:{}/locks", server.port()),
        ),
        SqlServer::Mysql(server) => {
            server.query(
                "CREATE USER clerk@'%'; GRANT SELECT, UPDATE ON locks.lock_fence TO clerk@'%'",
            );
            (["SELECT 1", "SELECT 1"], format!("mysql://clerk@127.0.0.1:{}/locks", server.port()))
        }
    };
    for statement in statements {
        session.run(statement).await;
    }
    let guard = bench.pool.lock(KEY).acquire().await.unwrap();
    let mut clerk = SqlSession::open(&url).await;
    clerk.begin().await;
    clerk.run(&guard.pin_sql().unwrap()).await;
    guard.release().await.unwrap();
    let waiting = acquire_in_task(&bench.other, KEY);
    bench.until_refused().await;
    assert!(!waiting.is_finished());
    clerk.run("COMMIT").await;
    drop(joined("the next holder", waiting).await);
}

async fn without_pins_there_is_no_statement(bench: Bench) {
    let pool = LockPool::connect(&bench.server.url()).await.unwrap();
    let guard = pool.lock("order:2").acquire().await.unwrap();
    let error = guard.pin_sql().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("?pin=on"), "{error}");
}

/// What 64 tasks have done with leases that end while they stand still.
#[derive(Debug, Default)]
struct Commits {
    all: AtomicU64,
    /// Sent behind a later grant, and confirmed.
    stale: AtomicU64,
    /// By the pin.
    refused: AtomicU64,
}

impl Commits {
    fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    fn stale(&self) -> u64 {
        self.stale.load(Ordering::Relaxed)
    }

    fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

async fn with_holders_frozen_at_random_no_stale_one_commits(bench: Bench) {
    let seconds = std::env::var("LOCK_CHAOS_SECONDS").map_or(10, |text| text.parse().unwrap());
    // On a busy machine, few grants are answered within their ttl.
    let enough = |commits: &Commits| commits.all() > 20 && commits.refused() > 0;
    let commits = frozen_holders(bench, true, Duration::from_secs(seconds), enough).await;
    assert_eq!(commits.stale(), 0, "{commits:?}");
    assert!(enough(&commits), "{commits:?}");
}

async fn without_the_pin_some_stale_holders_commit(bench: Bench) {
    let enough = |commits: &Commits| commits.stale() > 0;
    let commits = frozen_holders(bench, false, Duration::ZERO, enough).await;
    assert!(enough(&commits), "{commits:?}");
}

/// The highest fence that a task has received for each key.
type Granted = Arc<Mutex<HashMap<String, Fence>>>;

/// Goes on for at least this long, and until it was `enough`.
async fn frozen_holders(
    bench: Bench,
    pins: bool,
    least: Duration,
    enough: impl Fn(&Commits) -> bool + Copy + Send + 'static,
) -> Arc<Commits> {
    const TASKS: usize = 64;
    const KEYS: usize = 6;
    let began = Instant::now();
    let (commits, granted) = (Arc::<Commits>::default(), Granted::default());
    let server = &bench.server;
    let pools = [pool_on(server).await, pool_on(server).await, pool_on(server).await];
    let mut tasks = JoinSet::new();
    for n in 0..TASKS {
        let (pool, mut session) = (pools[n % pools.len()].clone(), bench.server.session().await);
        let (commits, granted) = (commits.clone(), granted.clone());
        tasks.spawn(async move {
            while began.elapsed() < least
                || (began.elapsed() < least + 2 * DEADLINE && !enough(&commits))
            {
                let first = fastrand::usize(..KEYS);
                // Some have two keys.
                let keys = match fastrand::u8(..4) {
                    0 => vec![first, (first + 1) % KEYS],
                    _ => vec![first],
                };
                let names = keys.iter().map(|key| format!("order:{key}"));
                let request = pool.lock_all(names).ttl(ms(250)).renew(false).wait(ms(2_000));
                let Ok(guard) = request.acquire().await else { continue };
                work(&guard, &mut session, pins, &commits, &granted).await;
            }
        });
    }
    within(least + 3 * DEADLINE, "all tasks", tasks.join_all()).await;
    println!("{:.0?}, pins {pins}: {commits:?}", began.elapsed());
    commits
}

/// A transaction of a holder that may stand still at any point.
async fn work(
    guard: &LockGuard,
    session: &mut SqlSession,
    pins: bool,
    commits: &Commits,
    granted: &Granted,
) {
    let fence = guard.fence().unwrap();
    let Ok(pin) = guard.pin_sql() else { return };
    for key in guard.keys() {
        let mut granted = granted.lock().unwrap();
        let highest = granted.entry(key.to_string()).or_insert(fence);
        *highest = fence.max(*highest);
    }
    freeze().await;
    session.begin().await;
    if pins && session.try_run(&pin).await.is_err() {
        commits.refused.fetch_add(1, Ordering::Relaxed);
        session.run("ROLLBACK").await;
        return;
    }
    write(session, fence).await;
    freeze().await;
    let is_stale = {
        let granted = granted.lock().unwrap();
        guard.keys().iter().any(|key| granted[key.as_str()] > fence)
    };
    session.run("COMMIT").await;
    commits.all.fetch_add(1, Ordering::Relaxed);
    commits.stale.fetch_add(u64::from(is_stale), Ordering::Relaxed);
}

/// Mostly for less than the ttl.
async fn freeze() {
    let frozen = if fastrand::u8(..4) == 0 { fastrand::u64(250..700) } else { fastrand::u64(..30) };
    tokio::time::sleep(ms(frozen)).await;
}
