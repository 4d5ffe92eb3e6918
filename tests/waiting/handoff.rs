//! A lock passes from task to task of a process without a request to the store. Whatever fails on the way, the
//! next waiter gets it at once.
//!
//! Every ttl here is far longer than any wait that passes, so a waiter that only a ttl would free fails its test.

#![allow(clippy::disallowed_methods)]

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{
    ErrorKind, LockError, LockGuard, LockPool, LockRequest, Wait, distributed_lock,
};
use lock_tests::monitor::Caller;
use lock_tests::poll::drop_at_every_poll;
use lock_tests::prelude::*;
use lock_tests::{Monitor, RedisServer, eventually_async};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

const KEY: &str = "k";
const TTL: Duration = ms(60_000);
/// What a busy machine may add to an immediate effect. Far less than a ttl.
const NOISE: Duration = ms(10_000);
/// The same on virtual time: the rounding of timers.
const INSTANT: Duration = ms(2);

/// A task that acquires the lock. On the current-thread runtimes of the tests it is queued when this returns.
async fn queued(request: LockRequest) -> JoinHandle<Result<LockGuard, LockError>> {
    let waiting = tokio::spawn(request.acquire());
    tokio::task::yield_now().await;
    waiting
}

#[track_caller]
fn at_once(began: tokio::time::Instant, what: &str) {
    let took = began.elapsed();
    assert!(took <= INSTANT, "{what}: after {took:?}");
}

#[distributed_lock(key = "k", pool = pool, ttl = "60s", wait = "forever")]
async fn annotated(
    pool: LockPool,
    order: Arc<Mutex<Vec<usize>>>,
    n: usize,
) -> Result<(), LockError> {
    order.lock().unwrap().push(n);
    tokio::task::yield_now().await;
    Ok(())
}

#[distributed_lock(key = "k", pool = pool, ttl = "60s", wait = "forever", guard = lock)]
async fn annotated_with_guard(
    pool: LockPool,
    fences: Arc<Mutex<Vec<u64>>>,
) -> Result<(), LockError> {
    fences.lock().unwrap().push(lock.fence().unwrap().get());
    tokio::task::yield_now().await;
    Ok(())
}

mod order {
    use super::*;

    #[tokio::test]
    async fn first_come_first_served_in_memory() {
        first_come_first_served(&patient("memory://", TTL).await).await;
    }

    #[tokio::test]
    async fn first_come_first_served_on_redis() {
        let server = RedisServer::start();
        first_come_first_served(&patient(server.url(), TTL).await).await;
        until_nothing_is_left(&server).await;
    }

    async fn first_come_first_served(pool: &LockPool) {
        const ALL: usize = 40;
        let gone = [0, 7, 8, 9, 23, 39];
        let held = pool.lock(KEY).acquire().await.unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for n in 0..ALL {
            let (pool, order) = (pool.clone(), order.clone());
            tasks.push(if n % 3 == 0 {
                tokio::spawn(annotated(pool, order, n))
            } else {
                let request = pool.lock(KEY).fencing(n % 3 == 1);
                tokio::spawn(request.run(async move {
                    order.lock().unwrap().push(n);
                    tokio::task::yield_now().await;
                }))
            });
            // The only other task of this runtime that runs enters the queue.
            tokio::task::yield_now().await;
        }
        for at in gone {
            tasks[at].abort();
        }
        held.release().await.unwrap();
        for (n, task) in tasks.into_iter().enumerate() {
            let done = within(NOISE, "the queue moves on", task).await;
            assert_eq!(done.is_err(), gone.contains(&n), "{n}");
        }
        let expected: Vec<_> = (0..ALL).filter(|n| !gone.contains(n)).collect();
        assert_eq!(*order.lock().unwrap(), expected);
    }

    /// Waiters leave one after the other while the queue moves.
    #[tokio::test(start_paused = true)]
    async fn leaving_waiters_delay_no_other_waiter() {
        let (pool, faults) =
            on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let held = pool.lock(KEY).fencing(false).acquire().await.unwrap();
        let mut queue = Vec::new();
        for _ in 0..60 {
            queue.push(queued(pool.lock(KEY).fencing(false)).await);
        }
        let began = tokio::time::Instant::now();
        drop(held);
        let mut queue = queue.into_iter().enumerate();
        while let Some((n, next)) = queue.next() {
            let guard = next.await.unwrap().unwrap();
            // The next waiter leaves before, or just after, it was granted the lock.
            let leaves = queue.next();
            if n % 4 == 0 {
                leaves.inspect(|(_, task)| task.abort());
                drop(guard);
            } else {
                drop(guard);
                leaves.inspect(|(_, task)| task.abort());
            }
        }
        at_once(began, "all are served");
        assert_eq!(faults.count(Operation::Acquire), 1);
    }
}

