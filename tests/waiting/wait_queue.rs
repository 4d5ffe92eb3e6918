//! Processes hand a lock that is waited for to each other, in order and without polling; whoever dies,
//! freezes or gives up in line holds nobody up.
//!
//! Pools stand for processes, each has its own connection and channel. Those that are killed or frozen are
//! processes.

#![allow(clippy::disallowed_methods)]

use std::collections::HashSet;
use std::fmt::Debug;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::{Fence, LockGuard, LockPool, LockRequest, Wait};
use lock_tests::history::{Grant, History, Recorder, now_ns};
use lock_tests::monitor::{Caller, Ran};
use lock_tests::{Monitor, Prompt, RedisServer, Worker, eventually_async};
use tokio::task::{JoinHandle, JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Nothing here waits as long as this, so that no ttl hides a lock that was not handed on.
const TTL: Duration = ms(20_000);
/// What a busy machine may add. Less than the grant of a lease of [`TTL`], which is a second.
pub(crate) const NOISE: Duration = ms(700);
pub(crate) const PATIENCE: Duration = ms(30_000);
/// From a release to the entry of a waiter that is notified. Less than any regular look.
const CALLED: Duration = ms(60);
const KEY: &str = "k";

async fn connect(url: &str) -> LockPool {
    let pool = LockPool::builder(url).ttl(TTL).wait(Wait::Forever);
    // Every server answers here: a request that takes long on a busy machine is not repeated.
    pool.request_timeout(ms(5_000)).connect().await.unwrap()
}

pub(crate) async fn pools<const N: usize>(server: &RedisServer) -> [LockPool; N] {
    let mut pools = Vec::new();
    for _ in 0..N {
        pools.push(connect(&server.url()).await);
    }
    pools.try_into().unwrap()
}

/// How somebody gives up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum How {
    Dropped,
    TimedOut,
}

/// A task of `pool` that wants the lock; when it got it, with the guard.
pub(crate) fn come(pool: &LockPool, key: &str) -> JoinHandle<(Instant, LockGuard)> {
    come_with(pool.lock(key))
}

pub(crate) fn come_with(request: LockRequest) -> JoinHandle<(Instant, LockGuard)> {
    let acquiring = request.acquire();
    tokio::spawn(async move {
        let guard = acquiring.await.unwrap();
        (Instant::now(), guard)
    })
}

pub(crate) async fn until_in_line(server: &RedisServer, key: &str, count: usize) {
    let line = format!("{key}:lock_runtime:line");
    let count = count.to_string();
    eventually_async(PATIENCE, "they stand in line", async || {
        server.cli(&["ZCARD", &line]) == count
    })
    .await;
}

/// Neither locks nor lines, long before a line would be forgotten by itself.
pub(crate) async fn until_nothing_is_left(server: &RedisServer) {
    let mut left = String::new();
    eventually_async(ms(6_000), "nothing is left in the store", async || {
        left = server.cli(&["KEYS", "*"]);
        left.lines().all(|key| key.is_empty() || key == "lock_runtime:fence")
    })
    .await;
}

pub(crate) async fn free(guard: LockGuard) -> Instant {
    let now = Instant::now();
    guard.release().await.unwrap();
    now
}

pub(crate) async fn soon<T>(what: impl Debug, task: JoinHandle<T>) -> T {
    match timeout(PATIENCE, task).await {
        Ok(done) => done.unwrap(),
        Err(_) => panic!("not served within {PATIENCE:?}: {what:?}"),
    }
}

fn by_clients(lines: Vec<Ran>) -> Vec<Ran> {
    lines.into_iter().filter(|ran| ran.by != Caller::Script).collect()
}

pub(crate) fn median(mut spans: Vec<Duration>) -> Duration {
    spans.sort();
    spans[spans.len() / 2]
}

mod handed_on {
    use super::*;

