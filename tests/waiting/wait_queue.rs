//! A contended lock passes from process to process in FIFO order and without polling. A waiter that dies, freezes
//! or gives up delays no other waiter.
//!
//! Pools stand for processes: each has its own connection and channel. Killed and frozen waiters are real processes.

#![allow(clippy::disallowed_methods)]

use std::collections::HashSet;
use std::fmt::Debug;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::{Fence, LockGuard, LockPool, Wait};
use lock_tests::history::{Grant, History, Recorder, now_ns};
use lock_tests::monitor::Ran;
use lock_tests::prelude::*;
use lock_tests::{Latency, Monitor, RedisServer, Worker, eventually_async};
use tokio::task::{JoinHandle, JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

/// No test waits as long, so that no ttl hides a lock that was not handed off.
const TTL: Duration = ms(20_000);
/// From a release to the entry of a notified waiter. Less than any polling interval.
const CALLED: Duration = ms(60);
const KEY: &str = "k";

pub(crate) async fn connect(url: &str) -> LockPool {
    let pool = LockPool::builder(url).ttl(TTL).wait(Wait::Forever);
    // Every server here answers, so a slow request on a busy machine is not repeated.
    pool.request_timeout(ms(5_000)).connect().await.unwrap()
}

pub(crate) async fn pools<const N: usize>(server: &RedisServer) -> [LockPool; N] {
    let mut pools = Vec::new();
    for _ in 0..N {
        pools.push(connect(&server.url()).await);
    }
    pools.try_into().unwrap()
}

/// How a waiter gives up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GiveUp {
    Dropped,
    TimedOut,
}

mod hand_off {
    use super::*;

    #[tokio::test]
    async fn an_uncontended_lock_costs_two_plain_commands() {
        let server = RedisServer::start();
        let [pool] = pools(&server).await;
        let cycle = async || {
            let guard = pool.lock(KEY).fencing(false).acquire().await.unwrap();
            guard.release().await.unwrap();
        };
        // The server learns the script.
        cycle().await;
        let monitor = Monitor::start(&server);
        for _ in 0..10 {
            cycle().await;
        }
        let mut ran = by_clients(monitor.settled());
        // The handshake of a connection on this runtime may be among them.
        ran.retain(|ran| ran.args.iter().any(|arg| arg == KEY));
        let names: Vec<_> = ran.iter().map(Ran::name).collect();
        assert_eq!(names, ["SET", "EVALSHA"].repeat(10));
    }

    /// While the other one waits, the pool that acquires in a loop has the key once.
    #[tokio::test(start_paused = true)]
    async fn two_pools_in_memory_take_turns() {
        const EACH: usize = 200;
        let connect = async || {
            let pool = LockPool::builder("memory://take-turns").ttl(TTL).wait(Wait::Forever);
            pool.on_current_runtime().connect().await.unwrap()
        };
        let (looping, other) = (connect().await, connect().await);
        let mut holds = 0;
        let in_a_loop = async {
            loop {
                let guard = looping.lock(KEY).acquire().await.unwrap();
                holds += 1;
                sleep(ms(1)).await;
                guard.release().await.unwrap();
            }
        };
        let waiting = async {
            for _ in 0..EACH {
                other.lock(KEY).acquire().await.unwrap().release().await.unwrap();
            }
        };
        tokio::select! {
            () = in_a_loop => {}
            waited = timeout(ms(60_000), waiting) => waited.expect("the other one has each turn"),
        }
        assert!(holds <= EACH + 2, "{holds} holds");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_pools_take_turns_for_three_commands_a_section() {
        const EACH: usize = 400;
        let server = RedisServer::start();
        let pools: [_; 2] = pools(&server).await;
        let monitor = Monitor::start(&server);
        let began = Instant::now();
        let changes = alternate(pools, KEY, EACH).await;
        let sections = 2 * EACH;
        let took = began.elapsed();
        let lines = by_clients(monitor.settled());
        let commands = lines.len();
        let by_text = lines.iter().filter(|ran| ran.name() == "EVAL").count();
        println!(
            "{by_text} by text, {:.2} commands a section, {changes} changes in {sections} sections, {:?} each",
            commands as f64 / sections as f64,
            took / sections as u32
        );
        // Without a queue there are a few. A task that is not scheduled leaves the turns to the other one.
        assert!(changes > sections / 4, "{changes} changes in {sections} sections");
        // Each pool may have to send one script by its text. More are passed-on grants.
        assert!(by_text <= 2, "{by_text} scripts by their text");
        assert!(commands < sections * 7 / 2, "{commands} commands for {sections} sections");
    }

    #[tokio::test]
    async fn a_release_notifies_the_waiter() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let mut took = Latency::below(CALLED, 20);
        while took.wants_more() {
            let guard = ours.lock(KEY).acquire().await.unwrap();
            let next = acquire_in_task(&theirs, KEY);
            until_queued(&server, KEY, 1).await;
            let freed = release(guard).await;
            let (got, guard) = joined("the waiter", next).await;
            took.push(got - freed);
            release(guard).await;
        }
        println!("from release to entry: {took}");
        until_nothing_is_left(&server).await;
    }

