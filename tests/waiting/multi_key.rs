//! Requests for several keys, each of which may be handed off between processes continuously.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockGuard, LockPool};
use lock_tests::prelude::*;
use lock_tests::transfers::overlap_without_an_error;
use lock_tests::{RedisServer, eventually_async};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::wait_queue::{GiveUp, pools};

/// Tasks that take locks again and again.
struct Crowd {
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

/// Whether a task is inside, by key.
type Floor = Arc<[AtomicBool; 3]>;

const KEYS: [&str; 3] = ["a", "b", "c"];

/// The limit of tries to meet an acquire between steps, which lasts a second at most.
const ROUNDS: usize = 20;

fn place<'a>(floor: &'a Floor, key: &str) -> &'a AtomicBool {
    &floor[KEYS.iter().position(|known| *known == key).unwrap()]
}

fn enter(floor: &Floor, keys: &[&str]) {
    for key in keys {
        assert!(!place(floor, key).swap(true, Ordering::SeqCst), "two inside {key}");
    }
}

fn leave(floor: &Floor, keys: &[&str]) {
    for key in keys {
        assert!(place(floor, key).swap(false, Ordering::SeqCst));
    }
}

impl Crowd {
    fn new() -> Self {
        Self { over: Arc::default(), tasks: JoinSet::new() }
    }

    /// Four tasks of `pool` that acquire `keys` continuously.
    fn want(&mut self, pool: &LockPool, keys: &'static [&str], floor: &Floor) {
        for _ in 0..4 {
            let (pool, over, floor) = (pool.clone(), self.over.clone(), floor.clone());
            self.tasks.spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let guard = pool.lock_all(keys.iter().copied()).acquire().await.unwrap();
                    enter(&floor, keys);
                    sleep(ms(1)).await;
                    leave(&floor, keys);
                    guard.release().await.unwrap();
                }
            });
        }
    }

    async fn end(self) {
        self.over.store(true, Ordering::Relaxed);
        timeout(DEADLINE, self.tasks.join_all()).await.expect("all are served");
    }
}

/// Waits until a stepwise acquire holds `a` and is queued for `b`.
async fn until_between_steps(server: &RedisServer) {
    eventually_async(DEADLINE, "it holds `a`, and is queued for `b`", async || {
        server.cli(&["ZCARD", "b:lock_runtime:line"]) == "1"
            && server.cli(&["EXISTS", "a", "b"]) == "2"
    })
    .await;
}

/// Waits until `task` is queued for `a`, or has it already: an acquire between steps gives it back soon.
async fn until_queued_for_a_or_served<T>(server: &RedisServer, task: &JoinHandle<T>) {
    eventually_async(DEADLINE, "the waiter is queued, or served", async || {
        task.is_finished() || server.cli(&["ZCARD", "a:lock_runtime:line"]) == "1"
    })
    .await;
}

