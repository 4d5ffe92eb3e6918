//! The effect of a shutdown on holders, waiters and later calls.

#![allow(clippy::disallowed_methods)]

use std::fmt::Debug;
use std::fs;
use std::future::pending;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockError, LockPool, OnLost, ShutdownReport, distributed_lock};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Direction, named};
use lock_tests::runtimes::current_thread;
use lock_tests::{
    FaultProxy, Monitor, RedisServer, Worker, eventually, eventually_async, in_own_process,
};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

const KEY: &str = "order:7";
/// What a busy machine may add to an immediate effect.
const PROMPT: Duration = ms(15_000);
/// Longer than any test takes: a call that ends earlier did not wait for it.
const LONG: Duration = ms(60_000);

async fn pool_on(server: &RedisServer) -> LockPool {
    LockPool::connect(&server.url()).await.unwrap()
}

#[distributed_lock(key = "order:<id>", ttl = "30s", pool = pool)]
async fn annotated(pool: LockPool, id: u32, inside: Arc<Notify>) -> Result<(), LockError> {
    inside.notify_one();
    pending().await
}

#[track_caller]
fn is_shutdown<T: Debug>(outcome: Result<T, LockError>) {
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::PoolClosed);
}

fn locks_in(server: &RedisServer) -> usize {
    let keys = server.query(&["KEYS", "*"]);
    keys.items().iter().filter(|key| key.to_string() != "lock_runtime:fence").count()
}

fn spawn_shutdown(pool: &LockPool, grace: Duration) -> tokio::task::JoinHandle<ShutdownReport> {
    let pool = pool.clone();
    tokio::spawn(async move { pool.shutdown(grace).await })
}

/// Waits until new acquires are rejected. `held` is held, so the probe takes nothing.
async fn has_begun(pool: &LockPool, held: &str) {
    eventually_async(PROMPT, "the shutdown begins", async || {
        let probe = pool.lock(held).try_acquire().await;
        probe.is_err_and(|error| error.kind() == ErrorKind::PoolClosed)
    })
    .await;
}

#[tokio::test]
async fn after_a_shutdown_every_call_is_rejected() {
    for url in ["memory://", &RedisServer::start().url()] {
        let Ok(pool) = LockPool::connect(url).await else { continue };
        assert_eq!(pool.shutdown(LONG).await, ShutdownReport::default());
        is_shutdown(pool.lock(KEY).acquire().await);
        is_shutdown(pool.lock(KEY).try_acquire().await);
        is_shutdown(pool.lock(KEY).run(async {}).await);
        is_shutdown(pool.lock_all([KEY, "b"]).acquire().await);
        is_shutdown(annotated(pool.clone(), 7, Arc::default()).await);
    }
}

#[tokio::test]
async fn waiters_are_rejected_while_holders_continue() {
    let server = RedisServer::start();
    let (pool, other) = (pool_on(&server).await, pool_on(&server).await);
    let held = pool.lock("here").acquire().await.unwrap();
    let elsewhere = other.lock("elsewhere").acquire().await.unwrap();
    let monitor = Monitor::start(&server);
    let mut waiters = JoinSet::new();
    for key in ["here", "here", "here", "elsewhere", "elsewhere"] {
        let request = pool.lock(key).wait(LONG);
        waiters.spawn(async move { request.acquire().await.map(drop) });
    }
    waiters.spawn({
        let request = pool.lock_all(["a", "elsewhere", "here"]).wait(LONG);
        async move { request.acquire().await.map(drop) }
    });
    // They enter the queue; the first one for `elsewhere` sends a request.
    tokio::task::yield_now().await;
    monitor.wait_for(PROMPT, |ran| ran.is("GET", "elsewhere"));
    let shutdown = spawn_shutdown(&pool, LONG);
    let ended = timeout(PROMPT, waiters.join_all()).await.expect("they end at once");
    ended.into_iter().for_each(is_shutdown);
    assert!(!shutdown.is_finished());
    held.verify().await.unwrap();
    held.release().await.unwrap();
    let report = timeout(PROMPT, shutdown).await.expect("no holder is left").unwrap();
    assert_eq!((report.released, report.abandoned), (1, 0));
    elsewhere.verify().await.unwrap();
    assert_eq!(locks_in(&server), 1);
}