    /// For one key with and without a fence, and for several; each on a key without earlier waiters.
    #[tokio::test]
    async fn also_directly_after_it_was_queued() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        for (case, other, fencing) in
            [("fenced", None, true), ("plain", None, false), ("several", Some("other"), true)]
        {
            let mut took = Latency::below(CALLED, 5);
            for round in 0.. {
                if !took.wants_more() {
                    break;
                }
                let key = format!("{case}:{round}");
                let guard = ours.lock(key.as_str()).acquire().await.unwrap();
                let keys = [key.as_str()].into_iter().chain(other);
                let next = run_in_task(theirs.lock_all(keys).fencing(fencing));
                sleep(ms(20)).await;
                let freed = release(guard).await;
                let (got, guard) = joined(case, next).await;
                took.push(got - freed);
                release(guard).await;
            }
            println!("{case}, just come: {took}");
        }
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn waiters_are_served_in_fifo_order() {
        let server = RedisServer::start();
        let pools: [_; 6] = pools(&server).await;
        for round in 0..4 {
            let guard = pools[0].lock(KEY).acquire().await.unwrap();
            let mut order: Vec<_> = (1..6).collect();
            order.rotate_left(round);
            let served = Arc::new(Mutex::new(Vec::new()));
            let mut waiting = Vec::new();
            for (count, &n) in order.iter().enumerate() {
                let (next, served) = (acquire_in_task(&pools[n], KEY), served.clone());
                waiting.push(tokio::spawn(async move {
                    let (_, guard) = next.await.unwrap();
                    served.lock().unwrap().push(n);
                    guard.release().await.unwrap();
                }));
                until_queued(&server, KEY, count + 1).await;
            }
            release(guard).await;
            for waiting in waiting {
                joined(round, waiting).await;
            }
            assert_eq!(*served.lock().unwrap(), order);
        }
        until_nothing_is_left(&server).await;
    }
}

mod dead_and_frozen {
    use super::*;

    fn start_waiter(url: &str, dir: &Path, name: &str, ttl: Duration) -> Worker {
        let ttl = ttl.as_millis().to_string();
        let program = env!("CARGO_BIN_EXE_waiter");
        let worker = Worker::start(program, &[url, dir.to_str().unwrap(), name, &ttl]);
        worker.wait_for_line(DEADLINE, |line| line == "ready");
        worker
    }

    /// A pool that records its grants.
    struct Recorded {
        recorder: Recorder,
        pool: LockPool,
    }

    impl Recorded {
        async fn new(server: &RedisServer, dir: &Path, name: &str, ttl: Duration) -> Self {
            let pool = LockPool::builder(server.url()).ttl(ttl).wait(Wait::Forever);
            let recorder = Recorder::create(dir, name).unwrap();
            Self { recorder, pool: pool.connect().await.unwrap() }
        }

        async fn lock(&self) -> (Instant, LockGuard, u64) {
            let asked = now_ns();
            let guard = timeout(DEADLINE, self.pool.lock(KEY).acquire()).await.unwrap().unwrap();
            let fence = guard.fence().map(Fence::get);
            let grant = self.recorder.granted(KEY, 0, asked, || guard.valid_for(), fence);
            (Instant::now(), guard, grant)
        }

        async fn free(&self, guard: LockGuard, grant: u64) {
            self.recorder.release(grant);
            guard.release().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn killed_waiters_are_skipped() {
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let [holder, last] = pools(&server).await;
        let mut took = Latency::below(NOISE, 2);
        for round in 0.. {
            if !took.wants_more() {
                break;
            }
            let guard = holder.lock(KEY).acquire().await.unwrap();
            let mut dead = Vec::new();
            for n in 0..3 {
                let worker = start_waiter(&server.url(), dir.path(), &format!("p{round}-{n}"), TTL);
                worker.send_line("lock");
                until_queued(&server, KEY, n + 1).await;
                dead.push(worker);
            }
            let next = acquire_in_task(&last, KEY);
            until_queued(&server, KEY, 4).await;
            for worker in &dead {
                worker.kill();
            }
            // A client counts as a receiver of messages until the server has read the end of its connection.
            eventually_async(DEADLINE, "the server knows that they are gone", async || {
                server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]).lines().count() == 2
            })
            .await;
            let freed = release(guard).await;
            let (got, guard) = joined("the waiter behind the dead one", next).await;
            took.push(got - freed);
            release(guard).await;
        }
        println!("behind three killed waiters: {took}");
        until_nothing_is_left(&server).await;
    }

