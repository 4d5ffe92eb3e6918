//! A quorum of overloaded nodes that all answer: a vote that waits behind others is slow, and counts. The tests count
//! requests, not time, so that a busy machine changes nothing.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_runtime::backend::{AcquireOutcome, AcquireRequest, Backend, Owner};
use lock_runtime::testing::open_backend;
use lock_runtime::{ErrorKind, LockGuard, LockPool, Wait};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Command, Direction};
use lock_tests::server::fit;
use lock_tests::{FaultProxy, Quorum, RedisServer, Worker, eventually_async};
use tokio::sync::{Barrier, Mutex};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Longer than any of these tests takes if votes succeed.
const BOUND: Duration = ms(120_000);

/// Each test keeps the machine busy, so they run one at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

/// How many votes and releases a node has served. The `SET` of a script is no vote of its own.
fn served(node: &RedisServer, fencing: bool) -> u64 {
    let info = node.cli(&["INFO", "commandstats"]);
    let votes: &[_] = if fencing { &[] } else { &["cmdstat_set:"] };
    let calls = |line: &str| {
        let mut names = ["cmdstat_eval:", "cmdstat_evalsha:"].iter().chain(votes);
        let stats = names.find_map(|name| line.strip_prefix(name))?;
        stats.strip_prefix("calls=")?.split(',').next()?.parse::<u64>().ok()
    };
    info.lines().filter_map(calls).sum()
}

/// Votes and releases that a node without the script receives twice.
#[track_caller]
fn assert_served(node: &RedisServer, fencing: bool, needed: usize) {
    let (served, needed) = (served(node, fencing), needed as u64);
    assert!(served <= needed + needed / 4 + 512, "{served} requests where {needed} are needed");
}

fn reset_counts(quorum: &Quorum) {
    for node in quorum.nodes() {
        assert_eq!(node.cli(&["CONFIG", "RESETSTAT"]), "OK");
    }
}