#[tokio::test]
async fn bodies_may_end_within_the_grace() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let (inside, finish) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let body = tokio::spawn(pool.lock(KEY).run({
        let (inside, finish) = (inside.clone(), finish.clone());
        async move {
            inside.notify_one();
            finish.notified().await;
            "done"
        }
    }));
    within(DEADLINE, "the body begins", inside.notified()).await;
    let shutdown = spawn_shutdown(&pool, LONG);
    has_begun(&pool, KEY).await;
    assert_eq!(server.cli(&["EXISTS", KEY]), "1");
    finish.notify_one();
    assert_eq!(body.await.unwrap().unwrap(), "done");
    let report = timeout(PROMPT, shutdown).await.expect("no holder is left").unwrap();
    assert_eq!((report.released, report.abandoned), (1, 0));
}

#[tokio::test]
async fn bodies_that_do_not_end_in_time_are_stopped() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let inside = Arc::new(Notify::new());
    let attribute = tokio::spawn(annotated(pool.clone(), 1, inside.clone()));
    within(DEADLINE, "the body begins", inside.notified()).await;
    let run = tokio::spawn(pool.lock("run").run(pending::<()>()));
    let stubborn = pool.lock("stubborn").on_lost(OnLost::Notify).run({
        let inside = inside.clone();
        async move {
            inside.notify_one();
            pending::<()>().await;
        }
    });
    let stubborn = tokio::spawn(stubborn);
    // The lock is held, but the body has not begun, and does not begin any more.
    within(DEADLINE, "the body begins", inside.notified()).await;
    let guard = pool.lock("guard").acquire().await.unwrap();
    eventually_async(PROMPT, "all are held", async || locks_in(&server) == 4).await;

    let report = timeout(PROMPT, pool.shutdown(ms(50))).await.unwrap();
    assert_eq!((report.released, report.abandoned), (4, 0));
    assert_eq!(locks_in(&server), 0);
    is_shutdown(attribute.await.unwrap());
    is_shutdown(run.await.unwrap());
    assert!(!guard.is_held());
    assert_eq!(guard.lost().await.kind(), ErrorKind::PoolClosed);
    is_shutdown(guard.release().await);
    assert!(!stubborn.is_finished(), "it is only notified");
    stubborn.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lock_is_freed_under_a_body_that_blocks_its_thread() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let (unblock, blocked) = mpsc::channel();
    let (begin, begun) = oneshot::channel();
    let body = async move {
        begin.send(()).unwrap();
        blocked.recv().unwrap()
    };
    let body = tokio::spawn(pool.lock("blocked").run(body));
    timeout(PROMPT, begun).await.unwrap().unwrap();
    let report = timeout(PROMPT, pool.shutdown(ms(50))).await.unwrap();
    assert_eq!((report.released, report.abandoned), (0, 1));
    assert_eq!(server.cli(&["EXISTS", "blocked"]), "1");
    unblock.send("done").unwrap();
    assert_eq!(body.await.unwrap().unwrap(), "done");
}

/// Blocks its thread when it is dropped.
struct BlocksInDrop(mpsc::Receiver<()>);

impl Drop for BlocksInDrop {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lock_is_freed_while_a_cancelled_body_is_dropped() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let (unblock, blocked) = mpsc::channel();
    let (begin, begun) = oneshot::channel();
    let body = async move {
        let _blocks = BlocksInDrop(blocked);
        begin.send(()).unwrap();
        pending::<()>().await;
    };
    let body = tokio::spawn(pool.lock("blocked").run(body));
    timeout(PROMPT, begun).await.unwrap().unwrap();
    let report = timeout(PROMPT, pool.shutdown(ms(50))).await.unwrap();
    assert_eq!((report.released, report.abandoned), (0, 1));
    assert_eq!(server.cli(&["EXISTS", "blocked"]), "1");
    drop(unblock);
    is_shutdown(body.await.unwrap());
}