    /// A ttl of two seconds makes a grant of 200 ms. A resumed waiter finds another holder, and waits.
    async fn frozen(count: usize) {
        let ttl = ms(2_000);
        let grant = ms(200);
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let holder = Recorded::new(&server, dir.path(), "holder", ttl).await;
        let last = Recorded::new(&server, dir.path(), "last", ttl).await;
        let (_, guard, held) = holder.lock().await;
        let mut workers = Vec::new();
        for n in 0..count {
            let worker = start_waiter(&server.url(), dir.path(), &format!("frozen{n}"), ttl);
            worker.send_line("lock");
            until_queued(&server, KEY, n + 1).await;
            workers.push(worker);
        }
        let next = tokio::spawn(async move {
            let locked = last.lock().await;
            (last, locked)
        });
        until_queued(&server, KEY, count + 1).await;
        for worker in &workers {
            worker.pause();
        }
        let freed = Instant::now();
        holder.free(guard, held).await;
        let (last, (got, guard, grant_of_last)) =
            joined("the waiter behind the frozen one", next).await;
        println!("behind {count} frozen waiters with a grant of {grant:?}: {:?}", got - freed);
        // A waiter that is not skipped costs a ttl.
        assert!(got - freed < ttl * u32::try_from(count).unwrap(), "{:?}", got - freed);
        for worker in &workers {
            worker.resume();
        }
        sleep(ms(300)).await;
        assert!(guard.is_held());
        let inside = |worker: &Worker| worker.stdout().iter().any(|line| line.starts_with("in"));
        assert!(!workers.iter().any(inside), "no waiter enters on a stale grant");
        last.free(guard, grant_of_last).await;
        for _ in &workers {
            let mut next = None;
            eventually_async(DEADLINE, "the thawed are served", async || {
                next = workers.iter().find(|worker| {
                    let lines = worker.stdout();
                    inside(worker) && !lines.iter().any(|line| line == "out")
                });
                next.is_some()
            })
            .await;
            let worker = next.unwrap();
            worker.send_line("free");
            worker.wait_for_line(DEADLINE, |line| line == "out");
        }
        let history = History::read(dir.path()).unwrap();
        history.assert_safe();
        assert_eq!(history.grants().len(), 2 + count);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_frozen_waiter_costs_the_time_of_one_grant() {
        frozen(1).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_frozen_waiters_cost_two() {
        frozen(2).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_waiter_that_thaws_in_time_takes_its_grant() {
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let [holder, last] = pools(&server).await;
        let worker = start_waiter(&server.url(), dir.path(), "frozen", TTL);
        let lines =
            |start: &str| worker.stdout().iter().filter(|line| line.starts_with(start)).count();
        for round in 0.. {
            assert!(round < 5, "it never thawed in time");
            let guard = holder.lock(KEY).acquire().await.unwrap();
            worker.send_line("lock");
            until_queued(&server, KEY, 1).await;
            let next = acquire_in_task(&last, KEY);
            until_queued(&server, KEY, 2).await;
            worker.pause();
            release(guard).await;
            worker.resume();
            eventually_async(DEADLINE, "one of the two is served", async || {
                next.is_finished() || lines("in") > round
            })
            .await;
            // On a slow machine the second of the grant may be over first.
            let is_late = next.is_finished();
            if is_late {
                release(joined("the next", next).await.1).await;
                eventually_async(DEADLINE, "it is served", async || lines("in") > round).await;
                worker.send_line("free");
                eventually_async(DEADLINE, "it is out", async || lines("out") > round).await;
                continue;
            }
            // The next waiter polls at the end of the grant, which is a ttl by then.
            sleep(ms(1_200)).await;
            assert!(!next.is_finished());
            worker.send_line("free");
            release(joined("the next", next).await.1).await;
            break;
        }
        until_nothing_is_left(&server).await;
    }

    /// Freezes hit waiters, holders and notified waiters, for less and for more than a ttl.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn freezes_at_any_moment_never_make_two_valid_leases() {
        let ttl = ms(400);
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let workers: Vec<_> = (0..4)
            .map(|n| start_waiter(&server.url(), dir.path(), &format!("p{n}"), ttl))
            .collect();
        for worker in &workers {
            worker.send_line("loop 0");
        }
        let read = || {
            let history = History::read(dir.path()).unwrap();
            let by = |n| move |grant: &&Grant| grant.process == format!("p{n}");
            let served = [0, 1, 2, 3].map(|n| history.grants().iter().filter(by(n)).count());
            (history, served)
        };
        let end = Instant::now() + ms(120_000);
        let mut freezes = 0;
        // Every process is frozen and served repeatedly.
        while freezes < 12 || read().1.iter().any(|&count| count <= 20) {
            assert!(Instant::now() < end, "sections {:?}", read().1);
            let worker = fastrand::choice(&workers).unwrap();
            worker.pause();
            sleep(ms(if fastrand::bool() {
                fastrand::u64(20..150)
            } else {
                fastrand::u64(450..600)
            }))
            .await;
            worker.resume();
            sleep(ms(fastrand::u64(5..60))).await;
            freezes += 1;
        }
        for worker in &workers {
            assert_eq!(worker.stderr(), Vec::<String>::new());
            worker.kill();
        }
        let (history, served) = read();
        history.assert_safe();
        let naive = history.naive_overlaps().len();
        println!("{freezes} freezes, sections {served:?}, {naive} naive overlaps");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_lock_of_a_killed_holder_is_free_at_the_end_of_its_ttl() {
        let ttl = ms(1_000);
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = pools(&server).await;
        let worker = start_waiter(&server.url(), dir.path(), "killed", ttl);
        worker.send_line("lock");
        worker.wait_for_line(DEADLINE, |line| line.starts_with("in"));
        let mut waiting = [acquire_in_task(&first, KEY), acquire_in_task(&second, KEY)];
        until_queued(&server, KEY, 2).await;
        let killed = Instant::now();
        worker.kill();
        // Both waiters are alive: the first one to send a request after the ttl gets the lock.
        let [one, other] = &mut waiting;
        let next = async {
            tokio::select! { done = one => (done, 1), done = other => (done, 0) }
        };
        let (served, left) = timeout(DEADLINE, next).await.expect("one of the two is served");
        let (got, guard) = served.unwrap();
        println!("after a killed holder with a ttl of {ttl:?}: {:?}", got - killed);
        assert!(got - killed < ttl + ms(5_000), "{:?}", got - killed);
        release(guard).await;
        let last = waiting.into_iter().nth(left).unwrap();
        release(joined("the other", last).await.1).await;
        until_nothing_is_left(&server).await;
    }
}

mod given_up {
    use super::*;

    /// One of three waiters gives up; the other two are served in order.
    async fn one_leaves(server: &RedisServer, pools: &[LockPool; 4], at: usize, how: GiveUp) {
        let key = &*format!("{how:?}:{at}");
        let case = (how, at);
        let guard = pools[0].lock(key).acquire().await.unwrap();
        let mut stay = Vec::new();
        let (mut leaver, mut timed_out) = (None, None);
        for n in 0..3 {
            if n != at {
                stay.push(acquire_in_task(&pools[n + 1], key));
            } else if how == GiveUp::Dropped {
                leaver = Some(acquire_in_task(&pools[n + 1], key));
            } else {
                // It must not leave before all are queued.
                let acquiring = pools[n + 1].lock(key).wait(ms(4_000)).acquire();
                timed_out = Some(tokio::spawn(async move { acquiring.await.unwrap_err() }));
            }
            until_queued(server, key, n + 1).await;
        }
        if let Some(leaver) = leaver {
            leaver.abort();
        }
        if let Some(timed_out) = timed_out {
            let error = joined(case, timed_out).await;
            assert!(error.is_conflict(), "{error}");
        }
        until_queued(server, key, 2).await;
        let mut freed = release(guard).await;
        for task in stay {
            let (got, guard) = joined(case, task).await;
            assert!(got - freed < TTL / 4, "{case:?}: {:?}", got - freed);
            freed = release(guard).await;
        }
    }

    #[tokio::test]
    async fn at_every_position_in_the_queue() {
        let server = RedisServer::start();
        let pools: [_; 4] = pools(&server).await;
        let cases = (0..3).flat_map(|at| [(at, GiveUp::Dropped), (at, GiveUp::TimedOut)]);
        let (server, pools) = (Rc::new(server), Rc::new(pools));
        let (all, mut ended) = (LocalSet::new(), Vec::new());
        for (at, how) in cases {
            let (server, pools) = (server.clone(), pools.clone());
            let case = async move { one_leaves(&server, &pools, at, how).await };
            ended.push(all.spawn_local(case));
        }
        all.await;
        for case in ended {
            case.await.unwrap();
        }
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn the_queue_is_deleted_when_all_leave() {
        let server = RedisServer::start();
        let pools: [_; 4] = pools(&server).await;
        let guard = pools[0].lock(KEY).acquire().await.unwrap();
        let waiting: Vec<_> = pools[1..].iter().map(|pool| acquire_in_task(pool, KEY)).collect();
        until_queued(&server, KEY, 3).await;
        waiting.iter().for_each(JoinHandle::abort);
        until_queued(&server, KEY, 0).await;
        assert_eq!(server.cli(&["KEYS", "*line*"]), "");
        // The contention mark still exists and does no harm.
        assert!(has_contended_mark(&server.cli(&["GET", KEY])));
        release(guard).await;
        until_nothing_is_left(&server).await;
    }

    /// The tasks are in the same pool: the position in the queue stays.
    #[tokio::test]
    async fn a_task_leaves_its_position_to_the_next_of_its_pool() {
        let server = RedisServer::start();
        let [holder, ours, theirs] = pools(&server).await;
        let guard = holder.lock(KEY).acquire().await.unwrap();
        let leaver = acquire_in_task(&ours, KEY);
        until_queued(&server, KEY, 1).await;
        let successor = acquire_in_task(&ours, KEY);
        let last = acquire_in_task(&theirs, KEY);
        until_queued(&server, KEY, 2).await;
        leaver.abort();
        let line = server.cli(&["ZRANGE", "k:lock_runtime:line", "0", "-1"]);
        sleep(ms(50)).await;
        assert_eq!(server.cli(&["ZRANGE", "k:lock_runtime:line", "0", "-1"]), line);
        release(guard).await;
        let (_, guard) = joined("the successor", successor).await;
        assert!(!last.is_finished());
        release(guard).await;
        release(joined("the last", last).await.1).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn in_the_instant_of_the_grant() {
        const ROUNDS: usize = 150;
        let server = RedisServer::start();
        let [holder, ours, theirs] = pools(&server).await;
        let (mut slowest, mut slow) = (Duration::ZERO, 0);
        for round in 0..ROUNDS {
            let guard = holder.lock(KEY).acquire().await.unwrap();
            let leaver = acquire_in_task(&ours, KEY);
            until_queued(&server, KEY, 1).await;
            let last = acquire_in_task(&theirs, KEY);
            until_queued(&server, KEY, 2).await;
            let leave = Instant::now() + Duration::from_micros(fastrand::u64(..600));
            let leaving = tokio::spawn(abort_at(leave, leaver));
            let freed = release(guard).await;
            leaving.await.unwrap();
            let (got, guard) = joined(round, last).await;
            slowest = slowest.max(got - freed);
            slow += usize::from(got - freed >= NOISE);
            release(guard).await;
        }
        println!("granted and given up at once: passed on within {slowest:?}");
        // A grant that is not passed on costs a second, in about every third round.
        assert!(slow <= ROUNDS / 20, "{slow} of {ROUNDS} rounds took {NOISE:?} and more");
        until_nothing_is_left(&server).await;
    }

    /// A request that reaches the server after its pool has abandoned it.
    #[tokio::test]
    async fn a_grant_to_an_abandoned_position_is_passed_on() {
        let server = RedisServer::start();
        let [holder, ours, theirs] = pools(&server).await;
        let other = ours.lock("other").acquire().await.unwrap();
        let ghost = "0".repeat(32) + &server.cli(&["GET", "other"])[32..];
        release(other).await;
        for followers in [0, 1] {
            let mut took = Latency::below(NOISE, 1);
            while took.wants_more() {
                let guard = holder.lock(KEY).acquire().await.unwrap();
                let next = (followers > 0).then(|| acquire_in_task(&theirs, KEY));
                until_queued(&server, KEY, followers).await;
                server.cli(&["ZADD", "k:lock_runtime:line", "1", &ghost]);
                if next.is_none() {
                    let marked = with_contended_mark(&server.cli(&["GET", KEY]));
                    server.cli(&["SET", KEY, &marked, "KEEPTTL"]);
                }
                let freed = release(guard).await;
                if let Some(next) = next {
                    release(joined("the waiter behind it", next).await.1).await;
                }
                eventually_async(DEADLINE, "the lock is free", async || {
                    server.cli(&["EXISTS", KEY]) == "0"
                })
                .await;
                took.push(freed.elapsed());
            }
            println!("free behind an abandoned position, {followers} behind it: {took}");
        }
        until_nothing_is_left(&server).await;
    }

    /// A shard channel that moves while its process waits leaves a second entry of the owner in the queue. The release of this
    /// owner does not reserve the lock for itself.
    #[tokio::test]
    async fn a_second_entry_of_the_holder() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        for followers in [0, 1] {
            let guard = ours.lock(KEY).acquire().await.unwrap();
            let next = (followers > 0).then(|| acquire_in_task(&theirs, KEY));
            until_queued(&server, KEY, followers).await;
            let value = server.cli(&["GET", KEY]);
            let second = format!("{}00ab", &value[..45]);
            server.cli(&["ZADD", "k:lock_runtime:line", "1", &second]);
            if next.is_none() {
                server.cli(&["SET", KEY, &with_contended_mark(&value), "KEEPTTL"]);
            }
            release(guard).await;
            let Some(next) = next else {
                assert_eq!(server.cli(&["EXISTS", KEY]), "0");
                continue;
            };
            let holder = server.cli(&["GET", KEY]);
            assert!(!holder.starts_with(&value[..32]), "{holder} is of the former holder");
            release(joined("the waiter after it", next).await.1).await;
        }
        until_nothing_is_left(&server).await;
    }

    /// Tasks of several pools; a third of the acquires is given up after a moment.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_third_at_random() {
        const TASKS: usize = 8;
        let server = RedisServer::start();
        let pools: [_; 4] = pools(&server).await;
        let inside = Arc::new(AtomicBool::new(false));
        let pauses = Arc::new(Mutex::new((Instant::now(), Vec::new())));
        let served: Arc<[AtomicUsize; 4 * TASKS]> = Arc::new(std::array::from_fn(|_| 0.into()));
        let given_up = Arc::new(AtomicUsize::new(0));
        let over = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for n in 0..4 * TASKS {
            let pool = pools[n % 4].clone();
            let (inside, pauses, over) = (inside.clone(), pauses.clone(), over.clone());
            let (served, given_up) = (served.clone(), given_up.clone());
            tasks.spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let acquire = pool.lock(KEY).acquire();
                    let guard = if fastrand::u8(..3) == 0 {
                        let limit = Duration::from_micros(fastrand::u64(..8_000));
                        let Ok(guard) = timeout(limit, acquire).await else {
                            given_up.fetch_add(1, Ordering::Relaxed);
                            continue;
                        };
                        guard.unwrap()
                    } else {
                        acquire.await.unwrap()
                    };
                    {
                        let mut pauses = pauses.lock().unwrap();
                        let pause = pauses.0.elapsed();
                        pauses.1.push(pause);
                    }
                    assert!(!inside.swap(true, Ordering::SeqCst), "two inside");
                    served[n].fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                    assert!(inside.swap(false, Ordering::SeqCst));
                    pauses.lock().unwrap().0 = Instant::now();
                    guard.release().await.unwrap();
                }
            });
        }
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        eventually_async(ms(120_000), "all are served, and many give up", async || {
            served.iter().all(|count| load(count) > 3) && load(&given_up) > 200
        })
        .await;
        over.store(true, Ordering::Relaxed);
        timeout(DEADLINE, tasks.join_all()).await.expect("all are served");
        let served: Vec<_> = served.iter().map(load).collect();
        let mut pauses = std::mem::take(&mut pauses.lock().unwrap().1);
        pauses.sort();
        // No abandoned position delays the next grant until a poll.
        let pause = pauses[pauses.len() * 9 / 10];
        println!(
            "{} sections, {given_up:?} given up, pauses {pause:?} to {:?}, per task {:?}..{:?}",
            served.iter().sum::<usize>(),
            pauses.last(),
            served.iter().min().unwrap(),
            served.iter().max().unwrap()
        );
        assert!(pause < ms(250), "{pause:?}");
        until_nothing_is_left(&server).await;
    }
}

