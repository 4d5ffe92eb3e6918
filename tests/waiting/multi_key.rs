//! Requests for several keys, each of which may be handed from one process to the next all the time.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockGuard, LockPool};
use lock_tests::{Monitor, RedisServer, eventually_async};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use crate::wait_queue::{
    How, NOISE, PATIENCE, come, come_with, free, median, ms, pools, soon, until_in_line,
    until_nothing_is_left,
};

/// Tasks that take locks again and again.
struct Crowd {
    over: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

/// Who is inside, by key.
type Floor = Arc<[AtomicBool; 3]>;

const KEYS: [&str; 3] = ["a", "b", "c"];

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

    /// Four tasks of `pool` that want `keys` all the time.
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
        timeout(PATIENCE, self.tasks.join_all()).await.expect("all are served");
    }
}

/// `pool` has `a` on its way to `b`, for which it stands in line.
async fn until_half_way(server: &RedisServer) {
    until_in_line(server, "b", 1).await;
    assert_eq!(server.cli(&["EXISTS", "a", "b"]), "2");
}

fn come_for(pool: &LockPool, keys: &'static [&str]) -> JoinHandle<(Instant, LockGuard)> {
    come_with(pool.lock_all(keys.iter().copied()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_keys_that_are_never_free_are_had_together() {
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
        until_in_line(&server, "a", 1).await;
        let mut took = Vec::new();
        for round in 0..ROUNDS {
            let asked = Instant::now();
            let request = ours.lock_all(["b", "a"]).fencing(fencing).wait(ms(5_000));
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

/// One pool hands each of them on among its tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_keys_that_one_pool_each_keeps_busy_are_had_together() {
    let server = RedisServer::start();
    let [first, second, third, ours] = pools(&server).await;
    let floor = Floor::default();
    let mut crowd = Crowd::new();
    for (pool, keys) in [(&first, &["a"]), (&second, &["b"]), (&third, &["c"])] {
        crowd.want(pool, keys, &floor);
    }
    for round in 0..5 {
        let request = ours.lock_all(KEYS).wait(ms(5_000)).acquire();
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
            let guard = soon(keys, come_for(pool, keys)).await.1;
            enter(&floor, keys);
            leave(&floor, keys);
            free(guard).await;
        }
    }
    crowd.end().await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn whoever_gives_up_half_way_leaves_nothing() {
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    for how in [How::Dropped, How::TimedOut] {
        let guard = holder.lock("b").acquire().await.unwrap();
        let mut leaver = None;
        if how == How::Dropped {
            leaver = Some(come_for(&ours, &["a", "b"]));
            until_half_way(&server).await;
        }
        let timed_out = (how == How::TimedOut).then(|| {
            let acquiring = ours.lock_all(["a", "b"]).wait(ms(600)).acquire();
            tokio::spawn(async move { acquiring.await.unwrap_err() })
        });
        until_half_way(&server).await;
        let next = come(&theirs, "a");
        let last = come(&theirs, "b");
        until_in_line(&server, "a", 1).await;
        until_in_line(&server, "b", 2).await;
        if let Some(leaver) = leaver {
            leaver.abort();
        }
        if let Some(timed_out) = timed_out {
            let error = soon(how, timed_out).await;
            assert!(error.is_conflict(), "{error}");
        }
        free(soon("who waits for what had been climbed", next).await.1).await;
        until_in_line(&server, "b", 1).await;
        free(guard).await;
        free(soon("who waits for the next key", last).await.1).await;
        until_nothing_is_left(&server).await;
    }
}

#[tokio::test]
async fn whoever_gives_up_in_the_line_of_the_first_key_leaves_it() {
    let server = RedisServer::start();
    let [holder, ours] = pools(&server).await;
    let guard = holder.lock("a").acquire().await.unwrap();
    let leaver = come_for(&ours, &["a", "b"]);
    until_in_line(&server, "a", 1).await;
    // What is further up is free for others.
    free(soon("another key", come(&holder, "b")).await.1).await;
    leaver.abort();
    until_in_line(&server, "a", 0).await;
    free(guard).await;
    until_nothing_is_left(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giving_up_at_any_moment_leaves_nothing_and_stops_nobody() {
    const ROUNDS: usize = 150;
    let server = RedisServer::start();
    let [first, second, ours] = pools(&server).await;
    let floor = Floor::default();
    let mut crowd = Crowd::new();
    crowd.want(&first, &["a"], &floor);
    crowd.want(&second, &["a"], &floor);
    crowd.want(&second, &["b"], &floor);
    let mut served = 0;
    for _ in 0..ROUNDS {
        let patience = Duration::from_micros(fastrand::u64(..30_000));
        if let Ok(guard) = timeout(patience, ours.lock_all(["a", "b"]).acquire()).await {
            served += 1;
            free(guard.unwrap()).await;
        }
    }
    println!("{served} of {ROUNDS} served");
    assert!((1..ROUNDS).contains(&served));
    crowd.end().await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn a_pool_that_shuts_down_half_way_leaves_nothing() {
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    let guard = holder.lock("b").acquire().await.unwrap();
    let acquiring = ours.lock_all(["a", "b"]).acquire();
    let waiting = tokio::spawn(async move { acquiring.await.unwrap_err() });
    until_half_way(&server).await;
    let next = come(&theirs, "a");
    until_in_line(&server, "a", 1).await;
    timeout(NOISE, ours.shutdown(PATIENCE)).await.expect("nothing is waited for");
    assert_eq!(soon("the waiter", waiting).await.kind(), ErrorKind::PoolClosed);
    free(soon("who waits for what had been climbed", next).await.1).await;
    until_in_line(&server, "b", 0).await;
    free(guard).await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn what_is_had_on_the_way_is_renewed() {
    let server = RedisServer::start();
    let [holder, ours] = pools(&server).await;
    let guard = holder.lock("b").acquire().await.unwrap();
    let acquiring = ours.lock_all(["a", "b"]).ttl(ms(250)).acquire();
    let next = tokio::spawn(async move { acquiring.await.unwrap() });
    until_half_way(&server).await;
    let token = server.cli(&["GET", "a"]);
    // More than a ttl, and less than it is kept at most.
    for _ in 0..5 {
        let monitor = Monitor::start(&server);
        monitor.wait_for(PATIENCE, |ran| ran.is("PEXPIRE", "a"));
    }
    assert_eq!(server.cli(&["GET", "a"]), token);
    let freed = free(guard).await;
    let guard = soon("both keys", next).await;
    assert!(freed.elapsed() < NOISE);
    assert_eq!(server.cli(&["GET", "a"])[..32], token[..32]);
    guard.verify().await.unwrap();
    free(guard).await;
    until_nothing_is_left(&server).await;
}

#[tokio::test]
async fn what_is_taken_away_on_the_way_is_climbed_again() {
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    for taken in [false, true] {
        let guard = holder.lock("b").acquire().await.unwrap();
        let acquiring = ours.lock_all(["a", "b"]).ttl(ms(500)).acquire();
        let next = tokio::spawn(async move { acquiring.await.unwrap() });
        until_half_way(&server).await;
        let token = server.cli(&["GET", "a"]);
        server.cli(&["DEL", "a"]);
        if taken {
            let thief = theirs.lock("a").acquire().await.unwrap();
            until_in_line(&server, "a", 1).await;
            until_in_line(&server, "b", 0).await;
            thief.verify().await.unwrap();
            free(thief).await;
        }
        eventually_async(PATIENCE, "it has the key again", async || {
            let now = server.cli(&["GET", "a"]);
            !now.is_empty() && now != token
        })
        .await;
        free(guard).await;
        let guard = soon("both keys", next).await;
        guard.verify().await.unwrap();
        free(guard).await;
        until_nothing_is_left(&server).await;
    }
}

/// Whoever holds the next key wants the one that is had on the way.
#[tokio::test]
async fn nobody_holds_what_the_holder_of_the_next_key_waits_for_for_long() {
    let server = RedisServer::start();
    let [holder, ours] = pools(&server).await;
    let b = holder.lock("b").acquire().await.unwrap();
    let next = come_for(&ours, &["a", "b"]);
    until_half_way(&server).await;
    let asked = Instant::now();
    let (got, a) = soon("who came from the other side", come(&holder, "a")).await;
    println!("a key that somebody had on the way: {:?}", got - asked);
    assert!(got - asked < ms(1_000) + NOISE);
    free(b).await;
    free(a).await;
    free(soon("both keys", next).await.1).await;
    until_nothing_is_left(&server).await;
}

/// A call under a name that was given up half-way is passed on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn given_up_in_the_instant_of_the_grant() {
    const ROUNDS: usize = 60;
    let server = RedisServer::start();
    let [holder, ours, theirs] = pools(&server).await;
    for round in 0..ROUNDS {
        let guard = holder.lock("b").acquire().await.unwrap();
        let leaver = come_for(&ours, &["a", "b"]);
        until_half_way(&server).await;
        let last = come(&theirs, "b");
        until_in_line(&server, "b", 2).await;
        let leave = Instant::now() + Duration::from_micros(fastrand::u64(..1_500));
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
        assert!(got - freed < NOISE, "{:?}", got - freed);
        free(guard).await;
        free(soon(round, come(&theirs, "a")).await.1).await;
    }
    until_nothing_is_left(&server).await;
}