fn acquire_all_in_task(pool: &LockPool, keys: &'static [&str]) -> JoinHandle<(Instant, LockGuard)> {
    run_in_task(pool.lock_all(keys.iter().copied()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_keys_that_are_never_free_are_acquired_together() {
    const ROUNDS: usize = 8;
    for fencing in [false, true] {
        let server = RedisServer::start();
        let [first, second, third, fourth, ours] = pools(&server).await;
        let floor = Floor::default();
        let mut crowd = Crowd::new();
        crowd.want(&first, &["a"], &floor);
        crowd.want(&second, &["a"], &floor);
        crowd.want(&third, &["b"], &floor);
        crowd.want(&fourth, &["b"], &floor);
        until_queued(&server, "a", 1).await;
        let mut took = Vec::new();
        for round in 0..ROUNDS {
            let asked = Instant::now();
            let request = ours.lock_all(["b", "a"]).fencing(fencing).wait(DEADLINE);
            let guard = request.acquire().await;
            let guard = guard.unwrap_or_else(|error| panic!("round {round}: {error}"));
            took.push(asked.elapsed());
            enter(&floor, &["a", "b"]);
            assert_eq!(guard.fence().is_some(), fencing);
            guard.verify().await.unwrap();
            leave(&floor, &["a", "b"]);
            guard.release().await.unwrap();
        }
        println!("two busy keys: {:?}, at most {:?}", median(took.clone()), took.iter().max());
        crowd.end().await;
        until_nothing_is_left(&server).await;
    }
}

/// Each key is handed off among the tasks of one pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_keys_that_one_pool_each_keeps_busy_are_acquired_together() {
    let server = RedisServer::start();
    let [first, second, third, ours] = pools(&server).await;
    let floor = Floor::default();
    let mut crowd = Crowd::new();
    for (pool, keys) in [(&first, &["a"]), (&second, &["b"]), (&third, &["c"])] {
        crowd.want(pool, keys, &floor);
    }
    for round in 0..5 {
        let request = ours.lock_all(KEYS).wait(DEADLINE).acquire();
        let guard = request.await.unwrap_or_else(|error| panic!("round {round}: {error}"));
        enter(&floor, &KEYS);
        leave(&floor, &KEYS);
        guard.release().await.unwrap();
    }
    crowd.end().await;
    until_nothing_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_whose_keys_overlap_do_not_wait_for_each_other() {
    let server = RedisServer::start();
    let [first, second, third, fourth] = pools(&server).await;
    let floor = Floor::default();
    let mut crowd = Crowd::new();
    crowd.want(&first, &["a", "b"], &floor);
    crowd.want(&second, &["c", "b"], &floor);
    crowd.want(&third, &["c", "a"], &floor);
    crowd.want(&fourth, &["c"], &floor);
    for (pool, keys) in [(&first, &KEYS[..2]), (&second, &KEYS[1..]), (&third, &KEYS[..])] {
        for _ in 0..5 {
            let guard = joined(keys, acquire_all_in_task(pool, keys)).await.1;
            enter(&floor, keys);
            leave(&floor, keys);
            release(guard).await;
        }
    }
    crowd.end().await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn an_abandoned_stepwise_acquire_leaves_nothing() {
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    for how in [GiveUp::Dropped, GiveUp::TimedOut] {
        let guard = holder.lock("b").acquire().await.unwrap();
        let mut leaver = None;
        if how == GiveUp::Dropped {
            leaver = Some(acquire_all_in_task(&ours, &["a", "b"]));
            until_between_steps(&server).await;
        }
        let timed_out = (how == GiveUp::TimedOut).then(|| {
            // It must not leave before the others are queued.
            let acquiring = ours.lock_all(["a", "b"]).wait(ms(3_000)).acquire();
            tokio::spawn(async move { acquiring.await.unwrap_err() })
        });
        until_between_steps(&server).await;
        let next = acquire_in_task(&theirs, "a");
        let last = acquire_in_task(&theirs, "b");
        until_queued_for_a_or_served(&server, &next).await;
        until_queued(&server, "b", 2).await;
        if let Some(leaver) = leaver {
            leaver.abort();
        }
        if let Some(timed_out) = timed_out {
            let error = joined(how, timed_out).await;
            assert!(error.is_conflict(), "{error}");
        }
        release(joined("the waiter for the key held between steps", next).await.1).await;
        until_queued(&server, "b", 1).await;
        release(guard).await;
        release(joined("the waiter for the next key", last).await.1).await;
        until_nothing_is_left(&server).await;
    }
}

#[tokio::test]
async fn an_acquire_abandoned_in_the_queue_of_the_first_key_leaves_it() {
    let server = RedisServer::start();
    let [holder, ours] = pools(&server).await;
    let guard = holder.lock("a").acquire().await.unwrap();
    let leaver = acquire_all_in_task(&ours, &["a", "b"]);
    until_queued(&server, "a", 1).await;
    // The later keys are free for others.
    release(joined("another key", acquire_in_task(&holder, "b")).await.1).await;
    leaver.abort();
    until_queued(&server, "a", 0).await;
    release(guard).await;
    until_nothing_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giving_up_at_any_moment_leaves_nothing_and_blocks_no_waiter() {
    const ROUNDS: u64 = 150;
    let server = RedisServer::start();
    let [first, second, ours] = pools(&server).await;
    let floor = Floor::default();
    let mut crowd = Crowd::new();
    crowd.want(&first, &["a"], &floor);
    crowd.want(&second, &["a"], &floor);
    crowd.want(&second, &["b"], &floor);
    let (mut served, mut rounds) = (0, 0);
    let end = Instant::now() + DEADLINE;
    while rounds < ROUNDS || served == 0 {
        assert!(Instant::now() < end, "{served} of {rounds} served");
        // A slow machine serves none in time: then the limit grows until one is served.
        let longest = 30_000 + 1_000 * rounds.saturating_sub(ROUNDS);
        let limit = Duration::from_micros(fastrand::u64(..longest));
        rounds += 1;
        if let Ok(guard) = timeout(limit, ours.lock_all(["a", "b"]).acquire()).await {
            served += 1;
            release(guard.unwrap()).await;
        }
    }
    println!("{served} of {rounds} served");
    assert!(served < rounds);
    crowd.end().await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn a_pool_shut_down_during_a_stepwise_acquire_leaves_nothing() {
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    let guard = holder.lock("b").acquire().await.unwrap();
    let acquiring = ours.lock_all(["a", "b"]).acquire();
    let waiting = tokio::spawn(async move { acquiring.await.unwrap_err() });
    until_between_steps(&server).await;
    let next = acquire_in_task(&theirs, "a");
    until_queued_for_a_or_served(&server, &next).await;
    timeout(DEADLINE / 3, ours.shutdown(DEADLINE)).await.expect("nothing is waited for");
    assert_eq!(joined("the waiter", waiting).await.kind(), ErrorKind::PoolClosed);
    release(joined("the waiter for the key held between steps", next).await.1).await;
    until_queued(&server, "b", 0).await;
    release(guard).await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn keys_held_between_steps_are_renewed() {
    let ttl = ms(400);
    let server = RedisServer::start();
    let [holder, ours] = pools(&server).await;
    // Keys between steps are held for a second at most, and a stall of the machine may end a short lease: then there is
    // another round.
    for round in 0.. {
        assert!(round < ROUNDS, "no key was held between steps for longer than its ttl");
        let guard = holder.lock("b").acquire().await.unwrap();
        let next = tokio::spawn(ours.lock_all(["a", "b"]).ttl(ttl).acquire());
        until_between_steps(&server).await;
        let token = server.cli(&["GET", "a"]);
        sleep(ttl + ms(50)).await;
        let is_renewed = token != "(nil)" && server.cli(&["GET", "a"]) == token;
        let freed = release(guard).await;
        let guard = match joined("both keys", next).await {
            Ok(guard) => guard,
            Err(error) => {
                assert!(error.is_lost(), "{error}");
                continue;
            }
        };
        let is_prompt = freed.elapsed() < NOISE;
        let is_same = server.cli(&["GET", "a"]).get(..32) == token.get(..32);
        let is_valid = guard.verify().await.is_ok();
        // A stall may end this lease, too.
        drop(guard.release().await);
        if is_renewed && is_prompt && is_same && is_valid {
            break;
        }
    }
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn keys_lost_between_steps_are_acquired_again() {
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    for taken in [false, true] {
        let mut is_again = false;
        for _ in 0..ROUNDS {
            let guard = holder.lock("b").acquire().await.unwrap();
            // The renewal after a third of it finds the loss, before the second of a hold between steps is over.
            let acquiring = ours.lock_all(["a", "b"]).ttl(ms(1_500)).acquire();
            let next = tokio::spawn(async move { acquiring.await.unwrap() });
            until_between_steps(&server).await;
            is_again = is_acquired_again(&server, &theirs, taken).await;
            release(guard).await;
            let guard = joined("both keys", next).await;
            guard.verify().await.unwrap();
            release(guard).await;
            until_nothing_is_left(&server).await;
            if is_again {
                break;
            }
        }
        assert!(is_again, "taken {taken}: `a` was never acquired again between steps");
    }
}

/// Takes `a` away. False if the acquire between steps does not notice it: on a slow machine its hold is over before.
async fn is_acquired_again(server: &RedisServer, theirs: &LockPool, taken: bool) -> bool {
    let limit = ms(3_000);
    let token = server.cli(&["GET", "a"]);
    server.cli(&["DEL", "a"]);
    if taken {
        let Some(thief) = theirs.lock("a").try_acquire().await.unwrap() else { return false };
        let is_noticed = timeout(limit, until_queued(server, "a", 1)).await.is_ok();
        if is_noticed {
            until_queued(server, "b", 0).await;
        }
        thief.verify().await.unwrap();
        release(thief).await;
        if !is_noticed {
            return false;
        }
    }
    let again = eventually_async(DEADLINE, "it has the key again", async || {
        let now = server.cli(&["GET", "a"]);
        now != "(nil)" && now != token
    });
    timeout(limit, again).await.is_ok()
}

/// The holder of the next key acquires the key that is held between steps.
#[tokio::test]
async fn a_key_held_between_steps_is_soon_free_for_the_holder_of_the_next() {
    let server = RedisServer::start();
    let [holder, ours] = pools(&server).await;
    let b = holder.lock("b").acquire().await.unwrap();
    let next = acquire_all_in_task(&ours, &["a", "b"]);
    until_between_steps(&server).await;
    let asked = Instant::now();
    let (got, a) = joined("the holder of the next key", acquire_in_task(&holder, "a")).await;
    println!("a key that was held between steps: {:?}", got - asked);
    assert!(got - asked < ms(5_000), "{:?}", got - asked);
    release(b).await;
    release(a).await;
    release(joined("both keys", next).await.1).await;
    until_nothing_is_left(&server).await;
}

/// A grant to an owner token that was abandoned between steps is passed on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn given_up_in_the_instant_of_the_grant() {
    const ROUNDS: usize = 60;
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    let mut slow = 0;
    for round in 0..ROUNDS {
        let guard = holder.lock("b").acquire().await.unwrap();
        let leaver = acquire_all_in_task(&ours, &["a", "b"]);
        until_between_steps(&server).await;
        let last = acquire_in_task(&theirs, "b");
        until_queued(&server, "b", 2).await;
        let leave = Instant::now() + Duration::from_micros(fastrand::u64(..1_500));
        let leaving = tokio::spawn(abort_at(leave, leaver));
        let freed = release(guard).await;
        leaving.await.unwrap();
        let (got, guard) = joined(round, last).await;
        slow += usize::from(got - freed >= NOISE);
        release(guard).await;
        release(joined(round, acquire_in_task(&theirs, "a")).await.1).await;
    }
    // A grant that is not passed on costs a second, in about every third round.
    assert!(slow <= ROUNDS / 20, "{slow} of {ROUNDS} rounds took {NOISE:?} and more");
    until_nothing_is_left(&server).await;
}

#[test]
fn overlapping_keys_of_processes_end_in_no_deadlock() {
    let server = RedisServer::start();
    overlap_without_an_error(env!("CARGO_BIN_EXE_transfers"), &server.url());
}