/// Longer than bodies have for their end after the grace.
#[tokio::test]
async fn an_acquire_whose_answer_is_late_leaves_no_lock() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::builder(proxy.url()).request_timeout(LONG).connect().await.unwrap();
    proxy.delay(Direction::ToClient, ms(1_000));
    let acquire = tokio::spawn(pool.lock(KEY).ttl(LONG).wait(LONG).acquire());
    eventually_async(PROMPT, "the store has granted it", async || locks_in(&server) == 1).await;
    let report = timeout(PROMPT * 2, pool.shutdown(Duration::ZERO)).await.unwrap();
    assert_eq!(report.abandoned, 0);
    assert_eq!(locks_in(&server), 0);
    is_shutdown(acquire.await.unwrap());
}

/// The body of a cancelled call has ended. The code that holds a guard may go on, for which the delay is.
#[tokio::test]
async fn a_lock_delay_counts_where_work_goes_on_behind_the_shutdown() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let delayed = |key| pool.lock(key).lock_delay(LONG);
    let body = tokio::spawn(delayed("body").run(pending::<()>()));
    let guard = delayed("guard").acquire().await.unwrap();
    eventually_async(PROMPT, "both are held", async || locks_in(&server) == 2).await;
    let report = timeout(PROMPT, pool.shutdown(ms(50))).await.unwrap();
    assert_eq!((report.released, report.abandoned), (2, 0));
    is_shutdown(body.await.unwrap());
    assert_eq!(server.cli(&["EXISTS", "body"]), "0");
    assert_eq!(server.cli(&["EXISTS", "guard"]), "1");
    drop(guard);
}

#[tokio::test]
async fn a_thousand_held_locks_are_all_released() {
    let server = RedisServer::start();
    // The releases of a thousand locks share the time of one request, which is short on a busy machine.
    let pool = LockPool::builder(server.url()).request_timeout(LONG).connect().await.unwrap();
    let (mut guards, mut bodies) = (Vec::new(), JoinSet::new());
    for n in 0..1_000 {
        match n % 4 {
            0 => drop(bodies.spawn(annotated(pool.clone(), n, Arc::default()))),
            1 => drop(bodies.spawn(pool.lock(format!("run:{n}")).run(pending()))),
            _ => guards.push(pool.lock(format!("guard:{n}")).acquire().await.unwrap()),
        }
    }
    eventually_async(LONG, "all are held", async || locks_in(&server) == 1_000).await;
    let shutdown = spawn_shutdown(&pool, ms(200));
    has_begun(&pool, "guard:2").await;
    // Some end by themselves meanwhile.
    guards.truncate(250);
    let report = timeout(LONG, shutdown).await.unwrap().unwrap();
    assert_eq!(locks_in(&server), 0);
    assert_eq!((report.released, report.abandoned), (1_000, 0));
    bodies.join_all().await.into_iter().for_each(is_shutdown);
}

#[tokio::test]
async fn a_store_that_dies_during_the_shutdown_does_not_hold_it_up() {
    with_a_dead_store(RedisServer::kill).await;
}

#[tokio::test]
async fn a_store_that_hangs_during_the_shutdown_does_not_hold_it_up() {
    with_a_dead_store(RedisServer::pause).await;
}