mod without_requests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_thousand_times_by_the_count_of_requests() {
        let (pool, faults) =
            on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let held = pool.lock(KEY).fencing(false).acquire().await.unwrap();
        let mut queue = Vec::new();
        for _ in 0..1_000 {
            queue.push(queued(pool.lock(KEY).fencing(false)).await);
        }
        let began = tokio::time::Instant::now();
        drop(held);
        for next in queue {
            assert_eq!(faults.count(Operation::Release), 0);
            drop(next.await.unwrap().unwrap());
        }
        at_once(began, "all are served");
        // The driver reaches the release of the last holder.
        eventually_async(INSTANT * 5, "it is free", async || faults.count(Operation::Release) == 1)
            .await;
        assert_eq!(faults.count(Operation::Acquire), 1);
    }

    #[tokio::test]
    async fn a_thousand_times_by_what_redis_ran() {
        let server = RedisServer::start();
        let pool = patient(server.url(), TTL).await;
        let held = pool.lock(KEY).fencing(false).acquire().await.unwrap();
        let mut queue = JoinSet::new();
        let inside = Arc::new(AtomicBool::new(false));
        for _ in 0..1_000 {
            let inside = inside.clone();
            queue.spawn(pool.lock(KEY).fencing(false).run(async move {
                assert!(!inside.swap(true, Ordering::SeqCst), "two inside");
                tokio::task::yield_now().await;
                inside.store(false, Ordering::SeqCst);
            }));
        }
        tokio::task::yield_now().await;
        // The server learns the script.
        pool.lock("other").acquire().await.unwrap().release().await.unwrap();
        let monitor = Monitor::start(&server);
        held.release().await.unwrap();
        for run in within(DEADLINE, "all are served", queue.join_all()).await {
            run.unwrap();
        }
        let ran = monitor.settled();
        let by_clients: Vec<_> =
            ran.iter().filter(|ran| ran.by != Caller::Script).map(|ran| ran.name()).collect();
        assert_eq!(by_clients.len(), 1, "the last release, and nothing else: {by_clients:?}");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn each_holder_has_a_fence_of_its_own_in_memory() {
        fences_grow(&patient("memory://", TTL).await).await;
    }

    /// The commands that clients have sent for the key.
    fn commands_for_key(monitor: &Monitor<'_>) -> usize {
        let mut ran = monitor.settled();
        ran.retain(|ran| ran.by != Caller::Script && ran.args.iter().any(|arg| arg == KEY));
        ran.len()
    }

    #[tokio::test]
    async fn each_holder_has_a_fence_of_its_own_on_redis() {
        let server = RedisServer::start();
        let monitor = Monitor::start(&server);
        fences_grow(&patient(server.url(), TTL).await).await;
        // A block of fences each thousand holders; the releases in between.
        let asked = commands_for_key(&monitor);
        assert!(asked <= 16, "{asked} commands for 2,500 holders");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn two_tasks_that_take_turns_reserve_more_fences_with_each_grant() {
        const EACH: usize = 1_000;
        let server = RedisServer::start();
        let pool = patient(server.url(), TTL).await;
        let monitor = Monitor::start(&server);
        let fences = Arc::new(Mutex::new(Vec::new()));
        let tasks = [(); 2].map(|()| {
            let (pool, fences) = (pool.clone(), fences.clone());
            tokio::spawn(async move {
                for _ in 0..EACH {
                    let guard = pool.lock(KEY).acquire().await.unwrap();
                    fences.lock().unwrap().push(guard.fence().unwrap());
                    // The other task queues.
                    tokio::task::yield_now().await;
                    guard.release().await.unwrap();
                }
            })
        });
        for task in tasks {
            task.await.unwrap();
        }
        let fences = std::mem::take(&mut *fences.lock().unwrap());
        assert!(fences.len() == 2 * EACH && fences.is_sorted_by(|one, next| one < next));
        // One grant for each holder without the rule.
        let asked = commands_for_key(&monitor);
        assert!(asked <= EACH / 5, "{asked} commands for {} holders", 2 * EACH);
    }

    /// More holders than fences are reserved at once, some of them without a fence.
    async fn fences_grow(pool: &LockPool) {
        let held = pool.lock(KEY).acquire().await.unwrap();
        let first = held.fence().unwrap().get();
        let fences = Arc::new(Mutex::new(vec![first]));
        let mut queue = Vec::new();
        for n in 0..2_500 {
            let fences = fences.clone();
            queue.push(match n % 3 {
                0 => tokio::spawn(annotated_with_guard(pool.clone(), fences)),
                1 => {
                    let acquire = pool.lock(KEY).acquire();
                    tokio::spawn(async move {
                        let guard = acquire.await?;
                        fences.lock().unwrap().push(guard.fence().unwrap().get());
                        guard.release().await
                    })
                }
                _ => tokio::spawn(pool.lock(KEY).fencing(false).run(async {})),
            });
        }
        tokio::task::yield_now().await;
        held.release().await.unwrap();
        for next in queue {
            joined("the next", next).await.unwrap();
        }
        let fences = fences.lock().unwrap().clone();
        assert_eq!(fences.len(), 1 + 2_500 - 2_500 / 3);
        assert!(fences.is_sorted_by(|a, b| a < b), "each greater than the one before");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guard_is_not_held_after_a_hand_off() {
        let (pool, _) = on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        no_more(&pool).await;
    }

    #[tokio::test]
    async fn a_guard_is_not_held_after_a_hand_off_on_redis() {
        let server = RedisServer::start();
        no_more(&patient(server.url(), TTL).await).await;
    }

    /// The request is sent while the guard holds the lock; the answer comes when another task holds it.
    #[tokio::test(start_paused = true)]
    async fn verify_fails_if_the_lock_is_handed_off_during_its_request() {
        let (pool, _) = on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let body = async {
            let view = pool.lock(KEY).reentrant(true).acquire().await.unwrap();
            let next = queued(pool.lock(KEY).fencing(false)).await;
            let mut verifying = Box::pin(async move { view.verify().await });
            assert!(poll_once(verifying.as_mut()).await.is_none());
            (verifying, next)
        };
        let (verifying, next) = pool.lock(KEY).run(body).await.unwrap();
        assert!(verifying.await.unwrap_err().is_lost());
        next.await.unwrap().unwrap().verify().await.unwrap();
    }

    async fn no_more(pool: &LockPool) {
        // Inside a body a nested acquire borrows the outer guard, and may outlive the body.
        let body = async {
            let view = pool.lock(KEY).fencing(false).reentrant(true).acquire().await.unwrap();
            let next = queued(pool.lock(KEY).fencing(false)).await;
            view.verify().await.unwrap();
            (view, next)
        };
        let (view, next) = pool.lock(KEY).fencing(false).run(body).await.unwrap();
        let successor = next.await.unwrap().unwrap();
        assert!(successor.is_held() && !view.is_held());
        assert_eq!(view.valid_for(), Duration::ZERO);
        successor.verify().await.unwrap();
        let error = view.verify().await.expect_err("the lease in the store is the successor's");
        assert_eq!(error.kind(), ErrorKind::Lost);
        let lost = poll_once(pin!(view.lost())).await.expect("the hold has ended");
        assert_eq!(lost.kind(), ErrorKind::Released);
        // Its drop releases nothing of the successor.
        drop(view);
        successor.verify().await.unwrap();
        successor.release().await.unwrap();
    }
}

mod handoff_limit {
    use super::*;

    /// Two processes, each with many tasks.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn processes_alternate_after_about_the_limit() {
        const TASKS: usize = 24;
        let slice = ms(5);
        let server = RedisServer::start();
        let pools = [patient(server.url(), TTL).await, patient(server.url(), TTL).await];
        let began = Instant::now();
        let turns = Arc::new(Mutex::new(Vec::<(usize, Instant, usize)>::new()));
        let mut tasks = JoinSet::new();
        for n in 0..2 * TASKS {
            let (pool, turns) = (pools[n % 2].clone(), turns.clone());
            // A slow machine needs longer for enough turns.
            let goes_on = move |turns: usize| {
                let elapsed = began.elapsed();
                elapsed < ms(2_500) || (turns <= 40 && elapsed < ms(20_000))
            };
            tasks.spawn(async move {
                while goes_on(turns.lock().unwrap().len()) {
                    let guard = pool.lock(KEY).acquire().await.unwrap();
                    {
                        let mut turns = turns.lock().unwrap();
                        match turns.last_mut() {
                            Some((pool, _, sections)) if *pool == n % 2 => *sections += 1,
                            _ => turns.push((n % 2, Instant::now(), 1)),
                        }
                    }
                    tokio::task::yield_now().await;
                    drop(guard);
                }
            });
        }
        timeout(ms(30_000), tasks.join_all()).await.expect("all are served");
        let turns = turns.lock().unwrap().clone();
        let mut spans: Vec<_> = turns.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
        spans.sort();
        let median = spans[spans.len() / 2];
        let sections: Vec<usize> = (0..2)
            .map(|pool| turns.iter().filter(|turn| turn.0 == pool).map(|turn| turn.2).sum())
            .collect();
        println!("{} turns, {sections:?} sections, median of a turn {median:?}", turns.len());
        assert!(turns.len() > 40, "the lock went over {} times", turns.len());
        // A third of them distinguishes the limit from none: on a busy machine the others are late.
        assert!(spans[spans.len() / 3] < slice * 6, "{median:?}");
        let least = sections[0].min(sections[1]) as f64 / (sections[0] + sections[1]) as f64;
        assert!(least > 0.25, "shares {sections:?}");
        let last = *spans.last().unwrap();
        assert!(last < NOISE, "a turn of {last:?}");
        until_nothing_is_left(&server).await;
    }

    /// One task of another process against many of this one that never stop.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_single_waiter_elsewhere_is_served() {
        let server = RedisServer::start();
        let (ours, theirs) = (patient(server.url(), TTL).await, patient(server.url(), TTL).await);
        let done = Arc::new(AtomicBool::new(false));
        let mut crowd = JoinSet::new();
        for _ in 0..32 {
            let (pool, done) = (ours.clone(), done.clone());
            crowd.spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    pool.lock(KEY).fencing(false).run(tokio::task::yield_now()).await.unwrap();
                }
            });
        }
        for _ in 0..50 {
            within(NOISE, "the other process", theirs.lock(KEY).run(async {})).await.unwrap();
        }
        done.store(true, Ordering::Relaxed);
        timeout(ms(30_000), crowd.join_all()).await.expect("the crowd is served");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test(start_paused = true)]
    async fn of_zero_disables_hand_offs() {
        let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
        let pool = LockPool::with_backend(backend).local_handoff_limit(Duration::ZERO);
        let pool = pool.ttl(TTL).wait(Wait::Forever).on_current_runtime();
        let pool = pool.connect().await.unwrap();
        let held = pool.lock(KEY).acquire().await.unwrap();
        let mut queue = Vec::new();
        for _ in 0..50 {
            queue.push(queued(pool.lock(KEY)).await);
        }
        let began = tokio::time::Instant::now();
        drop(held);
        for (served, next) in queue.into_iter().enumerate() {
            let guard = next.await.unwrap().unwrap();
            assert_eq!(faults.count(Operation::Release), served + 1);
            drop(guard);
        }
        at_once(began, "all are served");
    }
}