mod contention_marks {
    use super::*;

    fn is_marked(server: &RedisServer, key: &str) -> bool {
        has_contended_mark(&server.cli(&["GET", key]))
    }

    #[tokio::test]
    async fn min_hold_keeps_waiters_waiting_and_no_longer() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let hold = ms(500);
        let asked = Instant::now();
        let guard = ours.lock(KEY).min_hold(hold).acquire().await.unwrap();
        let next = acquire_in_task(&theirs, KEY);
        until_queued(&server, KEY, 1).await;
        release(guard).await;
        let (got, guard) = joined("after min_hold", next).await;
        println!("min_hold of {hold:?}: {:?}", got - asked);
        assert!(got - asked > hold - ms(20), "{:?}", got - asked);
        assert!(got - asked < hold + TTL / 4, "{:?}", got - asked);
        release(guard).await;
        until_nothing_is_left(&server).await;
    }

    /// A min_hold ends with a ttl, of which a server tells nothing. An owner with a queue claim as its first request does not
    /// know of it either.
    #[tokio::test]
    async fn a_release_before_the_end_of_min_hold_tells_the_next_owner_when_it_ends() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let guard = ours.lock(KEY).min_hold(ms(1_000)).acquire().await.unwrap();
        let next = acquire_in_task(&theirs, KEY);
        until_queued(&server, KEY, 1).await;
        let monitor = Monitor::start(&server);
        release(guard).await;
        let text = |ran: &Ran| ran.args.iter().find(|arg| arg.starts_with("called:")).cloned();
        let called = monitor.settled().iter().find_map(text).expect("a message");
        let in_ms: u64 = called.split(':').nth(1).unwrap().parse().unwrap();
        assert!((1..=1_000).contains(&in_ms), "{called}");
        release(joined("after min_hold", next).await.1).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_renewal_keeps_the_contention_mark() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let guard = ours.lock(KEY).renew(ms(50)).acquire().await.unwrap();
        let next = acquire_in_task(&theirs, KEY);
        until_queued(&server, KEY, 1).await;
        assert!(is_marked(&server, KEY));
        sleep(ms(250)).await;
        assert!(is_marked(&server, KEY) && guard.is_held());
        guard.verify().await.unwrap();
        let freed = release(guard).await;
        let (got, guard) = joined("the next", next).await;
        assert!(got - freed < TTL / 4, "{:?}", got - freed);
        assert!(!is_marked(&server, KEY), "no waiter is left");
        release(guard).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_holder_of_several_keys_notifies_the_queue_of_each() {
        let server = RedisServer::start();
        let [ours, first, second] = pools(&server).await;
        let mut took = Latency::below(CALLED, 20);
        while took.wants_more() {
            let guard = ours.lock_all(["a", "b", "c"]).acquire().await.unwrap();
            let waiting = [acquire_in_task(&first, "a"), acquire_in_task(&second, "c")];
            until_queued(&server, "a", 1).await;
            until_queued(&server, "c", 1).await;
            assert!(is_marked(&server, "a") && !is_marked(&server, "b") && is_marked(&server, "c"));
            let freed = release(guard).await;
            for next in waiting {
                let (got, guard) = joined("one of the keys", next).await;
                took.push(got - freed);
                release(guard).await;
            }
        }
        println!("called by a holder of several keys: {took}");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_request_for_several_keys_is_notified_of_the_release_of_one() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let mut took = Latency::below(CALLED, 10);
        while took.wants_more() {
            let guard = ours.lock("b").acquire().await.unwrap();
            let asks = server.cli(&["INFO", "commandstats"]);
            let next = run_in_task(theirs.lock_all(["a", "b"]));
            let caching = |stats: &str| {
                let line = stats.lines().find(|line| line.starts_with("cmdstat_client|caching:"));
                line.map(str::to_owned)
            };
            eventually_async(DEADLINE, "it watches", async || {
                caching(&server.cli(&["INFO", "commandstats"])) != caching(&asks)
            })
            .await;
            let freed = release(guard).await;
            let (got, guard) = joined("both keys", next).await;
            took.push(got - freed);
            release(guard).await;
        }
        println!("a request for several keys woken by a push: {took}");
        until_nothing_is_left(&server).await;
    }

    /// The head of the queue is notified to announce itself; a dead head does not.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_dead_queue_head_hides_no_waiter_from_a_holder_with_many_tasks() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let dead = "0".repeat(32) + "@" + &"1".repeat(16);
        server.cli(&["ZADD", "k:lock_runtime:line", "1", &dead]);
        let over = Arc::new(AtomicBool::new(false));
        let mut crowd = JoinSet::new();
        for _ in 0..4 {
            let (pool, over) = (ours.clone(), over.clone());
            crowd.spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let guard = pool.lock(KEY).fencing(false).acquire().await.unwrap();
                    sleep(ms(1)).await;
                    guard.release().await.unwrap();
                }
            });
        }
        sleep(ms(100)).await;
        let asked = Instant::now();
        let next = theirs.lock(KEY).fencing(false).acquire();
        let guard = timeout(DEADLINE, next).await.expect("it gets its turn").unwrap();
        println!("behind a dead one, beside a busy pool: {:?}", asked.elapsed());
        // Half of the time after which the wait queue would expire.
        assert!(asked.elapsed() < ms(5_000), "{:?}", asked.elapsed());
        over.store(true, Ordering::Relaxed);
        release(guard).await;
        crowd.join_all().await;
        until_nothing_is_left(&server).await;
    }
}