    #[tokio::test]
    async fn a_lock_that_nobody_waits_for_costs_two_plain_commands() {
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
        let names: Vec<_> = by_clients(monitor.settled()).iter().map(Ran::name).collect();
        assert_eq!(names, ["SET", "EVALSHA"].repeat(10));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_pools_take_turns_for_three_commands_a_section() {
        const EACH: usize = 400;
        let server = RedisServer::start();
        let pools: [_; 2] = pools(&server).await;
        let monitor = Monitor::start(&server);
        let began = Instant::now();
        let turns = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = JoinSet::new();
        for (n, pool) in pools.into_iter().enumerate() {
            let turns = turns.clone();
            tasks.spawn(async move {
                for _ in 0..EACH {
                    let guard = pool.lock(KEY).fencing(false).acquire().await.unwrap();
                    turns.lock().unwrap().push(n);
                    guard.release().await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        let sections = 2 * EACH;
        let took = began.elapsed();
        let lines = by_clients(monitor.settled());
        let commands = lines.len();
        let by_text = lines.iter().filter(|ran| ran.name() == "EVAL").count();
        let turns = turns.lock().unwrap();
        let changes = turns.windows(2).filter(|pair| pair[0] != pair[1]).count();
        println!(
            "{by_text} by text, {:.2} commands a section, {changes} changes in {sections} sections, {:?} each",
            commands as f64 / sections as f64,
            took / sections as u32
        );
        assert!(changes > sections * 3 / 4, "{changes} changes in {sections} sections");
        // Each may have to teach the server one script. More are those who pass on what they did not expect.
        assert!(by_text <= 2, "{by_text} scripts by their text");
        assert!(commands < sections * 7 / 2, "{commands} commands for {sections} sections");
    }

    #[tokio::test]
    async fn whoever_waits_is_called() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let mut took = Prompt::below(CALLED, 20);
        while took.wants_more() {
            let guard = ours.lock(KEY).acquire().await.unwrap();
            let next = come(&theirs, KEY);
            until_in_line(&server, KEY, 1).await;
            let freed = free(guard).await;
            let (got, guard) = soon("the waiter", next).await;
            took.push(got - freed);
            free(guard).await;
        }
        println!("from release to entry: {took}");
        until_nothing_is_left(&server).await;
    }

    /// For one key with and without a fence, and for several; all of a key that nobody has waited for before.
    #[tokio::test]
    async fn also_if_it_has_only_just_come() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        for (case, other, fencing) in
            [("fenced", None, true), ("plain", None, false), ("several", Some("other"), true)]
        {
            let mut took = Prompt::below(CALLED, 5);
            for round in 0.. {
                if !took.wants_more() {
                    break;
                }
                let key = format!("{case}:{round}");
                let guard = ours.lock(key.as_str()).acquire().await.unwrap();
                let keys = [key.as_str()].into_iter().chain(other);
                let next = come_with(theirs.lock_all(keys).fencing(fencing));
                sleep(ms(20)).await;
                let freed = free(guard).await;
                let (got, guard) = soon(case, next).await;
                took.push(got - freed);
                free(guard).await;
            }
            println!("{case}, just come: {took}");
        }
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn the_order_of_coming_is_the_order_of_service() {
        let server = RedisServer::start();
        let pools: [_; 6] = pools(&server).await;
        for round in 0..4 {
            let guard = pools[0].lock(KEY).acquire().await.unwrap();
            let mut order: Vec<_> = (1..6).collect();
            order.rotate_left(round);
            let served = Arc::new(Mutex::new(Vec::new()));
            let mut waiting = Vec::new();
            for (count, &n) in order.iter().enumerate() {
                let (next, served) = (come(&pools[n], KEY), served.clone());
                waiting.push(tokio::spawn(async move {
                    let (_, guard) = next.await.unwrap();
                    served.lock().unwrap().push(n);
                    guard.release().await.unwrap();
                }));
                until_in_line(&server, KEY, count + 1).await;
            }
            free(guard).await;
            for waiting in waiting {
                soon(round, waiting).await;
            }
            assert_eq!(*served.lock().unwrap(), order);
        }
        until_nothing_is_left(&server).await;
    }
}

mod dead_and_frozen {
    use super::*;

    fn stander(url: &str, dir: &Path, name: &str, ttl: Duration) -> Worker {
        let ttl = ttl.as_millis().to_string();
        let program = env!("CARGO_BIN_EXE_stander");
        let worker = Worker::start(program, &[url, dir.to_str().unwrap(), name, &ttl]);
        worker.wait_for_line(PATIENCE, |line| line == "ready");
        worker
    }

    /// As a process records what it holds.
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
            let guard = timeout(PATIENCE, self.pool.lock(KEY).acquire()).await.unwrap().unwrap();
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
    async fn killed_waiters_hold_nobody_up() {
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let [holder, last] = pools(&server).await;
        for round in 0..3 {
            let guard = holder.lock(KEY).acquire().await.unwrap();
            let mut dead = Vec::new();
            for n in 0..3 {
                let worker = stander(&server.url(), dir.path(), &format!("p{round}-{n}"), TTL);
                worker.send_line("lock");
                until_in_line(&server, KEY, n + 1).await;
                dead.push(worker);
            }
            let next = come(&last, KEY);
            until_in_line(&server, KEY, 4).await;
            for worker in &dead {
                worker.kill();
            }
            let freed = free(guard).await;
            let (got, guard) = soon("whoever stood behind the dead", next).await;
            println!("behind three killed waiters: {:?}", got - freed);
            assert!(got - freed < NOISE);
            free(guard).await;
        }
        until_nothing_is_left(&server).await;
    }

    /// Two seconds of ttl make a grant of 200 ms. Who thaws finds somebody else inside, and waits.
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
            let worker = stander(&server.url(), dir.path(), &format!("frozen{n}"), ttl);
            worker.send_line("lock");
            until_in_line(&server, KEY, n + 1).await;
            workers.push(worker);
        }
        let next = tokio::spawn(async move {
            let locked = last.lock().await;
            (last, locked)
        });
        until_in_line(&server, KEY, count + 1).await;
        for worker in &workers {
            worker.pause();
        }
        let freed = Instant::now();
        holder.free(guard, held).await;
        let (last, (got, guard, grant_of_last)) =
            soon("whoever stood behind the frozen", next).await;
        println!("behind {count} frozen waiters with a grant of {grant:?}: {:?}", got - freed);
        // The second one's message has not said when; a look has.
        let looks = if count > 1 { ms(300) } else { Duration::ZERO };
        assert!(got - freed < grant * u32::try_from(count).unwrap() + looks + NOISE);
        for worker in &workers {
            worker.resume();
        }
        sleep(ms(300)).await;
        assert!(guard.is_held());
        let inside = |worker: &Worker| worker.stdout().iter().any(|line| line.starts_with("in"));
        assert!(!workers.iter().any(inside), "nobody enters on a stale grant");
        last.free(guard, grant_of_last).await;
        for _ in &workers {
            let mut next = None;
            eventually_async(PATIENCE, "the thawed are served", async || {
                next = workers.iter().find(|worker| {
                    let lines = worker.stdout();
                    inside(worker) && !lines.iter().any(|line| line == "out")
                });
                next.is_some()
            })
            .await;
            let worker = next.unwrap();
            worker.send_line("free");
            worker.wait_for_line(PATIENCE, |line| line == "out");
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
        let guard = holder.lock(KEY).acquire().await.unwrap();
        let worker = stander(&server.url(), dir.path(), "frozen", TTL);
        worker.send_line("lock");
        until_in_line(&server, KEY, 1).await;
        let next = come(&last, KEY);
        until_in_line(&server, KEY, 2).await;
        worker.pause();
        free(guard).await;
        worker.resume();
        worker.wait_for_line(PATIENCE, |line| line.starts_with("in"));
        // Whoever is next was told to look at the end of the grant, which is a ttl by then.
        sleep(ms(1_200)).await;
        assert!(!next.is_finished());
        worker.send_line("free");
        free(soon("the next", next).await.1).await;
        until_nothing_is_left(&server).await;
    }

    /// Freezes hit whoever waits, holds or was just called, for less and for more than a ttl.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn freezes_at_any_moment_make_no_two_believers() {
        let ttl = ms(400);
        let server = RedisServer::start();
        let dir = tempfile::tempdir().unwrap();
        let workers: Vec<_> =
            (0..4).map(|n| stander(&server.url(), dir.path(), &format!("p{n}"), ttl)).collect();
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
        // Every one is frozen and served again and again.
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
        let worker = stander(&server.url(), dir.path(), "killed", ttl);
        worker.send_line("lock");
        worker.wait_for_line(PATIENCE, |line| line.starts_with("in"));
        let mut waiting = [come(&first, KEY), come(&second, KEY)];
        until_in_line(&server, KEY, 2).await;
        let killed = Instant::now();
        worker.kill();
        // Whoever of the two asks first when the time is over has it: both are alive.
        let [one, other] = &mut waiting;
        let next = async {
            tokio::select! { done = one => (done, 1), done = other => (done, 0) }
        };
        let (served, left) = timeout(PATIENCE, next).await.expect("one of the two is served");
        let (got, guard) = served.unwrap();
        println!("after a killed holder with a ttl of {ttl:?}: {:?}", got - killed);
        assert!(got - killed < ttl + NOISE);
        free(guard).await;
        let last = waiting.into_iter().nth(left).unwrap();
        free(soon("the other", last).await.1).await;
        until_nothing_is_left(&server).await;
    }
}

mod given_up {
    use super::*;

    /// One of three in line gives up; the other two are served in their order.
    async fn one_leaves(server: &RedisServer, pools: &[LockPool; 4], at: usize, how: How) {
        let key = &*format!("{how:?}:{at}");
        let case = (how, at);
        let guard = pools[0].lock(key).acquire().await.unwrap();
        let mut stay = Vec::new();
        let (mut leaver, mut timed_out) = (None, None);
        for n in 0..3 {
            if n != at {
                stay.push(come(&pools[n + 1], key));
            } else if how == How::Dropped {
                leaver = Some(come(&pools[n + 1], key));
            } else {
                let acquiring = pools[n + 1].lock(key).wait(ms(900)).acquire();
                timed_out = Some(tokio::spawn(async move { acquiring.await.unwrap_err() }));
            }
            until_in_line(server, key, n + 1).await;
        }
        if let Some(leaver) = leaver {
            leaver.abort();
        }
        if let Some(timed_out) = timed_out {
            let error = soon(case, timed_out).await;
            assert!(error.is_conflict(), "{error}");
        }
        until_in_line(server, key, 2).await;
        let mut freed = free(guard).await;
        for task in stay {
            let (got, guard) = soon(case, task).await;
            assert!(got - freed < NOISE, "{case:?}: {:?}", got - freed);
            freed = free(guard).await;
        }
    }

    #[tokio::test]
    async fn at_every_place_in_line() {
        let server = RedisServer::start();
        let pools: [_; 4] = pools(&server).await;
        let cases = (0..3).flat_map(|at| [(at, How::Dropped), (at, How::TimedOut)]);
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
    async fn when_all_leave_the_line_is_gone_at_once() {
        let server = RedisServer::start();
        let pools: [_; 4] = pools(&server).await;
        let guard = pools[0].lock(KEY).acquire().await.unwrap();
        let waiting: Vec<_> = pools[1..].iter().map(|pool| come(pool, KEY)).collect();
        until_in_line(&server, KEY, 3).await;
        waiting.iter().for_each(JoinHandle::abort);
        until_in_line(&server, KEY, 0).await;
        assert_eq!(server.cli(&["KEYS", "*line*"]), "");
        // The mark is still there and does no harm.
        assert!(server.cli(&["GET", KEY]).ends_with('+'));
        free(guard).await;
        until_nothing_is_left(&server).await;
    }

    /// One task is behind the other in the same pool: the place stays.
    #[tokio::test]
    async fn a_task_leaves_its_place_to_the_next_of_its_pool() {
        let server = RedisServer::start();
        let [holder, ours, theirs] = pools(&server).await;
        let guard = holder.lock(KEY).acquire().await.unwrap();
        let leaver = come(&ours, KEY);
        until_in_line(&server, KEY, 1).await;
        let heir = come(&ours, KEY);
        let last = come(&theirs, KEY);
        until_in_line(&server, KEY, 2).await;
        leaver.abort();
        let line = server.cli(&["ZRANGE", "k:lock_runtime:line", "0", "-1"]);
        sleep(ms(50)).await;
        assert_eq!(server.cli(&["ZRANGE", "k:lock_runtime:line", "0", "-1"]), line);
        free(guard).await;
        let (_, guard) = soon("the heir", heir).await;
        assert!(!last.is_finished());
        free(guard).await;
        free(soon("the last", last).await.1).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn in_the_instant_of_the_grant() {
        const ROUNDS: usize = 150;
        let server = RedisServer::start();
        let [holder, ours, theirs] = pools(&server).await;
        let mut slowest = Duration::ZERO;
        for round in 0..ROUNDS {
            let guard = holder.lock(KEY).acquire().await.unwrap();
            let leaver = come(&ours, KEY);
            until_in_line(&server, KEY, 1).await;
            let last = come(&theirs, KEY);
            until_in_line(&server, KEY, 2).await;
            let leave = Instant::now() + Duration::from_micros(fastrand::u64(..600));
            let leaving = tokio::spawn(async move {
                while Instant::now() < leave {
                    tokio::task::yield_now().await;
                }
                leaver.abort();
                drop(leaver.await);
            });
            let freed = free(guard).await;
            leaving.await.unwrap();
            let (got, guard) = soon(round, last).await;
            slowest = slowest.max(got - freed);
            free(guard).await;
        }
        println!("granted and given up at once: passed on within {slowest:?}");
        assert!(slowest < NOISE, "{slowest:?}");
        until_nothing_is_left(&server).await;
    }

    /// A claim that came to the server after its pool had given it up.
    #[tokio::test]
    async fn a_place_that_its_pool_has_forgotten_is_passed_on() {
        let server = RedisServer::start();
        let [holder, ours, theirs] = pools(&server).await;
        let other = ours.lock("other").acquire().await.unwrap();
        let ghost = "0".repeat(32) + &server.cli(&["GET", "other"])[32..];
        free(other).await;
        for followers in [0, 1] {
            let guard = holder.lock(KEY).acquire().await.unwrap();
            let next = (followers > 0).then(|| come(&theirs, KEY));
            until_in_line(&server, KEY, followers).await;
            server.cli(&["ZADD", "k:lock_runtime:line", "1", &ghost]);
            if next.is_none() {
                let marked = server.cli(&["GET", KEY]) + "+";
                server.cli(&["SET", KEY, &marked, "KEEPTTL"]);
            }
            let freed = free(guard).await;
            if let Some(next) = next {
                let (got, guard) = soon("whoever stood behind it", next).await;
                println!("behind a forgotten place: {:?}", got - freed);
                assert!(got - freed < NOISE, "{:?}", got - freed);
                free(guard).await;
            }
            eventually_async(NOISE, "the lock is free", async || {
                server.cli(&["EXISTS", KEY]) == "0"
            })
            .await;
        }
        until_nothing_is_left(&server).await;
    }

    /// Tasks of several pools, a third of whose acquires are given up after a moment.
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
                        let patience = Duration::from_micros(fastrand::u64(..8_000));
                        let Ok(guard) = timeout(patience, acquire).await else {
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
        timeout(PATIENCE, tasks.join_all()).await.expect("all are served");
        let served: Vec<_> = served.iter().map(load).collect();
        let mut pauses = std::mem::take(&mut pauses.lock().unwrap().1);
        pauses.sort();
        // No place that was left delays the next grant until a regular look.
        let pause = pauses[pauses.len() * 9 / 10];
        println!(
            "{} sections, {given_up:?} given up, pauses {pause:?} to {:?}, per task {:?}..{:?}",
            served.iter().sum::<usize>(),
            pauses.last(),
            served.iter().min().unwrap(),
            served.iter().max().unwrap()
        );
        assert!(pause < ms(150), "{pause:?}");
        until_nothing_is_left(&server).await;
    }
}

mod marks {
    use super::*;

    fn is_marked(server: &RedisServer, key: &str) -> bool {
        server.cli(&["GET", key]).ends_with('+')
    }

    #[tokio::test]
    async fn min_hold_keeps_those_in_line_waiting_and_no_longer() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let hold = ms(500);
        let guard = ours.lock(KEY).min_hold(hold).acquire().await.unwrap();
        let granted = Instant::now();
        let next = come(&theirs, KEY);
        until_in_line(&server, KEY, 1).await;
        free(guard).await;
        let (got, guard) = soon("after min_hold", next).await;
        println!("min_hold of {hold:?}: {:?}", got - granted);
        assert!(got - granted > hold - ms(20), "{:?}", got - granted);
        assert!(got - granted < hold + NOISE);
        free(guard).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_renewal_keeps_the_mark() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let guard = ours.lock(KEY).renew(ms(50)).acquire().await.unwrap();
        let next = come(&theirs, KEY);
        until_in_line(&server, KEY, 1).await;
        assert!(is_marked(&server, KEY));
        sleep(ms(250)).await;
        assert!(is_marked(&server, KEY) && guard.is_held());
        guard.verify().await.unwrap();
        let freed = free(guard).await;
        let (got, guard) = soon("the next", next).await;
        assert!(got - freed < NOISE);
        assert!(!is_marked(&server, KEY), "nobody waits any more");
        free(guard).await;
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_holder_of_several_keys_calls_the_line_of_each() {
        let server = RedisServer::start();
        let [ours, first, second] = pools(&server).await;
        let mut took = Prompt::below(CALLED, 20);
        while took.wants_more() {
            let guard = ours.lock_all(["a", "b", "c"]).acquire().await.unwrap();
            let waiting = [come(&first, "a"), come(&second, "c")];
            until_in_line(&server, "a", 1).await;
            until_in_line(&server, "c", 1).await;
            assert!(is_marked(&server, "a") && !is_marked(&server, "b") && is_marked(&server, "c"));
            let freed = free(guard).await;
            for next in waiting {
                let (got, guard) = soon("one of the keys", next).await;
                took.push(got - freed);
                free(guard).await;
            }
        }
        println!("called by a holder of several keys: {took}");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_request_for_several_keys_hears_of_the_release_of_one() {
        let server = RedisServer::start();
        let [ours, theirs] = pools(&server).await;
        let mut took = Prompt::below(CALLED, 10);
        while took.wants_more() {
            let guard = ours.lock("b").acquire().await.unwrap();
            let asks = server.cli(&["INFO", "commandstats"]);
            let next = come_with(theirs.lock_all(["a", "b"]));
            let caching = |stats: &str| {
                let line = stats.lines().find(|line| line.starts_with("cmdstat_client|caching:"));
                line.map(str::to_owned)
            };
            eventually_async(PATIENCE, "it watches", async || {
                caching(&server.cli(&["INFO", "commandstats"])) != caching(&asks)
            })
            .await;
            let freed = free(guard).await;
            let (got, guard) = soon("both keys", next).await;
            took.push(got - freed);
            free(guard).await;
        }
        println!("a request for several keys woken by a push: {took}");
        until_nothing_is_left(&server).await;
    }

    /// Of those in line the first is told to speak up; a dead one says nothing.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_dead_head_of_the_line_hides_nobody_from_a_holder_with_many_tasks() {
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
        let guard = timeout(PATIENCE, next).await.expect("it gets its turn").unwrap();
        println!("behind a dead one, beside a busy pool: {:?}", asked.elapsed());
        assert!(asked.elapsed() < ms(1_500), "{:?}", asked.elapsed());
        over.store(true, Ordering::Relaxed);
        free(guard).await;
        crowd.join_all().await;
        until_nothing_is_left(&server).await;
    }
}

mod refused {
    use super::*;

    /// What each may not.
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

    /// Only RESP2 is spoken.
    fn old_server() -> RedisServer {
        RedisServer::builder().config_line("rename-command HELLO \"\"").start()
    }

    /// Each pool's single task takes the lock again and again, with a pause in which others may.
    async fn share(pools: Vec<(String, LockPool)>, pause: Duration) {
        let inside = Arc::new(AtomicBool::new(false));
        let end = Instant::now() + ms(2_500);
        let mut tasks = JoinSet::new();
        for (name, pool) in pools {
            let inside = inside.clone();
            tasks.spawn(async move {
                let (mut count, mut longest) = (0, Duration::ZERO);
                while Instant::now() < end {
                    let asked = Instant::now();
                    let guard = timeout(PATIENCE, pool.lock(KEY).acquire()).await;
                    let guard = guard.unwrap_or_else(|_| panic!("{name} starves")).unwrap();
                    longest = longest.max(asked.elapsed());
                    assert!(!inside.swap(true, Ordering::SeqCst), "two inside");
                    sleep(ms(1)).await;
                    assert!(inside.swap(false, Ordering::SeqCst));
                    count += 1;
                    guard.release().await.unwrap();
                    sleep(pause).await;
                }
                (name, count, longest)
            });
        }
        for (name, count, longest) in tasks.join_all().await {
            println!("without {name}: {count} sections, longest wait {longest:?}");
            assert!(count > 2, "{name}: {count} sections");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn all_kinds_share_a_lock_with_those_who_may_everything() {
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
    async fn nobody_waits_by_asking_all_the_time() {
        let (server, old) = (server(), old_server());
        let dir = tempfile::tempdir().unwrap();
        let window = ms(1_500);
        let (holder, old_holder) = (connect(&server.url()).await, connect(&old.url()).await);
        let mut guards = Vec::new();
        let mut waiting = Vec::new();
        let urls = USERS.map(|(name, _)| (name, url(&server, name)));
        for (name, url) in urls.iter().cloned().chain([("nothing", server.url())]) {
            guards.push(holder.lock(name).acquire().await.unwrap());
            waiting.push(come(&connect(&url).await, name));
        }
        guards.push(old_holder.lock("RESP3").acquire().await.unwrap());
        waiting.push(come(&connect(&old.url()).await, "RESP3"));
        guards.push(holder.lock(KEY).acquire().await.unwrap());
        let program = env!("CARGO_BIN_EXE_stander");
        let workers = [server.url(), url(&server, "both")].map(|url| {
            let name = if url.contains("both") { "both" } else { "nothing" };
            let args = [&*url, dir.path().to_str().unwrap(), name, "20000"];
            let worker = Worker::start(program, &args);
            worker.wait_for_line(PATIENCE, |line| line == "ready");
            worker.send_line("lock");
            worker
        });
        sleep(ms(500)).await;

        let (monitor, old_monitor) = (Monitor::start(&server), Monitor::start(&old));
        let before = workers.each_ref().map(|worker| cpu_ticks(worker.pid()));
        sleep(window).await;
        let after = workers.each_ref().map(|worker| cpu_ticks(worker.pid()));
        let (lines, old_lines) = (by_clients(monitor.settled()), by_clients(old_monitor.settled()));
        let names = USERS.iter().map(|(name, _)| *name).chain(["nothing"]);
        let counts = names.map(|name| (name, &lines)).chain([("RESP3", &old_lines)]);
        for (name, lines) in counts {
            let count = lines.iter().filter(|ran| ran.args.iter().any(|arg| arg == name)).count();
            let rate = count as f64 / window.as_secs_f64();
            println!("waiting without {name}: {rate:.1} commands a second");
            assert!(rate < 40.0, "{name}: {rate} commands a second");
            assert!(count > 0, "{name}: nobody looks");
        }
        for n in 0..2 {
            let busy = (after[n] - before[n]) as f64 / 100.0 / window.as_secs_f64();
            println!("a waiting process uses {:.1} % of a core", busy * 100.0);
            assert!(busy < 0.05, "{busy}");
        }
        for guard in guards {
            free(guard).await;
        }
        for waiting in waiting {
            free(soon("all are served", waiting).await.1).await;
        }
        let mut served = HashSet::new();
        while served.len() < 2 {
            for (n, worker) in workers.iter().enumerate() {
                if !served.contains(&n) && worker.stdout().iter().any(|line| line.starts_with("in"))
                {
                    worker.send_line("free");
                    worker.wait_for_line(PATIENCE, |line| line == "out");
                    served.insert(n);
                }
            }
            sleep(ms(5)).await;
        }
        until_nothing_is_left(&server).await;
    }

    /// User and system time in hundredths of a second.
    fn cpu_ticks(pid: u32) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}