async fn with_a_dead_store(strike: impl Fn(&RedisServer)) {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let (mut guards, mut bodies) = (Vec::new(), JoinSet::new());
    for n in 0..20 {
        guards.push(pool.lock(format!("guard:{n}")).acquire().await.unwrap());
        bodies.spawn(pool.lock(format!("run:{n}")).run(pending::<()>()));
    }
    eventually_async(PROMPT, "all are held", async || locks_in(&server) == 40).await;
    // Confirmed before the store is gone.
    guards.pop().unwrap().release().await.unwrap();
    let began = Instant::now();
    // The store is gone before it is over.
    let grace = ms(1_500);
    let shutdown = spawn_shutdown(&pool, grace);
    has_begun(&pool, "guard:0").await;
    strike(&server);
    // Releases that are under way when the grace is over.
    guards.truncate(10);
    let report = timeout(grace + PROMPT * 2, shutdown).await.expect("it gives up").unwrap();
    let took = began.elapsed();
    assert_eq!((report.released, report.abandoned), (0, 39), "after {took:?}");
    let ended = timeout(PROMPT, bodies.join_all()).await.expect("bodies are stopped all the same");
    ended.into_iter().for_each(is_shutdown);
    server.resume();
}

/// As if a connection had ended with the request, and another one before it was sent.
#[tokio::test]
async fn a_forced_release_that_fails_is_repeated() {
    for (n, fault) in [Fault::Fail(FailureKind::NotApplied), Fault::Fail(FailureKind::MaybeApplied)]
        .into_iter()
        .enumerate()
    {
        let url = format!("memory://forced-{n}");
        let (store, faults) = FaultyBackend::new(open_backend(&url).await.unwrap());
        let pool = LockPool::with_backend(store).connect().await.unwrap();
        let other =
            LockPool::with_backend(open_backend(&url).await.unwrap()).connect().await.unwrap();
        let guards = [
            pool.lock("order:1").acquire().await.unwrap(),
            pool.lock("order:2").acquire().await.unwrap(),
        ];
        for fault in [fault, Fault::Fail(FailureKind::NotApplied)] {
            faults.plan(Operation::Release, fault);
        }
        let report = pool.shutdown(Duration::ZERO).await;
        assert_eq!((report.released, report.abandoned), (2, 0), "{fault:?}");
        for guard in &guards {
            let free = other.lock(guard.key().clone()).try_acquire().await.unwrap();
            assert!(free.is_some(), "{fault:?}");
        }
    }
}

#[tokio::test]
async fn a_second_shutdown_waits_for_the_first_and_counts_nothing_twice() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let held = pool.lock(KEY).acquire().await.unwrap();
    let first = spawn_shutdown(&pool, LONG);
    has_begun(&pool, KEY).await;
    let second = spawn_shutdown(&pool, 2 * LONG);
    tokio::task::yield_now().await;
    assert!(!second.is_finished());
    held.release().await.unwrap();
    let reports = [first.await.unwrap(), second.await.unwrap(), pool.shutdown(LONG).await];
    assert_eq!(reports.map(|report| (report.released, report.abandoned)), [(1, 0), (0, 0), (0, 0)]);
}

#[tokio::test]
async fn a_second_shutdown_may_end_the_grace_of_the_first() {
    let pool = memory().await;
    let held = pool.lock(KEY).acquire().await.unwrap();
    let first = spawn_shutdown(&pool, LONG);
    has_begun(&pool, KEY).await;
    let second = timeout(PROMPT, pool.shutdown(ms(0))).await.unwrap();
    assert_eq!(held.lost().await.kind(), ErrorKind::PoolClosed);
    let reports = [joined("the first", first).await, second];
    assert_eq!(reports.map(|report| (report.released, report.abandoned)), [(1, 0), (0, 0)]);
}

#[tokio::test]
async fn a_shutdown_that_is_not_awaited_goes_on() {
    let server = RedisServer::start();
    let pool = pool_on(&server).await;
    let held = pool.lock(KEY).acquire().await.unwrap();
    // One poll begins it.
    assert!(poll_once(Box::pin(pool.shutdown(ms(500))).as_mut()).await.is_none());
    let lost = timeout(PROMPT, held.lost()).await.unwrap();
    assert_eq!(lost.kind(), ErrorKind::PoolClosed);
    eventually_async(PROMPT, "the key goes", async || locks_in(&server) == 0).await;
}