mod refused {
    use super::*;

    /// The missing permission of each user.
    const USERS: [(&str, &str); 7] = [
        ("channels", "~* resetchannels +@all"),
        ("own-channel", "~* resetchannels &other:* +@all"),
        ("tracking", "~* &* +@all -client|tracking"),
        ("client", "~* &* +@all -client"),
        ("zadd", "~* &* +@all -zadd"),
        ("publish", "~* &* +@all -publish"),
        ("both", "~* resetchannels +@all -client|tracking"),
    ];

    fn server() -> RedisServer {
        let mut server = RedisServer::builder();
        for (name, may) in USERS {
            server = server.config_line(&format!("user {name} on >secret {may}"));
        }
        server.start()
    }

    fn url(server: &RedisServer, user: &str) -> String {
        format!("redis://{user}:secret@127.0.0.1:{}", server.port())
    }

    /// The server supports only RESP2.
    fn old_server() -> RedisServer {
        RedisServer::builder().config_line("rename-command HELLO \"\"").start()
    }

    /// The single task of each pool acquires the lock repeatedly, with a pause for the others.
    async fn share(pools: Vec<(String, LockPool)>, pause: Duration) {
        const LEAST: usize = 3;
        let inside = Arc::new(AtomicBool::new(false));
        let end = Instant::now() + ms(2_500);
        // All pools compete until each has had its sections, however slow the machine is.
        let (total, served) = (pools.len(), Arc::new(AtomicUsize::new(0)));
        let mut tasks = JoinSet::new();
        for (name, pool) in pools {
            let (inside, served) = (inside.clone(), served.clone());
            tasks.spawn(async move {
                let (mut count, mut longest) = (0, Duration::ZERO);
                while Instant::now() < end || served.load(Ordering::SeqCst) < total {
                    let asked = Instant::now();
                    let guard = timeout(DEADLINE, pool.lock(KEY).acquire()).await;
                    let guard = guard.unwrap_or_else(|_| panic!("{name} starves")).unwrap();
                    longest = longest.max(asked.elapsed());
                    assert!(!inside.swap(true, Ordering::SeqCst), "two inside");
                    sleep(ms(1)).await;
                    assert!(inside.swap(false, Ordering::SeqCst));
                    count += 1;
                    if count == LEAST {
                        served.fetch_add(1, Ordering::SeqCst);
                    }
                    guard.release().await.unwrap();
                    sleep(pause).await;
                }
                (name, count, longest)
            });
        }
        for (name, count, longest) in tasks.join_all().await {
            println!("without {name}: {count} sections, longest wait {longest:?}");
            assert!(count >= LEAST, "{name}: {count} sections");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn restricted_users_share_a_lock_with_an_unrestricted_one() {
        let server = server();
        let mut pools = Vec::new();
        for (name, _) in USERS {
            pools.push((name.to_owned(), connect(&url(&server, name)).await));
        }
        for n in 0..2 {
            pools.push((format!("nothing, {n}"), connect(&server.url()).await));
        }
        share(pools, ms(60)).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pools_on_a_server_of_the_old_protocol_share_a_lock() {
        let server = old_server();
        let mut pools = Vec::new();
        for n in 0..3 {
            pools.push((format!("RESP3, {n}"), connect(&server.url()).await));
        }
        share(pools, ms(30)).await;
        until_nothing_is_left(&server).await;
    }

    /// Commands that name `key`, and CPU time of waiting processes.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_waiter_polls_continuously() {
        let (server, old) = (server(), old_server());
        let dir = tempfile::tempdir().unwrap();
        let window = ms(1_500);
        let (holder, old_holder) = (connect(&server.url()).await, connect(&old.url()).await);
        let mut guards = Vec::new();
        let mut waiting = Vec::new();
        let urls = USERS.map(|(name, _)| (name, url(&server, name)));
        for (name, url) in urls.iter().cloned().chain([("nothing", server.url())]) {
            guards.push(holder.lock(name).acquire().await.unwrap());
            waiting.push(acquire_in_task(&connect(&url).await, name));
        }
        guards.push(old_holder.lock("RESP3").acquire().await.unwrap());
        waiting.push(acquire_in_task(&connect(&old.url()).await, "RESP3"));
        guards.push(holder.lock(KEY).acquire().await.unwrap());
        let program = env!("CARGO_BIN_EXE_waiter");
        let workers = [server.url(), url(&server, "both")].map(|url| {
            let name = if url.contains("both") { "both" } else { "nothing" };
            let args = [&*url, dir.path().to_str().unwrap(), name, "20000"];
            let worker = Worker::start(program, &args);
            worker.wait_for_line(DEADLINE, |line| line == "ready");
            worker.send_line("lock");
            worker
        });
        sleep(ms(500)).await;

        let began = Instant::now();
        let (monitor, old_monitor) = (Monitor::start(&server), Monitor::start(&old));
        let before = workers.each_ref().map(|worker| cpu_ticks(worker.pid()));
        sleep(window).await;
        let after = workers.each_ref().map(|worker| cpu_ticks(worker.pid()));
        let (lines, old_lines) = (by_clients(monitor.settled()), by_clients(old_monitor.settled()));
        let took = began.elapsed().as_secs_f64();
        let names = USERS.iter().map(|(name, _)| *name).chain(["nothing"]);
        let counts = names.map(|name| (name, &lines)).chain([("RESP3", &old_lines)]);
        for (name, lines) in counts {
            let count = lines.iter().filter(|ran| ran.args.iter().any(|arg| arg == name)).count();
            let rate = count as f64 / took;
            println!("waiting without {name}: {rate:.1} commands a second");
            assert!(rate < 40.0, "{name}: {rate} commands a second");
            assert!(count > 0, "{name}: no waiter polls");
        }
        for n in 0..2 {
            let busy = (after[n] - before[n]) as f64 / 100.0 / took;
            println!("a waiting process uses {:.1} % of a core", busy * 100.0);
            assert!(busy < 0.05, "{busy}");
        }
        for guard in guards {
            release(guard).await;
        }
        for waiting in waiting {
            release(joined("all are served", waiting).await.1).await;
        }
        let mut served = HashSet::new();
        eventually_async(DEADLINE, "both processes are served", async || {
            for (n, worker) in workers.iter().enumerate() {
                if !served.contains(&n) && worker.stdout().iter().any(|line| line.starts_with("in"))
                {
                    worker.send_line("free");
                    worker.wait_for_line(DEADLINE, |line| line == "out");
                    served.insert(n);
                }
            }
            served.len() == 2
        })
        .await;
        until_nothing_is_left(&server).await;
    }

    /// User and system time in hundredths of a second.
    fn cpu_ticks(pid: u32) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}