/// A lease that does not fit the next waiter is released, and the next waiter still gets the lock at once.
mod released_instead {
    use super::*;

    type Change = fn(LockRequest) -> LockRequest;

    #[tokio::test(start_paused = true)]
    async fn where_the_two_differ() {
        let same: Change = |request| request;
        let changes: [(&str, Change, Change); 8] = [
            ("a longer ttl", same, |request| request.ttl(TTL * 2)),
            ("a shorter ttl", same, |request| request.ttl(TTL / 2)),
            ("another interval", same, |request| request.renew(ms(3_000))),
            (
                "a shorter ttl at the same interval",
                |request| request.renew(ms(3_000)),
                |request| request.renew(ms(3_000)).ttl(TTL / 2),
            ),
            ("neither is renewed", |request| request.renew(false), |request| request.renew(false)),
            ("no renewal", |request| request.renew(false), same),
            ("the next without renewal", same, |request| request.renew(false)),
            ("max_hold", |request| request.max_hold(ms(30_000)), same),
        ];
        for (what, first, second) in changes {
            let (pool, faults) =
                on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
            // Without fences, which would be another reason.
            let request = || pool.lock(KEY).fencing(false);
            let held = first(request()).acquire().await.unwrap();
            let next = queued(second(request())).await;
            let third = queued(second(request())).await;
            let began = tokio::time::Instant::now();
            drop(held);
            let guard = next.await.unwrap().unwrap();
            assert_eq!(faults.count(Operation::Release), 1, "{what}");
            guard.verify().await.unwrap();
            drop(guard);
            third.await.unwrap().unwrap().release().await.unwrap();
            at_once(began, what);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_successor_may_have_a_max_hold_of_its_own() {
        let (pool, faults) =
            on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let held = pool.lock(KEY).acquire().await.unwrap();
        let next = queued(pool.lock(KEY).fencing(false).max_hold(ms(400))).await;
        tokio::time::sleep(ms(900)).await;
        drop(held);
        let guard = next.await.unwrap().unwrap();
        assert_eq!(faults.count(Operation::Release), 0, "handed on");
        let began = tokio::time::Instant::now();
        assert!(guard.valid_for() <= ms(400));
        assert!(guard.lost().await.is_lost());
        let held_for = began.elapsed();
        assert!(held_for > ms(300) && held_for <= ms(400), "{held_for:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_end_of_min_hold() {
        let (pool, _) = on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let began = tokio::time::Instant::now();
        let held = pool.lock(KEY).fencing(false).min_hold(ms(700)).acquire().await.unwrap();
        let next = queued(pool.lock(KEY).fencing(false)).await;
        let behind = queued(pool.lock(KEY).fencing(false)).await;
        drop(held);
        let guard = next.await.unwrap().unwrap();
        let waited = began.elapsed();
        assert!(waited >= ms(700), "after {waited:?}");
        drop(guard);
        behind.await.unwrap().unwrap().release().await.unwrap();
        let waited = began.elapsed();
        assert!(waited <= ms(710), "after {waited:?}");
    }

    /// Half of the ttl and more has gone without a renewal.
    #[tokio::test(start_paused = true)]
    async fn with_too_little_of_it_left() {
        let (pool, faults) =
            on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let held = pool.lock(KEY).acquire().await.unwrap();
        let next = queued(pool.lock(KEY).fencing(false)).await;
        for _ in 0..100 {
            faults.plan(Operation::Renew, Fault::Fail(FailureKind::NotApplied));
        }
        tokio::time::sleep(TTL * 6 / 10).await;
        assert!(held.is_held() && held.valid_for() < TTL / 2);
        let began = tokio::time::Instant::now();
        drop(held);
        let guard = next.await.unwrap().unwrap();
        at_once(began, "the next is served");
        assert_eq!(faults.count(Operation::Release), 1);
        assert!(guard.valid_for() > TTL * 9 / 10, "{:?}", guard.valid_for());
    }

    /// A renewal is in flight at the release.
    #[tokio::test(start_paused = true)]
    async fn while_it_is_renewed() {
        let (pool, faults) =
            on_virtual_time("memory://", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let held = pool.lock(KEY).renew(ms(1_000)).acquire().await.unwrap();
        let next = queued(pool.lock(KEY).renew(ms(1_000)).fencing(false)).await;
        faults.plan(Operation::Renew, Fault::DelayReply(ms(300)));
        eventually_async(ms(5_000), "it is being renewed", async || {
            faults.count(Operation::Renew) == 1
        })
        .await;
        let began = tokio::time::Instant::now();
        drop(held);
        let guard = next.await.unwrap().unwrap();
        assert!(began.elapsed() <= ms(300) + INSTANT, "{:?}", began.elapsed());
        assert!(faults.count(Operation::Release) > 0, "the answer is about the first lease");
        guard.verify().await.unwrap();
    }
}

/// A waiter is dropped at every poll point; the waiters before and behind it are served at once.
mod dropped {
    use super::*;

    /// When the victim is dropped.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Moment {
        /// While the holder holds.
        Waiting,
        /// Directly after the release.
        LetGo,
        /// After so many other tasks could run.
        Yields(usize),
    }

    /// How the holder ends.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum End {
        Drop,
        Release,
        /// Its body panics.
        Panic,
        /// The lease expires, since nothing renews it.
        Expired,
    }

    const MOMENTS: [Moment; 7] = [
        Moment::Waiting,
        Moment::LetGo,
        Moment::Yields(1),
        Moment::Yields(2),
        Moment::Yields(3),
        Moment::Yields(5),
        Moment::Yields(8),
    ];

    #[derive(Clone, Copy, Debug)]
    struct Case {
        /// Polls of the victim before `moment`.
        polls: usize,
        at: usize,
        /// How many are dropped, beginning with that one.
        count: usize,
        moment: Moment,
        end: End,
        /// Whether another process holds the lock.
        elsewhere: bool,
        /// Whether the waiters want different settings, so that no hand-off is possible.
        unlike: bool,
    }

    #[tokio::test(start_paused = true)]
    async fn in_every_way() {
        let mut cases = 0;
        for end in [End::Drop, End::Release, End::Panic, End::Expired] {
            for moment in MOMENTS {
                for (at, count) in [(0, 1), (1, 1), (3, 1), (0, 2), (1, 2), (0, 4)] {
                    for bits in 0..8 {
                        let (polls, elsewhere, unlike) = (1 + bits % 2, bits & 2 > 0, bits & 4 > 0);
                        let case = Case { polls, at, count, moment, end, elsewhere, unlike };
                        run(cases, case).await;
                        cases += 1;
                    }
                }
            }
        }
        println!("{cases} cases");
    }

    async fn run(number: usize, case: Case) {
        // Held for a second at most where the lease is to expire.
        let ttl = if case.end == End::Expired { ms(1_000) } else { TTL };
        let store = format!("memory://dropped-{number}");
        let (ours, faults) = on_virtual_time(&store, |it| it.ttl(TTL).wait(Wait::Forever)).await;
        let theirs = LockPool::builder(&*store).wait(Wait::Forever).on_current_runtime();
        let theirs = theirs.connect().await.unwrap();
        let holder = if case.elsewhere { &theirs } else { &ours };
        let request = holder.lock(KEY).ttl(ttl).renew(case.end != End::Expired);
        let held = request.acquire().await.unwrap();
        let mut queue = Vec::new();
        for n in 0..5 {
            let request = if case.unlike && n % 2 == 1 {
                ours.lock(KEY).ttl(TTL * 2)
            } else {
                ours.lock(KEY).fencing(n % 3 > 0)
            };
            let mut waiting = Box::pin(request.acquire());
            for _ in 0..case.polls {
                assert!(poll_once(waiting.as_mut()).await.is_none(), "{case:?}");
            }
            queue.push(Some(waiting));
            tokio::task::yield_now().await;
        }
        let mut victims: Vec<_> =
            queue.iter_mut().skip(case.at).take(case.count).map(Option::take).collect();
        if case.moment == Moment::Waiting {
            victims.clear();
        }
        let began = match case.end {
            End::Expired => {
                held.lost().await;
                // The lease in the store is longer than its validity.
                tokio::time::Instant::now() + ms(120)
            }
            _ => tokio::time::Instant::now(),
        };
        match case.end {
            End::Drop => drop(held),
            End::Release => held.release().await.unwrap(),
            End::Panic => {
                let panics = tokio::spawn(async move {
                    let _held = held;
                    std::panic::resume_unwind(Box::new("planned"));
                });
                assert!(panics.await.unwrap_err().is_panic());
            }
            End::Expired => {}
        }
        if let Moment::Yields(yields) = case.moment {
            for _ in 0..yields {
                tokio::task::yield_now().await;
            }
        }
        drop(victims);
        for waiting in queue.into_iter().flatten() {
            let guard = timeout(ms(30_000), waiting).await;
            let guard = guard.unwrap_or_else(|_| panic!("{case:?}: stuck")).unwrap();
            at_once(began, &format!("{case:?}"));
            drop(guard);
        }
        // The other process is not blocked either.
        let next = timeout(ms(30_000), theirs.lock(KEY).acquire()).await;
        next.unwrap_or_else(|_| panic!("{case:?}: left behind")).unwrap().release().await.unwrap();
        at_once(began, &format!("{case:?}: all"));
        assert_eq!(faults.count(Operation::Renew), 0, "{case:?}");
    }

    #[distributed_lock(key = "k", pool = pool, ttl = "60s", wait = "forever")]
    async fn yields(pool: LockPool) -> Result<(), LockError> {
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        Ok(())
    }

    /// From before the first poll to after the last one, of an annotated function, between two others.
    #[tokio::test(start_paused = true)]
    async fn an_annotated_call_at_every_poll_in_virtual_time() {
        let (pool, _) =
            on_virtual_time("memory://annotated", |it| it.ttl(TTL).wait(Wait::Forever)).await;
        at_every_poll(&pool, INSTANT).await;
    }

    #[tokio::test]
    async fn an_annotated_call_at_every_poll_on_redis() {
        let server = RedisServer::start();
        at_every_poll(&patient(server.url(), TTL).await, NOISE).await;
        until_nothing_is_left(&server).await;
    }

    async fn at_every_poll(pool: &LockPool, limit: Duration) {
        let around = std::cell::RefCell::new(None);
        let make = || {
            let (before, after) = (pool.lock(KEY).acquire(), pool.lock(KEY).acquire());
            let victim = yields(pool.clone());
            let (told, served) = tokio::sync::oneshot::channel::<()>();
            let mut told = Some(told);
            let holder = pool.lock(KEY).acquire();
            *around.borrow_mut() = Some(served);
            async move {
                // The holder, a waiter before, the victim, a waiter behind; then the queue moves.
                let (mut before, mut after) = (Box::pin(before), Box::pin(after));
                let mut victim = Box::pin(victim);
                let held = holder.await.unwrap();
                assert!(poll_once(before.as_mut()).await.is_none());
                assert!(poll_once(victim.as_mut()).await.is_none());
                assert!(poll_once(after.as_mut()).await.is_none());
                tokio::spawn(async move {
                    held.release().await.unwrap();
                    before.await.unwrap().release().await.unwrap();
                    after.await.unwrap().release().await.unwrap();
                    drop(told.take());
                });
                victim.await.unwrap();
            }
        };
        let polls = drop_at_every_poll(make, async |polls| {
            let began = tokio::time::Instant::now();
            let served = around.borrow_mut().take().unwrap();
            let served = timeout(ms(30_000), served).await;
            assert!(served.is_ok(), "dropped after {polls} polls: stuck");
            let last = pool.lock(KEY).acquire().await.unwrap();
            last.release().await.unwrap();
            let took = began.elapsed();
            assert!(took <= limit, "dropped after {polls} polls: {took:?}");
        })
        .await;
        assert!(polls > 3, "{polls}");
    }
}

/// The hold ends in other ways than by a release.
mod lost {
    use super::*;

    /// The key is deleted; a holder that does not notice delays no waiter.
    #[tokio::test]
    async fn a_deleted_key_goes_to_the_next() {
        let server = RedisServer::start();
        let (ours, theirs) = (patient(server.url(), TTL).await, patient(server.url(), TTL).await);
        for round in 0..20 {
            // Before the first renewal no message reaches the holder, which notices the loss at the next renewal.
            let held = ours.lock(KEY).renew(ms(200)).acquire().await.unwrap();
            let mut queue = Vec::new();
            for n in 0..6 {
                let acquire = if n % 3 == 2 { &theirs } else { &ours }.lock(KEY).acquire();
                queue.push(tokio::spawn(async move { acquire.await?.release().await }));
                tokio::task::yield_now().await;
            }
            // Requests of the other process may still be in flight.
            let victim = queue.remove(round % 5);
            server.cli(&["DEL", KEY]);
            victim.abort();
            for waiting in queue {
                within(NOISE, "the next after a loss", waiting).await.unwrap().unwrap();
            }
            assert!(within(NOISE, "the holder is notified", held.lost()).await.is_lost());
            assert!(held.release().await.unwrap_err().is_lost());
        }
        until_nothing_is_left(&server).await;
    }

    /// The key is deleted while the lock is handed off continuously.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn deletions_during_hand_offs() {
        let server = RedisServer::start();
        let pool = patient(server.url(), TTL).await;
        let served = Arc::new(AtomicUsize::new(0));
        let end = Instant::now() + ms(1_500);
        let mut queue = JoinSet::new();
        for _ in 0..16 {
            let (pool, served) = (pool.clone(), served.clone());
            queue.spawn(async move {
                while Instant::now() < end {
                    let guard = match pool.lock(KEY).acquire().await {
                        Ok(guard) => guard,
                        // Lost during the hand-off.
                        Err(error) => {
                            assert!(error.is_lost(), "{error}");
                            continue;
                        }
                    };
                    served.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_micros(fastrand::u64(..500))).await;
                    let _ = guard.release().await;
                }
            });
        }
        while Instant::now() < end {
            let before = served.load(Ordering::Relaxed);
            server.cli(&["DEL", KEY]);
            eventually_async(NOISE, "the queue moves on", async || {
                served.load(Ordering::Relaxed) > before + 3 || Instant::now() >= end
            })
            .await;
        }
        timeout(ms(10_000), queue.join_all()).await.expect("all are served");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_rejects_the_queue_and_the_other_process_continues() {
        for moment in 0..6 {
            let store = format!("memory://shutdown-{moment}");
            let (ours, _) = on_virtual_time(&store, |it| it.ttl(TTL).wait(Wait::Forever)).await;
            let theirs = LockPool::builder(&*store).wait(Wait::Forever).on_current_runtime();
            let theirs = theirs.connect().await.unwrap();
            let held = ours.lock(KEY).acquire().await.unwrap();
            let mut queue = Vec::new();
            for _ in 0..4 {
                queue.push(queued(ours.lock(KEY)).await);
            }
            let next = queued(theirs.lock(KEY)).await;
            let began = tokio::time::Instant::now();
            let shutdown = {
                let pool = ours.clone();
                tokio::spawn(async move { pool.shutdown(TTL).await })
            };
            for _ in 0..moment {
                tokio::task::yield_now().await;
            }
            // While the pool closes, or just before or after.
            drop(held);
            let mut served = 0;
            for waiting in queue {
                match waiting.await.unwrap() {
                    Ok(guard) => {
                        served += 1;
                        drop(guard);
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::PoolClosed),
                }
            }
            let report = shutdown.await.unwrap();
            assert_eq!(report.abandoned, 0, "{served} were served");
            next.await.unwrap().unwrap().release().await.unwrap();
            at_once(began, "all are served or sent away");
        }
    }
}

/// Everything at the same time.
mod storm {
    use super::*;