/// Each of `tasks` tasks takes and frees its own lock `cycles` times.
async fn cycle(pool: &LockPool, tasks: usize, cycles: usize, fencing: bool) {
    let mut set = JoinSet::new();
    for task in 0..tasks {
        let pool = pool.clone();
        set.spawn(async move {
            for cycle in 0..cycles {
                let lock = pool.lock(format!("{task}:{}", cycle % 4)).fencing(fencing);
                lock.wait(Wait::Forever).acquire().await?.release().await?;
            }
            Ok::<_, lock_runtime::LockError>(())
        });
    }
    let all = timeout(BOUND, set.join_all()).await.expect("votes succeed");
    let errors: Vec<_> = all.into_iter().filter_map(Result::err).collect();
    assert!(errors.is_empty(), "{} errors, as {}", errors.len(), errors[0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cycles_of_thousands_of_tasks_on_healthy_nodes_are_one_vote_and_one_release_each() {
    let _alone = ALONE.lock().await;
    const CYCLES: usize = 2;
    for (nodes, fencing, tasks) in [(3, true, 1_024), (5, false, 1_024), (3, true, 4_096)] {
        let quorum = Quorum::start(nodes);
        let pool = LockPool::connect(&quorum.url()).await.unwrap();
        reset_counts(&quorum);
        cycle(&pool, tasks, CYCLES, fencing).await;
        for node in quorum.nodes() {
            assert_served(node, fencing, 2 * tasks * CYCLES);
        }
    }
}

/// All nodes answer, and thousands of other requests are ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_a_held_lock_ends_in_time_under_load() {
    let _alone = ALONE.lock().await;
    const WAIT: Duration = ms(1_500);
    let quorum = Quorum::start(3);
    let holder = LockPool::connect(&quorum.url()).await.unwrap();
    let _held = holder.lock("held").ttl(BOUND).acquire().await.unwrap();
    let pool = LockPool::connect(&quorum.url()).await.unwrap();
    let load = tokio::spawn({
        let pool = pool.clone();
        async move {
            loop {
                cycle(&pool, 4_096, 1, true).await;
            }
        }
    });
    let mut waits = JoinSet::new();
    for _ in 0..64 {
        let waiting = pool.lock("held").wait(WAIT).acquire();
        waits.spawn(async move {
            let began = Instant::now();
            (waiting.await.expect_err("it is held").kind(), began.elapsed())
        });
    }
    let ends = timeout(BOUND, waits.join_all()).await.expect("all waits end");
    load.abort();
    println!("waits of {WAIT:?} end after {:?} at most", ends.iter().map(|(_, took)| took).max());
    for (kind, took) in ends {
        assert_eq!(kind, ErrorKind::Conflict);
        assert!(took < WAIT + ms(7_000), "{took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_node_beside_a_thousand_tasks_costs_no_error() {
    let _alone = ALONE.lock().await;
    let quorum = Quorum::start(3);
    let pool = LockPool::connect(&quorum.url()).await.unwrap();
    pool.lock("warm").acquire().await.unwrap().release().await.unwrap();
    reset_counts(&quorum);
    quorum[1].pause();
    cycle(&pool, 1_024, 2, true).await;
    quorum[1].resume();
    for node in [&quorum[0], &quorum[2]] {
        assert_served(node, true, 2 * 2 * 1_024);
    }
}

/// Nodes with a delay above the shortest node timeout.
#[tokio::test]
async fn far_nodes_need_no_setting() {
    let _alone = ALONE.lock().await;
    let quorum = Quorum::start(3);
    let wires: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
    let url = Quorum::url_of(wires.iter().map(|wire| wire.url().to_owned()));
    let pool = LockPool::connect(&url).await.unwrap();
    for wire in &wires {
        wire.delay(Direction::ToClient, ms(150));
    }
    for fencing in [true, false] {
        for round in 0..3 {
            let guard = pool.lock("k").fencing(fencing).try_acquire().await;
            let guard = guard.unwrap_or_else(|error| panic!("round {round}: {error}"));
            guard.expect("it is free").release().await.unwrap();
        }
    }
    // A round trip above an eighth of the ttl.
    for wire in &wires {
        wire.delay(Direction::ToClient, ms(300));
    }
    let far = || pool.lock("k").ttl(ms(2_000));
    let guard = far().acquire().await.unwrap();
    let began = Instant::now();
    while began.elapsed() < ms(3_000) {
        assert!(guard.is_held(), "lost after {:?}", began.elapsed());
        tokio::time::sleep(ms(20)).await;
    }
    guard.release().await.unwrap();
    far().min_hold(ms(4_000)).acquire().await.unwrap().release().await.unwrap();
}

/// Each write waits for the disk, and requests wait for one another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_free_locks_at_once_are_acquired_where_every_write_is_synced() {
    let _alone = ALONE.lock().await;
    const LOCKS: usize = 1_000;
    let quorum = Quorum::of(5, &fit());
    let pool = LockPool::builder(quorum.url()).wait(BOUND).connect().await.unwrap();
    reset_counts(&quorum);
    let mut set = JoinSet::new();
    for n in 0..LOCKS {
        set.spawn(pool.lock(format!("k:{n}")).acquire());
    }
    let guards = timeout(BOUND, set.join_all()).await.expect("all are had");
    for guard in &guards {
        assert!(guard.as_ref().is_ok_and(LockGuard::is_held), "{guard:?}");
    }
    for node in quorum.nodes() {
        assert_served(node, true, LOCKS);
    }
    pool.shutdown(ms(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_thousand_locks_of_a_killed_holder_are_taken_over() {
    let _alone = ALONE.lock().await;
    const LOCKS: usize = 1_000;
    let quorum = Quorum::start(5);
    // Grants of a killed process, which nothing renews.
    let dead = open_backend(&quorum.url()).await.unwrap();
    let claim = |n: usize| {
        let keys = [format!("k:{n}").into()];
        let mut request = AcquireRequest::new(keys, Owner::random().unwrap(), ms(3_000));
        request.fencing = true;
        request.enqueue = true;
        request
    };
    let claims: Vec<_> = (0..LOCKS).map(claim).collect();
    for some in claims.chunks(100) {
        for outcome in dead.acquire(some).await {
            assert!(matches!(outcome, Ok(AcquireOutcome::Acquired { .. })), "{outcome:?}");
        }
    }
    let granted = Instant::now();
    let pool = LockPool::builder(quorum.url()).wait(BOUND).connect().await.unwrap();
    let mut set = JoinSet::new();
    for n in 0..LOCKS {
        set.spawn(pool.lock(format!("k:{n}")).acquire());
    }
    let guards = timeout(BOUND, set.join_all()).await.expect("all are had");
    println!("{LOCKS} locks are taken over {:?} after the last grant", granted.elapsed());
    for guard in &guards {
        assert!(guard.as_ref().is_ok_and(LockGuard::is_held), "{guard:?}");
    }
    pool.shutdown(ms(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hundred_locks_of_a_killed_process_are_taken_over() {
    let _alone = ALONE.lock().await;
    const TTL_MS: u64 = 2_500;
    let quorum = Quorum::start(3);
    let args = [quorum.url(), "98".to_owned(), TTL_MS.to_string()];
    let holder = Worker::start(env!("CARGO_BIN_EXE_hold-until-signal"), &args);
    holder.wait_for_line(BOUND, |line| line == "ready");
    let pool = LockPool::builder(quorum.url()).wait(BOUND).connect().await.unwrap();
    reset_counts(&quorum);
    let mut set = JoinSet::new();
    let keys = (0..98).map(|n| format!("body:{n}"));
    for key in keys.chain(["guard".to_owned(), "stubborn".to_owned()]) {
        set.spawn(pool.lock(key).acquire());
    }
    eventually_async(BOUND, "all are refused", async || {
        quorum.nodes().iter().all(|node| served(node, true) >= 100)
    })
    .await;
    holder.kill();
    let killed = Instant::now();
    let guards = timeout(BOUND, set.join_all()).await.expect("all are had");
    println!("100 locks are taken over {:?} after the kill, ttl {TTL_MS} ms", killed.elapsed());
    for guard in &guards {
        assert!(guard.as_ref().is_ok_and(LockGuard::is_held), "{guard:?}");
    }
    pool.shutdown(ms(0)).await;
}

/// Without a majority no request is granted. Each caller has its error by the end of its `wait`, however many there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_without_a_majority_has_its_errors_when_the_wait_ends() {
    const WAIT: Duration = ms(1_000);
    let _alone = ALONE.lock().await;
    let quorum = Quorum::start(3);
    let pool = LockPool::builder(quorum.url()).wait(WAIT).connect().await.unwrap();
    pool.lock("warm").acquire().await.unwrap().release().await.unwrap();
    quorum[0].pause();
    quorum[1].pause();
    let mut set = JoinSet::new();
    for n in 0..2_048 {
        let request = pool.lock(format!("k:{n}"));
        set.spawn(async move {
            let began = Instant::now();
            let error = request.acquire().await.expect_err("there is no majority");
            (error.kind(), began.elapsed())
        });
    }
    let ended = timeout(BOUND, set.join_all()).await.expect("all are answered");
    assert!(ended.iter().all(|(kind, _)| *kind == ErrorKind::Backend), "{ended:?}");
    let longest = ended.iter().map(|(_, took)| *took).max().unwrap();
    println!("2,048 calls with a wait of {WAIT:?} ended within {longest:?}");
    assert!(longest < WAIT + ms(15_000), "{longest:?}");
    quorum[0].resume();
    quorum[1].resume();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_locks_are_released_at_a_shutdown_under_load() {
    let _alone = ALONE.lock().await;
    const LOCKS: usize = 1_000;
    let quorum = Quorum::start(5);
    let pool = LockPool::builder(quorum.url()).wait(BOUND).connect().await.unwrap();
    let inside = Arc::new(Barrier::new(LOCKS + 1));
    let mut bodies = JoinSet::new();
    for n in 0..LOCKS {
        let inside = inside.clone();
        bodies.spawn(pool.lock(format!("body:{n}")).run(async move {
            inside.wait().await;
            std::future::pending::<()>().await;
        }));
    }
    timeout(BOUND, inside.wait()).await.expect("all are inside");
    let mut load = JoinSet::new();
    for n in 0..512 {
        let pool = pool.clone();
        load.spawn(async move {
            loop {
                let cycle =
                    async { pool.lock(format!("load:{n}")).acquire().await?.release().await };
                match cycle.await {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::PoolClosed => return,
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }
    let began = Instant::now();
    eventually_async(BOUND, "the nodes are busy", async || began.elapsed() > ms(500)).await;
    let report = timeout(BOUND, pool.shutdown(ms(100))).await.expect("it ends");
    assert!(report.released >= LOCKS && report.abandoned == 0, "{report:?}");
    bodies.join_all().await;
    load.join_all().await;
    for n in 0..LOCKS {
        if n % 50 == 0 {
            assert!(quorum.holders(&format!("body:{n}")).len() < 3, "body:{n} is still held");
        }
    }
}

/// The node has lost its scripts with the rest: their text is sent once, not with each of the renewals that are due then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_node_receives_the_text_of_a_script_once() {
    let _alone = ALONE.lock().await;
    const LOCKS: usize = 2_000;
    let quorum = Quorum::start(3);
    let pool = LockPool::builder(quorum.url()).ttl(BOUND).connect().await.unwrap();
    let mut guards = Vec::new();
    for lock in 0..LOCKS {
        guards.push(pool.lock(format!("held:{lock}")).acquire().await.unwrap());
    }
    let node = &quorum.nodes()[0];
    node.restart();
    eventually_async(BOUND, "the node has all locks again", async || {
        let keys: usize = node.cli(&["DBSIZE"]).parse().unwrap();
        keys > LOCKS
    })
    .await;
    let stats = node.cli(&["INFO", "stats"]);
    let received = stats.lines().find_map(|line| line.strip_prefix("total_net_input_bytes:"));
    let received: usize = received.unwrap().trim().parse().unwrap();
    assert!(received < LOCKS * 4_000, "{received} bytes for {LOCKS} locks");
}

/// A node that is slow with the last renewals does not make the answered ones fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_renewals_of_many_leases_are_confirmed_in_parts() {
    let _alone = ALONE.lock().await;
    const LOCKS: usize = 600;
    let quorum = Quorum::start(3);
    let wires: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
    let url = Quorum::url_of(wires.iter().map(|wire| wire.url().to_owned()));
    let pool = LockPool::builder(url).ttl(BOUND).request_timeout(ms(8_000));
    let pool = pool.connect().await.unwrap();
    // Together, so that all are due at the same time.
    let mut acquiring = JoinSet::new();
    for lock in 0..LOCKS {
        acquiring.spawn(pool.lock(format!("held:{lock}")).acquire());
    }
    let acquired = within(BOUND, "the locks", acquiring.join_all()).await;
    let guards: Vec<LockGuard> = acquired.into_iter().map(Result::unwrap).collect();
    // Two of three hold back the renewals from the 301st on.
    let traps: Vec<_> = wires[..2]
        .iter()
        .map(|wire| {
            let mut seen = 0;
            let is_late = move |command: &Command| {
                seen += usize::from(command.mentions("extend"));
                seen > LOCKS / 2
            };
            wire.on_next(is_late, Action::HoldRequest)
        })
        .collect();
    let end = |guard: &LockGuard| Instant::now() + guard.valid_for();
    let latest = guards.iter().map(end).max().unwrap() + ms(500);
    let renewed = || guards.iter().filter(|guard| end(guard) > latest).count();
    let is_old = async || end(&guards[0]) < Instant::now() + BOUND - ms(3_000);
    eventually_async(BOUND, "a renewal is noticed", is_old).await;
    // All are due as soon as the node is connected again.
    wires[2].cut();
    eventually_async(BOUND, "the first renewals are confirmed", async || renewed() > 0).await;
    assert!(traps.iter().all(|trap| trap.sprung()));
    let renewed = renewed();
    assert!(renewed < LOCKS, "{renewed} of {LOCKS}");
    wires.iter().for_each(FaultProxy::release_held);
}