/// The server has granted the lock; the answer never reaches the caller.
#[tokio::test]
async fn an_acquire_without_an_answer_is_taken_back_within_the_grace() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    // The shutdown begins before the request is sent again.
    let builder = LockPool::builder(proxy.url()).request_timeout(ms(1_000));
    let pool = builder.connect().await.unwrap();
    pool.lock(KEY).run(async {}).await.unwrap();
    until_the_next_fence_is_a_script().await;
    let trap = proxy.on_next(named("EVALSHA"), Action::DropReply);
    let waiting = tokio::spawn({
        let request = pool.lock(KEY).wait(LONG);
        async move { request.acquire().await.map(drop) }
    });
    eventually_async(PROMPT, "the reply is lost", async || trap.sprung()).await;
    assert_eq!(locks_in(&server), 1);
    let report = timeout(PROMPT * 2, pool.shutdown(PROMPT)).await.expect("it keeps to the grace");
    waiting.await.unwrap().unwrap_err();
    assert_eq!(locks_in(&server), 0, "{report:?}");
}

#[distributed_lock(key = "job:<id>")]
async fn in_the_default_pool(id: u32) -> Result<(), LockError> {
    Ok(())
}

#[test]
fn the_default_pool_can_be_set_up_once_and_again_after_a_shutdown() {
    let test = "::the_default_pool_can_be_set_up_once_and_again_after_a_shutdown";
    in_own_process(&[module_path!(), test].concat(), || current_thread().block_on(set_up_twice()));
}

async fn set_up_twice() {
    let server = RedisServer::start();
    assert_eq!(in_the_default_pool(1).await.unwrap_err().kind(), ErrorKind::PoolNotFound);
    for _ in 0..2 {
        let pool = lock_runtime::init(&server.url()).await.unwrap();
        let second = lock_runtime::init("memory://").await.unwrap_err();
        assert_eq!((second.kind(), second.pool()), (ErrorKind::Config, Some("default")));
        let third = lock_runtime::install("default", LockPool::connect("memory://").await.unwrap());
        assert_eq!(third.unwrap_err().kind(), ErrorKind::Config);
        in_the_default_pool(1).await.unwrap();

        let other = pool_on(&server).await;
        lock_runtime::install("other", other.clone()).unwrap();
        let held =
            (pool.lock("a").acquire().await.unwrap(), other.lock("b").acquire().await.unwrap());
        let report = timeout(PROMPT, lock_runtime::shutdown(ms(50))).await.unwrap();
        assert_eq!((report.released, report.abandoned), (2, 0));
        assert_eq!(locks_in(&server), 0);
        is_shutdown(in_the_default_pool(1).await);
        drop(held);
    }
}

fn catches_sigterm(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).unwrap();
    u64::from_str_radix(caught, 16).unwrap() & (1 << (15 - 1)) != 0
}

#[test]
fn sigterm_lets_bodies_end_and_leaves_no_key() {
    let server = RedisServer::start();
    let args = [server.url(), "998".to_owned()];
    let worker = Worker::start(env!("CARGO_BIN_EXE_hold-until-signal"), &args);
    worker.wait_for_line(LONG, |line| line == "ready");
    assert_eq!(locks_in(&server), 1_000);
    eventually(PROMPT, "a SIGTERM handler is installed", || catches_sigterm(worker.pid()));
    worker.terminate();
    let status = worker.wait_for_exit(ms(3_000) + LONG);
    assert_eq!(locks_in(&server), 0);
    assert!(status.success(), "{status}: {:?}", worker.stderr());
    let said = ["ready", "1000 released, 0 abandoned", "10 done, 988 stopped, guard held: false"];
    assert_eq!(worker.stdout(), said);
}