    const TASKS: usize = 64;

    struct Storm {
        pools: [LockPool; 2],
        inside: AtomicUsize,
        last_fence: Mutex<u64>,
        entered: AtomicUsize,
        given_up: AtomicUsize,
        panicked: AtomicUsize,
        began: Instant,
        /// Whether the key is sometimes deleted, so that two may be inside for a moment.
        robbed: bool,
    }

    struct Leaves<'a>(&'a AtomicUsize);

    impl Drop for Leaves<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl Storm {
        /// For three seconds, and on a slow machine until enough has happened.
        fn goes_on(&self) -> bool {
            let elapsed = self.began.elapsed();
            elapsed < ms(3_000) || (!self.has_met_all() && elapsed < DEADLINE)
        }

        fn has_met_all(&self) -> bool {
            let count = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
            count(&self.entered) > 200 && count(&self.given_up) > 50 && count(&self.panicked) > 10
        }

        async fn section(&self, guard: &LockGuard) {
            let others = self.inside.fetch_add(1, Ordering::SeqCst);
            let _leaves = Leaves(&self.inside);
            assert!(self.robbed || others == 0, "{others} others inside");
            if let Some(fence) = guard.fence() {
                let mut last = self.last_fence.lock().unwrap();
                assert!(self.robbed || fence.get() > *last, "{fence} after {last}");
                *last = fence.get().max(*last);
            }
            self.entered.fetch_add(1, Ordering::SeqCst);
            match fastrand::u8(..10) {
                0..5 => tokio::task::yield_now().await,
                5..8 => tokio::time::sleep(Duration::from_micros(fastrand::u64(..400))).await,
                8 => {}
                _ => {
                    self.panicked.fetch_add(1, Ordering::SeqCst);
                    std::panic::resume_unwind(Box::new("planned"));
                }
            }
        }

        fn request(&self, n: usize) -> LockRequest {
            let request = self.pools[n % 2].lock(KEY);
            match fastrand::u8(..12) {
                0 => request.ttl(TTL * 2),
                1 => request.renew(false),
                2 => request.max_hold(ms(30_000)),
                3 => request.wait(Duration::from_micros(fastrand::u64(..20_000))),
                4..7 => request.fencing(false),
                _ => request,
            }
        }

        async fn once(self: Arc<Self>, n: usize) {
            let guard = match self.request(n).acquire().await {
                Ok(guard) => guard,
                Err(error) if error.is_conflict() => {
                    self.given_up.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                Err(error) => {
                    assert!(self.robbed && error.is_lost(), "{error}");
                    return;
                }
            };
            self.section(&guard).await;
            match fastrand::u8(..3) {
                0 => drop(guard),
                1 => drop(guard.release()),
                _ => {
                    let released = guard.release().await;
                    assert!(self.robbed || released.is_ok(), "{released:?}");
                }
            }
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_cancels_timeouts_and_panics() {
        storm(false).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_cancels_timeouts_panics_and_losses() {
        storm(true).await;
    }

    async fn storm(robbed: bool) {
        let server = RedisServer::start();
        let storm = Arc::new(Storm {
            pools: [patient(server.url(), TTL).await, patient(server.url(), TTL).await],
            inside: AtomicUsize::new(0),
            last_fence: Mutex::new(0),
            entered: AtomicUsize::new(0),
            given_up: AtomicUsize::new(0),
            panicked: AtomicUsize::new(0),
            began: Instant::now(),
            robbed,
        });
        let mut tasks = JoinSet::new();
        for n in 0..TASKS {
            let storm = storm.clone();
            tasks.spawn(async move {
                while storm.goes_on() {
                    let section = tokio::spawn(storm.clone().once(n));
                    if fastrand::u8(..3) == 0 {
                        tokio::time::sleep(Duration::from_micros(fastrand::u64(..15_000))).await;
                        section.abort();
                    }
                    match section.await {
                        Ok(()) => {}
                        Err(end) if end.is_cancelled() => {
                            storm.given_up.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(end) => {
                            let why = end.into_panic();
                            if why.downcast_ref().is_none_or(|why: &&str| *why != "planned") {
                                std::panic::resume_unwind(why);
                            }
                        }
                    }
                }
            });
        }
        let mut seen = (0, Instant::now());
        let mut longest = Duration::ZERO;
        while storm.goes_on() {
            if robbed {
                server.cli(&["DEL", KEY]);
            }
            tokio::time::sleep(ms(20)).await;
            longest = longest.max(seen.1.elapsed());
            let entered = storm.entered.load(Ordering::SeqCst);
            if entered > seen.0 {
                seen = (entered, Instant::now());
            }
            assert!(longest < NOISE, "no task entered for {longest:?}");
        }
        let over = timeout(NOISE * 4, tasks.join_all()).await;
        assert!(over.is_ok(), "a task is stuck");
        let count = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
        println!(
            "{} sections, {} given up, {} panicked, longest pause {longest:?}",
            count(&storm.entered),
            count(&storm.given_up),
            count(&storm.panicked)
        );
        assert!(storm.has_met_all(), "too few of one kind");
        until_nothing_is_left(&server).await;
    }
}
