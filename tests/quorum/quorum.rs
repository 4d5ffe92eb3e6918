//! A majority of independent servers: grants and leftovers while some nodes are taken, silent, slow or refuse.

#![allow(clippy::disallowed_methods)]

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use lock_runtime::backend::Warning;
use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, Fence, LockPool, LockRequest, Renew, Wait};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::quorum::{says_busy, until_all_nodes_answer};
use lock_tests::skew::Step;
use lock_tests::{FaultProxy, Latency, Quorum, RedisServer, Skew, Watched, eventually_async};
use tokio::task::JoinSet;

const DEADLINE: Duration = ms(10_000);

async fn connect(quorum: &Quorum) -> LockPool {
    LockPool::builder(quorum.url()).ttl(ms(2_000)).connect().await.unwrap()
}

/// The text of the error that says that `url` is no quorum. A node that is late on a busy machine is taken in later,
/// unchecked until then, so the connect is repeated.
pub(crate) async fn refusal(url: &str) -> String {
    let mut text = String::new();
    eventually_async(DEADLINE, "the connect is refused", async || {
        let Err(error) = LockPool::connect(url).await else { return false };
        println!("{error}");
        text = error.to_string();
        error.kind() == ErrorKind::Config
    })
    .await;
    text
}

/// Repeats an acquire of `key` until its error is as expected. On a busy machine a node that answers may be late, and the
/// error then says so.
async fn until_it_says(pool: &LockPool, key: &str, is_expected: impl Fn(&str) -> bool) {
    let mut said = String::new();
    eventually_async(DEADLINE, "the nodes say why", async || {
        let error = pool.lock(key).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
        let text = error.to_string();
        if text != said {
            println!("{text}");
        }
        said = text;
        is_expected(&said)
    })
    .await;
}

/// Waits until no node has `key` for an owner other than `other`.
async fn until_free(quorum: &Quorum, key: &str, other: &str) {
    eventually_async(DEADLINE, "all votes are taken back", async || {
        let alive = quorum.nodes().iter().filter(|node| node.is_running());
        alive.map(|node| node.cli(&["GET", key])).all(|held| held == "(nil)" || held == other)
    })
    .await;
}

#[tokio::test]
async fn it_conforms() {
    let quorum = Quorum::start(3);
    let url = quorum.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

#[tokio::test]
async fn it_conforms_while_a_node_is_down() {
    let quorum = Quorum::start(3);
    quorum[1].kill();
    let url = quorum.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
}

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Free,
    Taken,
    Hung,
    Refusing,
    /// Answers later than the others.
    Slow,
}

const STATES: [State; 5] = [State::Free, State::Taken, State::Hung, State::Refusing, State::Slow];

/// Each choice of states, in a different order of the nodes.
fn masks() -> Vec<[State; 5]> {
    let mut masks = Vec::new();
    for number in 0..STATES.len().pow(5) {
        let mask = [1, 5, 25, 125, 625].map(|power| STATES[number / power % 5]);
        if mask.is_sorted() {
            let mut turned = mask;
            turned.rotate_left(number % 5);
            masks.push(turned);
        }
    }
    masks
}

#[tokio::test]
async fn a_lock_is_acquired_if_and_only_if_a_majority_can_be_had_of_the_first_choices() {
    acquires_if_and_only_if_a_majority_can_be_had(0).await;
}

#[tokio::test]
async fn a_lock_is_acquired_if_and_only_if_a_majority_can_be_had_of_the_next_choices() {
    acquires_if_and_only_if_a_majority_can_be_had(1).await;
}

#[tokio::test]
async fn a_lock_is_acquired_if_and_only_if_a_majority_can_be_had_of_the_last_choices() {
    acquires_if_and_only_if_a_majority_can_be_had(2).await;
}

/// The choices of `part`, a third of all.
async fn acquires_if_and_only_if_a_majority_can_be_had(part: usize) {
    let quorum = Quorum::start(5);
    let proxies: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
    let url = Quorum::url_of(proxies.iter().map(|proxy| proxy.url().to_owned()));
    let pool = LockPool::builder(url)
        // A lease that is valid for as long as a slow answer takes on a busy machine.
        .ttl(ms(20_000))
        // More than a slow node needs, so that the others are not silent on a busy machine.
        .node_timeout(ms(400))
        .wait(Duration::ZERO)
        .connect()
        .await
        .unwrap();
    let masks = masks();
    assert_eq!(masks.len(), 126);
    let mut repeated = 0;
    for (number, mask) in masks.into_iter().enumerate().skip(part * 42).take(42) {
        let key = &*format!("mask:{number}");
        for ((node, proxy), state) in quorum.nodes().iter().zip(&proxies).zip(mask) {
            match state {
                State::Free => {}
                State::Taken => assert_eq!(node.cli(&["SET", key, "other"]), "OK"),
                State::Hung => {
                    proxy.hold(Direction::ToServer);
                    proxy.hold(Direction::ToClient);
                }
                State::Refusing => {
                    assert_eq!(node.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]), "OK");
                }
                State::Slow => proxy.delay(Direction::ToClient, ms(20)),
            }
        }
        let count = |state| mask.iter().filter(|it| **it == state).count();
        let fencing = number % 2 == 0;
        let mut acquired = pool.lock(key).fencing(fencing).try_acquire().await;
        if count(State::Free) + count(State::Slow) >= 3 {
            // A node may be late on a busy machine.
            for _ in 0..4 {
                if matches!(acquired, Ok(Some(_))) {
                    break;
                }
                println!("{mask:?}: {acquired:?}");
                repeated += 1;
                until_free(&quorum, key, "other").await;
                acquired = pool.lock(key).fencing(fencing).try_acquire().await;
            }
            let guard = acquired.unwrap().unwrap_or_else(|| panic!("not acquired: {mask:?}"));
            assert!(guard.is_held(), "{mask:?}");
            guard.release().await.unwrap_or_else(|error| panic!("{mask:?}: {error}"));
        } else if count(State::Taken) >= 3 {
            assert!(acquired.unwrap_or_else(|error| panic!("{mask:?}: {error}")).is_none());
        } else {
            let error = acquired.expect_err(&format!("{mask:?}"));
            assert_eq!(error.kind(), ErrorKind::Backend, "{mask:?}: {error}");
            assert!(error.to_string().contains("of 5 nodes granted and 3 are needed"), "{error}");
        }
        for (node, proxy) in quorum.nodes().iter().zip(&proxies) {
            proxy.delay(Direction::ToClient, Duration::ZERO);
            proxy.release_held();
            node.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
        }
        until_free(&quorum, key, "other").await;
        until_all_nodes_answer(&pool, DEADLINE).await;
    }
    assert!(repeated <= 8, "{repeated} of 42");
}

#[tokio::test]
async fn rounds_against_competitors_leave_time_for_the_answer() {
    let quorum = Quorum::start(3);
    let proxies: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
    let url = Quorum::url_of(proxies.iter().map(|proxy| proxy.url().to_owned()));
    let builder = LockPool::builder(url).ttl(ms(20_000)).wait(Duration::ZERO);
    // The pool gives up a call after four request timeouts, and a round takes most of one.
    let pool = builder.request_timeout(ms(1_000)).node_timeout(ms(1_000)).connect().await.unwrap();
    // The nodes know the scripts then.
    cycle(&pool, "k").await;
    let keys: Vec<_> = (0..8).map(|number| format!("key:{number}")).collect();
    for ((node, proxy), owner) in quorum.nodes().iter().zip(&proxies).zip(["a", "b", "c"]) {
        keys.iter().for_each(|key| assert_eq!(node.cli(&["SET", key, owner]), "OK"));
        proxy.delay(Direction::ToClient, ms(800));
    }
    let mut calls = JoinSet::new();
    for key in keys {
        let pool = pool.clone();
        calls.spawn(async move { pool.lock(&key).try_acquire().await });
    }
    while let Some(answer) = calls.join_next().await {
        match answer.unwrap() {
            Ok(granted) => assert!(granted.is_none()),
            // A node may be late on a busy machine.
            Err(error) => assert!(error.to_string().contains("nodes granted"), "{error}"),
        }
    }
}

#[tokio::test]
async fn what_a_node_says_is_in_the_error() {
    let quorum = Quorum::start(5);
    let pool = LockPool::builder(quorum.url()).wait(Duration::ZERO).connect().await.unwrap();
    quorum[0].cli(&["SET", "k", "other"]);
    quorum[1].kill();
    quorum[2].cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let parts = [
        "of 5 nodes granted and 3 are needed".to_owned(),
        format!("127.0.0.1:{} is held by another", quorum[0].port()),
        format!("127.0.0.1:{}", quorum[1].port()),
        format!("127.0.0.1:{} answered NOREPLICAS", quorum[2].port()),
    ];
    until_it_says(&pool, "k", |text| {
        // At first it may not be known that the node is dead.
        let is_known = text.contains("is not reachable") || text.contains("is lost");
        is_known && parts.iter().all(|part| text.contains(part))
    })
    .await;
}

#[tokio::test]
async fn a_frozen_node_delays_no_acquire() {
    let quorum = Quorum::start(5);
    // A wait for the frozen node would take a node timeout.
    let builder = LockPool::builder(quorum.url()).ttl(12 * DEADLINE).node_timeout(4 * DEADLINE);
    let pool = builder.request_timeout(4 * DEADLINE).connect().await.unwrap();
    cycle(&pool, "k").await;
    quorum[3].pause();
    for _ in 0..100 {
        within(DEADLINE, "a lock", cycle(&pool, "k")).await;
    }
    quorum[3].resume();
    until_free(&quorum, "k", "").await;
}

#[tokio::test]
async fn a_quorum_stands_while_a_minority_is_dead_and_no_longer() {
    let quorum = Quorum::start(5);
    let pool = connect(&quorum).await;
    for dead in 0..2 {
        quorum[dead].kill();
        pool.lock("k").acquire().await.unwrap().release().await.unwrap();
    }
    quorum[2].kill();
    let error = pool.lock("k").wait(ms(300)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert!(pool.health().await.is_err());
    quorum[1].restart();
    let guard = pool.lock("k").wait(DEADLINE).acquire().await.unwrap();
    guard.release().await.unwrap();
    let warnings = pool.health().await.unwrap().warnings;
    let is_of_a_dead_one = |warning: &&Warning| warning.to_string().contains("still stands");
    assert_eq!(warnings.iter().filter(is_of_a_dead_one).count(), 2, "{warnings:?}");
    // The living nodes keep nothing on disk.
    assert_eq!(warnings.len(), 5, "{warnings:?}");
}

#[tokio::test]
async fn a_pool_connects_to_a_majority_and_takes_the_others_in_later() {
    let quorum = Quorum::start(3);
    quorum[0].kill();
    let pool = connect(&quorum).await;
    let guard = pool.lock("k").acquire().await.unwrap();
    assert_eq!(quorum.holders("k"), [1, 2]);
    quorum[0].restart();
    eventually_async(DEADLINE, "a renewal takes the lock at the new node too", async || {
        quorum.holders("k") == [0, 1, 2]
    })
    .await;
    guard.release().await.unwrap();
    until_free(&quorum, "k", "").await;
    quorum[0].kill();
    quorum[1].kill();
    let error = LockPool::connect(&quorum.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(error.to_string().contains("1 of 3 nodes answer and 2 are needed"), "{error}");
}

#[tokio::test]
async fn clocks_that_are_far_apart_are_reported() {
    let nodes = [Skew::start(RedisServer::builder()), Skew::start(RedisServer::builder())];
    let plain = RedisServer::start();
    nodes[1].1.step(ms(90_000), Step::Back);
    let urls = nodes.iter().map(|(node, _)| node.url()).chain([plain.url()]);
    let pool = LockPool::connect(&Quorum::url_of(urls)).await.unwrap();
    let warnings = pool.health().await.unwrap().warnings;
    let apart = warnings.iter().find(|warning| warning.to_string().contains("apart"));
    let apart = apart.unwrap_or_else(|| panic!("{warnings:?}")).to_string();
    assert!(apart.contains(&format!("127.0.0.1:{}", nodes[1].0.port())), "{apart}");
    // A node refuses a number that is far ahead of its clock; the others are a majority.
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
}

/// A number that is too far ahead is refused, and the text names the clocks to check.
#[tokio::test]
async fn a_local_clock_that_is_far_from_a_majority_is_reported() {
    let nodes: Vec<_> = (0..2).map(|_| Skew::start(RedisServer::builder())).collect();
    let plain = RedisServer::start();
    for (_, skew) in &nodes {
        skew.step(ms(90_000), Step::Back);
    }
    let urls = nodes.iter().map(|(node, _)| node.url()).chain([plain.url()]);
    let pool = LockPool::builder(Quorum::url_of(urls)).wait(ms(300)).connect().await.unwrap();
    until_it_says(&pool, "k", |text| text.contains("ahead of a node's clock")).await;
    let warnings = pool.health().await.unwrap().warnings;
    let is_told = |warning: &&Warning| {
        warning.to_string().starts_with("the clock of this machine is 89.")
            || warning.to_string().starts_with("the clock of this machine is 90")
    };
    assert_eq!(warnings.iter().filter(is_told).count(), 1, "{warnings:?}");
    // This needs no number.
    let unfenced = pool.lock("k").fencing(false).wait(DEADLINE);
    unfenced.acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_replica_is_no_node() {
    let quorum = Quorum::start(3);
    let master = quorum[0].port().to_string();
    assert_eq!(quorum[1].cli(&["REPLICAOF", "127.0.0.1", &master]), "OK");
    let text = refusal(&quorum.url()).await;
    let says = format!("127.0.0.1:{} is a replica", quorum[1].port());
    assert!(text.contains(&says) && text.contains("redis+sentinel://"), "{text}");
    // A server that became one meanwhile is reported.
    assert_eq!(quorum[1].cli(&["REPLICAOF", "NO", "ONE"]), "OK");
    let pool = connect(&quorum).await;
    assert_eq!(quorum[1].cli(&["REPLICAOF", "127.0.0.1", &master]), "OK");
    let warnings = pool.health().await.unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.to_string().contains(&says)), "{warnings:?}");
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn masters_that_sentinels_know_are_nodes_too() {
    let watched = Watched::start();
    let quorum = Quorum::start(2);
    let url = Quorum::url_of(
        [watched.url()].into_iter().chain(quorum.nodes().iter().map(RedisServer::url)),
    );
    let pool = LockPool::builder(url).ttl(ms(2_000)).wait(DEADLINE).connect().await.unwrap();
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
    // Without one of the others it is in every majority.
    quorum[0].kill();
    let guard = pool.lock("k").acquire().await.unwrap();
    assert!(guard.fence().is_some());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_server_under_two_names_is_one_node() {
    let quorum = Quorum::start(2);
    let (a, b) = (quorum[0].port(), quorum[1].port());
    let text = refusal(&format!("redlock://127.0.0.1:{a},localhost:{a},127.0.0.1:{b}")).await;
    assert!(text.contains("are the same server"), "{text}");
}

#[tokio::test]
async fn a_node_that_comes_back_empty_is_taken_again_before_a_second_one_fails() {
    let trials = std::env::var("LOCK_TRIALS").map_or(8, |trials| trials.parse().unwrap());
    let quorum = Quorum::start(3);
    let holder = LockPool::builder(quorum.url()).ttl(ms(30_000)).connect().await.unwrap();
    let rival = connect(&quorum).await;
    for trial in 0..trials {
        let key = &*format!("trial:{trial}");
        // On two of three: the third is away until the lock is held.
        let (away, lost) = (trial % 3, (trial + 1) % 3);
        quorum[away].kill();
        let every = Renew::Every(ms(400));
        let guard = holder.lock(key).renew(every).acquire().await.unwrap();
        quorum[away].restart();
        eventually_async(DEADLINE, "the lock is held everywhere", async || {
            quorum.holders(key).len() == 3
        })
        .await;
        quorum[lost].restart();
        eventually_async(DEADLINE, "the lock is held everywhere again", async || {
            quorum.holders(key).len() == 3
        })
        .await;
        // A rival finds no majority, not even with the node that had lost the lock. It may not have noticed yet that
        // the nodes are back.
        match rival.lock(key).try_acquire().await {
            Ok(got) => assert!(got.is_none(), "trial {trial}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Backend, "trial {trial}"),
        }
        assert!(guard.is_held(), "trial {trial}");
        guard.release().await.unwrap();
        until_free(&quorum, key, "").await;
    }
}

#[tokio::test]
async fn fences_grow_from_grant_to_grant_whichever_nodes_vote() {
    let quorum = Quorum::start(3);
    let pools = [connect(&quorum).await, connect(&quorum).await];
    let mut last: Option<Fence> = None;
    for round in 0..30 {
        // Another minority each time, so that majorities share no more than one node.
        let away = &quorum[round % 3];
        away.pause();
        let guard = pools[round % 2].lock("k").wait(DEADLINE).acquire().await.unwrap();
        let fence = guard.fence();
        assert!(fence > last, "round {round}: {fence:?} after {last:?}");
        last = fence;
        guard.release().await.unwrap();
        away.resume();
    }
    until_free(&quorum, "k", "").await;
}

#[tokio::test]
async fn many_processes_take_turns_with_growing_fences() {
    const POOLS: usize = 4;
    const TURNS: usize = 25;
    let quorum = Quorum::start(5);
    let order = std::sync::Arc::new(std::sync::Mutex::new((false, Vec::new())));
    let mut set = JoinSet::new();
    for _ in 0..POOLS {
        let pool = LockPool::builder(quorum.url())
            .ttl(ms(5_000))
            .wait(Wait::Forever)
            .connect()
            .await
            .unwrap();
        let order = order.clone();
        set.spawn(async move {
            for _ in 0..TURNS {
                let guard = pool.lock("k").acquire().await.unwrap();
                {
                    let mut order = order.lock().unwrap();
                    assert!(!std::mem::replace(&mut order.0, true), "two at once");
                    order.1.push(guard.fence().unwrap());
                }
                tokio::task::yield_now().await;
                order.lock().unwrap().0 = false;
                guard.release().await.unwrap();
            }
        });
    }
    tokio::time::timeout(ms(180_000), set.join_all()).await.expect("every task is served");
    let fences = &order.lock().unwrap().1;
    assert_eq!(fences.len(), POOLS * TURNS);
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
}

#[tokio::test]
async fn a_waiter_is_woken_by_the_release() {
    let quorum = Quorum::start(3);
    let [holder, waiter] = [connect(&quorum).await, connect(&quorum).await];
    // A polling waiter sends its next request 200 to 800 ms after its last one.
    let mut took = Latency::below(ms(250), 5);
    while took.wants_more() {
        let guard = holder.lock("k").acquire().await.unwrap();
        let waiting = tokio::spawn(waiter.lock("k").wait(DEADLINE).acquire());
        // From its second request on the nodes notify it of changes.
        let asked = Cell::new(Instant::now());
        eventually_async(DEADLINE, "it waits", async || {
            let now = Instant::now();
            let waits = quorum.nodes().iter().all(|node| {
                let info = node.cli(&["INFO", "clients"]);
                let tracking = info.lines().find_map(|line| line.strip_prefix("tracking_clients:"));
                let keys = node.cli(&["INFO", "stats"]);
                let keys = keys.lines().find_map(|line| line.strip_prefix("tracking_total_keys:"));
                tracking.is_some_and(|count| count.trim() == "2")
                    && keys.is_some_and(|count| count.trim() != "0")
            });
            if !waits {
                asked.set(now);
            }
            waits
        })
        .await;
        guard.release().await.unwrap();
        let next = waiting.await.unwrap().unwrap();
        took.push(asked.get().elapsed());
        next.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_dropped_acquire_leaves_no_vote_behind() {
    let quorum = Quorum::start(3);
    let pool = connect(&quorum).await;
    lock_tests::poll::drop_at_every_poll(|| pool.lock("k").acquire(), async |_| {}).await;
    until_free(&quorum, "k", "").await;
    // The wait queue of this process is not blocked.
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_vote_that_comes_late_is_taken_back() {
    let quorum = Quorum::start(3);
    let proxies: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
    let url = Quorum::url_of(proxies.iter().map(|proxy| proxy.url().to_owned()));
    let pool = LockPool::builder(url).ttl(ms(30_000)).wait(Duration::ZERO).connect().await.unwrap();
    // Two requests are in flight for longer than any caller waits.
    for proxy in &proxies[..2] {
        proxy.hold(Direction::ToServer);
    }
    let error = pool.lock("k").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    assert!(error.to_string().contains("did not answer within"), "{error}");
    for proxy in &proxies[..2] {
        proxy.release_held();
    }
    until_free(&quorum, "k", "").await;
    let guard = pool.lock("k").wait(DEADLINE).acquire().await.unwrap();
    eventually_async(DEADLINE, "all nodes vote again", async || quorum.holders("k").len() == 3)
        .await;
    guard.release().await.unwrap();
}

#[tokio::test]
async fn several_locks_are_taken_together_or_not_at_all() {
    let quorum = Quorum::start(3);
    let pool = connect(&quorum).await;
    let other = connect(&quorum).await;
    let b = other.lock("b").acquire().await.unwrap();
    eventually_async(DEADLINE, "b is busy", async || {
        says_busy(pool.lock_all(["a", "b", "c"])).await
    })
    .await;
    until_free(&quorum, "a", "").await;
    let waiting = tokio::spawn(pool.lock_all(["a", "b", "c"]).wait(DEADLINE).acquire());
    b.release().await.unwrap();
    let all = waiting.await.unwrap().unwrap();
    eventually_async(DEADLINE, "c is busy", async || says_busy(other.lock("c")).await).await;
    all.release().await.unwrap();
}

#[tokio::test]
async fn a_lock_that_the_nodes_lost_is_lost() {
    let quorum = Quorum::start(3);
    let pool = connect(&quorum).await;
    let guard = pool.lock("k").acquire().await.unwrap();
    for node in &quorum.nodes()[..2] {
        node.cli(&["SET", "k", "stranger"]);
    }
    let loss = tokio::time::timeout(DEADLINE, guard.lost()).await.expect("the loss is noticed");
    assert_eq!(loss.kind(), ErrorKind::Lost);
    assert!(!guard.is_held());
    drop(guard);
    until_free(&quorum, "k", "stranger").await;
}

#[tokio::test]
async fn nothing_but_one_bounded_book_stays_in_the_nodes() {
    let quorum = Quorum::start(3);
    let pool = connect(&quorum).await;
    for n in 0..20 {
        pool.lock(format!("k:{n}")).acquire().await.unwrap().release().await.unwrap();
    }
    for node in quorum.nodes() {
        eventually_async(DEADLINE, "votes are taken back", async || {
            node.cli(&["KEYS", "*"]) == "lock_runtime:ballots"
                && node.cli(&["ZCARD", "lock_runtime:ballots"]) == "20"
        })
        .await;
        // A full ballot log forgets its least entry, and the floor replaces it.
        for thousand in 0..100 {
            node.cli(&[
                "EVAL",
                "for n = 1, 1000 do local m = ARGV[1] * 1000 + n redis.call('ZADD', KEYS[1], m, 'old:' .. m) end",
                "1",
                "lock_runtime:ballots",
                &thousand.to_string(),
            ]);
        }
    }
    pool.lock("k:20").acquire().await.unwrap().release().await.unwrap();
    for node in quorum.nodes() {
        let floor = || node.cli(&["ZSCORE", "lock_runtime:ballots", ""]);
        eventually_async(DEADLINE, "the floor is there", async || floor() != "(nil)").await;
        let floor: f64 = floor().parse().unwrap();
        let least = node.cli(&["ZRANGE", "lock_runtime:ballots", "0", "1", "WITHSCORES"]);
        let least: f64 = least.lines().last().unwrap().parse().unwrap();
        assert!(floor >= 1.0 && floor <= least, "{floor} {least}");
    }
}

const SCRIPT: &str = include_str!("../../lock-runtime/src/backend/redis/quorum/ballot.lua");

/// One node by hand: its server, how many free locks its ballot log has at most, and the digest of its script.
struct Node(RedisServer, &'static str, String);

impl Node {
    /// With a ballot log of eight entries, for held and free locks.
    fn start() -> Self {
        let server = RedisServer::start();
        let digest = server.cli(&["SCRIPT", "LOAD", SCRIPT]);
        Self(server, "8", digest)
    }

    /// About the lock `k`.
    fn ask(&self, what: &str, owner: &str, number: u64) -> String {
        self.ask_about("k", what, owner, number)
    }

    fn ask_about(&self, lock: &str, what: &str, owner: &str, number: u64) -> String {
        self.ask_about_all(&[lock], what, owner, number)
    }

    fn ask_about_all(&self, locks: &[&str], what: &str, owner: &str, number: u64) -> String {
        let ttl = if matches!(what, "release" | "withdraw") { "0" } else { "60000" };
        self.ask_for(ttl, locks, what, owner, number)
    }

    fn ask_for(&self, ttl: &str, locks: &[&str], what: &str, owner: &str, number: u64) -> String {
        // Hex digits of one length, like an owner token.
        let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
        // A text about the owner stands behind the number of the attempt.
        let (owner, text) = owner.split_once('@').unwrap_or((owner, ""));
        let (token, number) = (format!("{:0>32}/01{}", hex(owner), hex(text)), number.to_string());
        let (count, keys) = (locks.len().to_string(), (locks.len() + 1).to_string());
        // A ballot log of eight entries.
        let (most, spare) = ("8", self.1);
        let arguments = ["book", what, &token, ttl, &count, &number, &number, most, spare];
        self.0.cli(&[&["EVALSHA", &self.2, &keys], locks, &arguments].concat())
    }

    /// With a ballot log of eight entries, or of 64 entries of held locks.
    fn ask_sparing(&self, lock: &str, what: &str, number: u64) -> String {
        let token = format!("{number:032x}/01");
        let ttl = if what == "release" { "0" } else { "60000" };
        let number = number.to_string();
        let arguments = ["1", &number, &number, "64", "8"];
        self.0.cli(
            &[&["EVALSHA", &self.2, "2", lock, "book", what, &token, ttl], &arguments[..]].concat(),
        )
    }

    /// The node votes 50 for `owner` and forgets it; then `rival` gets its vote.
    fn with_vote_of_rival() -> Self {
        let node = Self::start();
        assert_eq!(node.ask("propose", "owner", 50), "1");
        node.0.cli(&["DEL", "k"]);
        assert_eq!(node.ask("propose", "rival", 100), "1");
        assert_eq!(node.ask("extend", "owner", 50), "0", "held by another owner");
        node
    }
}

#[test]
fn a_vote_that_came_to_nothing_keeps_no_renewal_away_and_is_not_taken_again() {
    let node = Node::with_vote_of_rival();
    assert_eq!(node.ask("propose", "rival", 110), "1", "a second round");
    assert_eq!(node.ask("withdraw", "rival", 110), "1");
    let late = node.ask("propose", "rival", 110);
    assert_eq!(late.lines().next(), Some("2"), "{late}");
    assert_eq!(node.ask("extend", "owner", 50), "2");
    // Nor does the next failed proposal.
    assert_eq!(node.ask("withdraw", "other", 120), "0");
    node.0.cli(&["DEL", "k"]);
    assert_eq!(node.ask("propose", "other", 120).lines().next(), Some("2"));
    assert_eq!(node.ask("extend", "owner", 50), "2");
    assert_eq!(node.ask("release", "owner", 50), "1");
    assert_eq!(node.ask("extend", "owner", 50), "0");
}

#[test]
fn a_vote_that_may_have_come_to_something_keeps_renewals_away() {
    let node = Node::with_vote_of_rival();
    node.0.cli(&["DEL", "k"]);
    assert_eq!(node.ask("extend", "owner", 50), "0", "it was not taken back");
    let node = Node::with_vote_of_rival();
    assert_eq!(node.ask("release", "rival", 100), "1");
    assert_eq!(node.ask("extend", "owner", 50), "0", "it was a grant");
}

#[test]
fn a_release_counts_also_on_a_node_that_voted_for_another_owner() {
    let node = Node::with_vote_of_rival();
    assert_eq!(node.ask("release", "owner", 50), "0");
    assert_eq!(node.ask("withdraw", "rival", 100), "1");
    assert_eq!(node.ask("extend", "owner", 50), "0");
}

/// A process of an older version, or without `owner_info`, has no text. Whichever of the two has one, the number in a stored vote
/// is raised by the release of another owner.
#[test]
fn a_text_about_the_owner_changes_no_rule_of_a_node() {
    let text = "@web-7/4711 src/my orders#1.rs:42";
    for [owner, rival] in [["owner", ""], ["", "rival"], ["owner", "rival"]] {
        let with_text =
            |name: &str, told: &str| format!("{name}{}", if told.is_empty() { "" } else { text });
        let (owner, rival) = (with_text("owner", owner), with_text("rival", rival));
        let node = Node::start();
        assert_eq!(node.ask("propose", &owner, 50), "1");
        assert_eq!(node.ask("propose", &rival, 100).lines().next(), Some("0"), "{owner} {rival}");
        assert_eq!(node.ask("extend", &rival, 100), "0");
        assert_eq!(node.ask("extend", &owner, 50), "1");
        node.0.cli(&["DEL", "k"]);
        assert_eq!(node.ask("propose", &rival, 100), "1");
        assert_eq!(node.ask("propose", &rival, 100), "1", "the same request again");
        assert_eq!(node.ask("propose", &rival, 110), "1", "the next round");
        assert_eq!(node.ask("extend", &owner, 50), "0");
        assert_eq!(node.ask("release", &owner, 50), "0");
        let vote = node.0.cli(&["GET", "k"]);
        assert!(vote.ends_with("#110#51"), "the release is noted in the vote: {vote}");
        assert_eq!(node.ask("withdraw", &rival, 110), "1");
        assert_eq!(node.ask("extend", &owner, 50), "0", "{owner} {rival}");
    }
}

/// A pool without `owner_info` sends what a process of an older version sends.
#[tokio::test]
async fn pools_with_and_without_a_text_exclude_each_other() {
    let quorum = Quorum::start(5);
    let connect = |tells: bool| {
        let builder = LockPool::builder(quorum.url()).owner_info(tells).ttl(ms(20_000));
        builder.wait(Wait::Forever).connect()
    };
    let (silent, telling) = (connect(false).await.unwrap(), connect(true).await.unwrap());
    for fencing in [false, true] {
        for [one, other] in [[&silent, &telling], [&telling, &silent]] {
            let guard = one.lock("k").fencing(fencing).renew(ms(300)).acquire().await.unwrap();
            let info = other.inspect("k").await.unwrap().holder.unwrap().info;
            assert_eq!(info.is_some(), std::ptr::eq(one, &telling));
            eventually_async(DEADLINE, "the lock is held by another owner", async || {
                says_busy(other.lock("k").fencing(fencing)).await
            })
            .await;
            guard.verify().await.unwrap();
            // A node that has lost the vote has it again, with its text.
            quorum[0].cli(&["DEL", "k"]);
            eventually_async(DEADLINE, "the vote is restored", async || {
                quorum.holders("k").len() == 5
            })
            .await;
            let votes = quorum.nodes().iter().map(|node| node.cli(&["GET", "k"]));
            let tokens = votes.map(|vote| vote.split('#').next().unwrap().to_owned());
            let tokens: HashSet<_> = tokens.collect();
            assert_eq!(tokens.len(), 1, "{tokens:?}");
            let waiting = acquire_in_task(other, "k");
            guard.release().await.unwrap();
            joined("the next", waiting).await.1.release().await.unwrap();
        }
    }
}

#[test]
fn what_is_promised_outlives_its_place_in_the_book() {
    let node = Node::start();
    let ask = |lock: &str, what: &str, number: u64| node.ask_about(lock, what, "f00", number);
    let grant = |lock: &str, number: u64| {
        assert_eq!(ask(lock, "propose", number), "1");
        assert_eq!(ask(lock, "release", number), "1");
    };
    for n in 1..10 {
        grant(&format!("old:{n}"), 10 * n);
    }
    // Votes from before the floor rises.
    for (lock, number) in [("c", 110), ("d", 111)] {
        assert_eq!(ask(lock, "propose", number), "1");
    }
    grant("k", 105);
    for (lock, number) in [("x", 200), ("y", 201), ("z", 202)] {
        grant(lock, number);
    }
    for lock in ["x", "y"] {
        assert_eq!(ask(lock, "propose", 210), "1");
        assert_eq!(ask(lock, "withdraw", 210), "1");
    }
    assert_eq!(node.0.cli(&["ZSCORE", "book", "k"]), "(nil)", "it has been forgotten");
    assert_eq!(ask("k", "propose", 104).lines().next(), Some("2"));
    // Room in the ballot log for two entries below the floor.
    for (lock, number) in [("x", 220), ("y", 221)] {
        assert_eq!(ask(lock, "propose", number), "1");
    }
    for (lock, number) in [("c", 110), ("d", 111)] {
        assert_eq!(ask(lock, "withdraw", number), "1");
    }
    assert_eq!(ask("n", "propose", 230), "1");
    let late = ask("k", "propose", 104);
    assert_eq!(late.lines().next(), Some("2"), "{late}: 105 has been granted");
}

#[test]
fn a_book_of_a_slot_forgets_locks_that_are_not_held_before_those_that_are() {
    let node = Node::start();
    for number in 100..120 {
        assert_eq!(node.ask_sparing(&format!("held:{number}"), "propose", number), "1");
    }
    for number in 200..500 {
        let lock = format!("free:{number}");
        assert_eq!(node.ask_sparing(&lock, "propose", number), "1");
        assert_eq!(node.ask_sparing(&lock, "release", number), "1");
    }
    let entries: usize = node.0.cli(&["ZCARD", "book"]).parse().unwrap();
    assert!((21..=29).contains(&entries), "{entries}: 20 are held");
    // The promise of a forgotten entry holds all the same.
    let late = node.ask_sparing("free:210", "propose", 210);
    assert_eq!(late.lines().next(), Some("2"), "{late}");
    // A held lock is taken again on a node that has lost it.
    for number in 100..120 {
        node.0.cli(&["DEL", &format!("held:{number}")]);
        assert_eq!(node.ask_sparing(&format!("held:{number}"), "extend", number), "2");
    }
}

/// A request with a shorter lease time arrives late, or is sent again: the same owner has extended its lease for longer since.
#[test]
fn a_late_request_does_not_shorten_a_lease() {
    for number in [0, 50] {
        let node = Node::start();
        let ask = |ttl: &str, what: &str| node.ask_for(ttl, &["k"], what, "owner", number);
        let left = || node.0.cli(&["PTTL", "k"]).parse::<i64>().unwrap();
        assert_eq!(ask("1000", "propose"), "1");
        assert_eq!(ask("90000", "extend"), "1");
        for lost_the_lock in [false, true] {
            if lost_the_lock {
                node.0.cli(&["DEL", "k"]);
                assert_eq!(ask("90000", "extend"), "2");
            }
            for what in ["propose", "extend", "keep"] {
                assert_eq!(ask("1000", what), "1");
                assert!(left() > 30_000, "{} after {what}, number {number}", left());
            }
        }
    }
}

#[test]
fn a_lock_kept_for_its_min_hold_cannot_be_extended() {
    let node = Node::start();
    let ask = |what: &str| node.ask_for("60000", &["k"], what, "owner", 50);
    assert_eq!(ask("propose"), "1");
    let release = || node.ask_for("5000", &["k"], "release", "owner", 50);
    assert_eq!(release(), "1");
    let left = || node.0.cli(&["PTTL", "k"]).parse::<i64>().unwrap();
    assert!((1..=5_000).contains(&left()), "{}", left());
    assert_eq!(release(), "1", "said twice");
    assert_eq!(ask("extend"), "0");
    assert_eq!(ask("propose").lines().next(), Some("0"));
    assert!((1..=5_000).contains(&left()), "{}", left());
}

#[test]
fn a_release_leaves_what_others_have_written_as_it_is() {
    let node = Node::start();
    for foreign in ["worker-7#42", "worker#7#42"] {
        node.0.cli(&["SET", "k", foreign]);
        assert_eq!(node.ask("release", "owner", 50), "0");
        assert_eq!(node.0.cli(&["GET", "k"]), foreign);
    }
}

/// A proposal of a clock that is far ahead is refused, and blocks no other owner.
#[test]
fn a_number_that_was_refused_is_not_promised_by_its_withdrawal() {
    let node = Node::start();
    let now = || node.0.cli(&["TIME"]).lines().next().unwrap().parse::<u64>().unwrap() * 1_000_000;
    let wild = now() + 7_200_000_000;
    assert_eq!(node.ask("propose", "wild", wild).lines().next(), Some("3"));
    assert_eq!(node.ask("withdraw", "wild", wild), "0");
    assert_eq!(node.ask("propose", "wild", wild).lines().next(), Some("3"));
    let promised: f64 = node.0.cli(&["ZSCORE", "book", "k"]).parse().unwrap();
    assert!(promised < (now() + 62_000_000) as f64, "{promised}");
}

/// A client of a node, as the node can observe it.
struct Attempt {
    owner: String,
    locks: Vec<&'static str>,
    /// The numbers of its rounds.
    numbers: Vec<u64>,
    /// Whether other nodes grant it.
    is_granted: bool,
    is_decided: bool,
    has_ended: bool,
}

impl Attempt {
    fn number(&self) -> u64 {
        *self.numbers.last().unwrap()
    }
}

#[test]
fn a_node_keeps_its_promises_in_the_first_histories() {
    keeps_its_promises(0..100);
}

#[test]
fn a_node_keeps_its_promises_in_the_next_histories() {
    keeps_its_promises(100..200);
}

#[test]
fn a_node_keeps_its_promises_in_the_last_histories() {
    keeps_its_promises(200..300);
}

/// Messages arrive in any order and any number of times, at a node with a very small ballot log: promises hold, and no
/// renewal takes a lock that a newer owner may have been granted.
fn keeps_its_promises(seeds: Range<u64>) {
    const LOCKS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let mut node = Node::start();
    let mut accepted_numbers = 0;
    for seed in seeds {
        let mut state = seed;
        // SplitMix64.
        let mut below = |limit: u64| {
            state = u64::wrapping_add(state, 0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % limit
        };
        // In half of the histories held locks stay longer in the ballot log.
        node.1 = if seed % 2 == 0 { "8" } else { "4" };
        node.0.cli(&["FLUSHALL"]);
        let mut attempts: Vec<Attempt> = Vec::new();
        let mut promised: HashMap<&str, u64> = HashMap::new();
        let mut accepted: HashMap<&str, Vec<(u64, usize, bool)>> = HashMap::new();
        for clock in 50..180 {
            let about = |below: u64| format!("seed {seed}, step {clock}, {below}");
            if attempts.is_empty() || below(10) < 3 {
                let first = below(8) as usize;
                let count = 1 + usize::from(below(4) == 0);
                attempts.push(Attempt {
                    owner: format!("owner{clock}"),
                    locks: LOCKS.into_iter().cycle().skip(first).take(count).collect(),
                    // Of a client with a slow clock.
                    numbers: vec![clock - below(40)],
                    is_granted: below(2) == 0,
                    is_decided: false,
                    has_ended: false,
                });
            }
            let at = below(attempts.len() as u64) as usize;
            let number = attempts[at].number().max(clock - below(40)) + 1;
            let attempt = &mut attempts[at];
            let ask = |what: &str, attempt: &Attempt, number: u64| {
                node.ask_about_all(&attempt.locks, what, &attempt.owner, number)
            };
            match below(6) {
                step @ 0..3 => {
                    if step == 0 && !attempt.is_decided {
                        attempt.numbers.push(number);
                    }
                    // Perhaps a late copy of an earlier round.
                    let rounds = attempt.numbers.len();
                    let late = usize::from(below(4) == 0);
                    let number = attempt.numbers[(rounds - 1).saturating_sub(late)];
                    let before: Vec<_> =
                        attempt.locks.iter().map(|lock| node.0.cli(&["GET", lock])).collect();
                    if ask("propose", attempt, number) == "1" {
                        assert!(!attempt.has_ended, "{}: taken after its end", about(number));
                        let again = format!("#{number}#");
                        if !before.iter().all(|held| held.contains(&again)) {
                            for lock in &attempt.locks {
                                let promised = promised.entry(lock).or_default();
                                assert!(number > *promised, "{}: low", about(number));
                                *promised = number;
                                let accepted = accepted.entry(lock).or_default();
                                accepted.push((number, at, attempt.is_granted));
                                accepted_numbers += 1;
                            }
                        }
                    }
                }
                3 if attempt.is_granted => {
                    attempt.is_decided = true;
                    let number = attempt.number();
                    let missing: Vec<_> = attempt
                        .locks
                        .iter()
                        .filter(|lock| node.0.cli(&["EXISTS", lock]) == "0")
                        .collect();
                    if ask("extend", attempt, number) != "0" {
                        assert!(!attempt.has_ended, "{}: extended after its end", about(number));
                        for lock in missing {
                            let newer = accepted.entry(lock).or_default();
                            let is_newer = |(other, by, is_granted): &(u64, usize, bool)| {
                                *other > number && *by != at && *is_granted
                            };
                            assert!(!newer.iter().any(is_newer), "{}: re-taken", about(number));
                            newer.push((number, at, true));
                        }
                    }
                }
                4 => {
                    (attempt.is_decided, attempt.has_ended) = (true, true);
                    let what = if attempt.is_granted { "release" } else { "withdraw" };
                    ask(what, attempt, attempt.number());
                    for lock in &attempt.locks {
                        let promised = promised.entry(lock).or_default();
                        *promised = attempt.number().max(*promised);
                    }
                }
                _ => {
                    node.0.cli(&["DEL", attempt.locks[0]]);
                }
            }
        }
    }
    assert!(accepted_numbers > 300, "{accepted_numbers}");
}

/// Nodes that answer later than others.
struct Far {
    proxies: Vec<FaultProxy>,
    pool: LockPool,
}

async fn far(quorum: &Quorum, ttl: Duration, delay: Duration) -> Far {
    let proxies: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
    let url = Quorum::url_of(proxies.iter().map(|proxy| proxy.url().to_owned()));
    let pool = LockPool::builder(url).ttl(ttl).node_timeout(ms(900)).connect().await.unwrap();
    for proxy in &proxies {
        proxy.delay(Direction::ToClient, delay);
    }
    Far { proxies, pool }
}

/// A waiter gives up while its grant is in flight, and `next` gets its own settings.
async fn gives_up_to<T>(
    quorum: &Quorum,
    far: &Far,
    first: LockRequest,
    next: impl Future<Output = T> + Send + 'static,
    meanwhile: impl AsyncFnOnce(),
) -> T
where
    T: Send + 'static,
{
    let holder = LockPool::connect(&quorum.url()).await.unwrap();
    let guard = holder.lock("k").acquire().await.unwrap();
    let first = tokio::spawn(first.acquire());
    eventually_async(DEADLINE, "it sends a request", async || far.proxies[0].commands() > 5).await;
    let next = tokio::spawn(next);
    guard.release().await.unwrap();
    eventually_async(DEADLINE, "the nodes have voted for it", async || {
        quorum.holders("k").len() == 3
    })
    .await;
    first.abort();
    // A grant that was quicker is given back.
    drop(first.await);
    meanwhile().await;
    tokio::time::timeout(ms(20_000), next).await.expect("the next one is served").unwrap()
}

#[tokio::test]
async fn a_successor_of_a_grant_has_the_fence_that_it_needs() {
    let quorum = Quorum::start(3);
    let far = far(&quorum, ms(30_000), ms(300)).await;
    let first = far.pool.lock("k").fencing(false).wait(Wait::Forever);
    let next = far.pool.lock("k").fencing(true).wait(Wait::Forever).acquire();
    let guard = gives_up_to(&quorum, &far, first, next, async || {}).await.unwrap();
    assert!(guard.fence().is_some(), "{guard:?}");
}

#[tokio::test]
async fn a_successor_of_an_expired_grant_is_served() {
    let quorum = Quorum::start(3);
    let far = far(&quorum, ms(1_000), ms(100)).await;
    let first = far.pool.lock("k").ttl(ms(1_100)).wait(Wait::Forever);
    let next = far.pool.lock("k").wait(Wait::Forever).acquire();
    let away = async || {
        for proxy in &far.proxies {
            proxy.hold(Direction::ToServer);
        }
        eventually_async(DEADLINE, "the nodes forget it", async || quorum.holders("k").is_empty())
            .await;
        for proxy in &far.proxies {
            proxy.release_held();
        }
    };
    gives_up_to(&quorum, &far, first, next, away).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_number_far_ahead_spoils_one_lock_and_no_other() {
    let quorum = Quorum::start(3);
    let pool =
        LockPool::builder(quorum.url()).ttl(ms(2_000)).wait(ms(300)).connect().await.unwrap();
    let now: u64 = quorum[0].cli(&["TIME"]).lines().next().unwrap().parse().unwrap();
    let wild = ((now + 7_200) * 1_000_000).to_string();
    for node in quorum.nodes() {
        node.cli(&["ZADD", "lock_runtime:ballots", &wild, "bad"]);
    }
    until_it_says(&pool, "bad", |text| text.contains("ahead of this machine's clock")).await;
    pool.lock("good").wait(DEADLINE).acquire().await.unwrap().release().await.unwrap();
    // Without a fence no number is needed.
    let unfenced = pool.lock("bad").fencing(false).wait(DEADLINE);
    unfenced.acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_messages_to_a_dead_node_share_one_task() {
    let quorum = Quorum::start(3);
    let builder = LockPool::builder(quorum.url()).ttl(ms(60_000)).on_current_runtime();
    let pool = builder.connect().await.unwrap();
    quorum[2].kill();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for n in 0..1_000 {
        pool.lock(format!("k:{n}")).acquire().await.unwrap().release().await.unwrap();
    }
    eventually_async(DEADLINE, "the tasks are done", async || tasks() < before + 20).await;
    quorum[2].restart();
    pool.lock("k").acquire().await.unwrap().release().await.unwrap();
    until_free(&quorum, "k", "").await;
}

#[tokio::test]
async fn a_release_that_a_majority_answers_late_is_no_loss() {
    let quorum = Quorum::start(3);
    let pool = LockPool::builder(quorum.url()).ttl(ms(30_000)).connect().await.unwrap();
    let guard = pool.lock("k").acquire().await.unwrap();
    eventually_async(DEADLINE, "held everywhere", async || quorum.holders("k").len() == 3).await;
    for node in &quorum.nodes()[..2] {
        node.pause();
    }
    let began = Instant::now();
    let release = tokio::spawn(guard.release());
    // Longer than one try waits for a majority.
    eventually_async(DEADLINE, "it tries again", async || began.elapsed() > ms(850)).await;
    for node in &quorum.nodes()[..2] {
        node.resume();
    }
    release.await.unwrap().unwrap();
}

#[tokio::test]
async fn of_three_that_try_at_once_one_gets_the_free_lock() {
    simultaneous_tries(&Quorum::start(3), 3, |key| vec![key.to_owned()], || {}).await;
}

#[tokio::test]
async fn of_three_that_try_at_once_one_gets_two_free_keys() {
    let keys = |key: &str| vec![format!("{key}:a"), format!("{key}:b")];
    simultaneous_tries(&Quorum::start(3), 3, keys, || {}).await;
}

/// Each of the two nodes that are up votes for another one, and the third could make a majority for either.
#[tokio::test]
async fn of_two_that_try_at_once_with_a_node_down_one_gets_the_free_lock() {
    let quorum = Quorum::start(3);
    let kill = || quorum.nodes()[2].kill();
    simultaneous_tries(&quorum, 2, |key| vec![key.to_owned()], kill).await;
}

#[tokio::test]
async fn a_waiter_with_a_competitor_has_a_conflict_while_a_node_is_dead() {
    has_a_conflict_after(|quorum| quorum[0].kill()).await;
}

/// Such a node may vote later.
#[tokio::test]
async fn a_waiter_with_a_competitor_has_a_conflict_while_a_node_is_frozen() {
    has_a_conflict_after(|quorum| quorum[0].pause()).await;
}

/// A competitor has the vote of one of the two other nodes.
async fn has_a_conflict_after(fault: impl FnOnce(&Quorum)) {
    let quorum = Quorum::start(3);
    let pool = connect(&quorum).await;
    fault(&quorum);
    quorum[1].cli(&["SET", "k", "other"]);
    // The other two answer late on a busy machine, and then no majority answers.
    eventually_async(DEADLINE, "the wait ends with a conflict", async || {
        let mut kinds = Vec::new();
        for fencing in [true, false] {
            let error = pool.lock("k").fencing(fencing).wait(ms(300)).acquire().await.unwrap_err();
            println!("{error}");
            kinds.push(error.kind());
        }
        kinds == [ErrorKind::Conflict; 2]
    })
    .await;
    quorum[1].cli(&["DEL", "k"]);
    let guard = pool.lock("k").wait(DEADLINE).acquire().await.unwrap();
    guard.release().await.unwrap();
}

/// The nodes do not tell the process of waiters.
#[tokio::test]
async fn a_lock_that_lingers_again_and_again_is_left_to_others_at_times() {
    let quorum = Quorum::start(3);
    let (lingering, other) = (connect(&quorum).await, connect(&quorum).await);
    let calls = tokio::spawn(async move {
        loop {
            let request = lingering.lock("k").fencing(false).linger(ms(200)).wait(Wait::Forever);
            request.run(tokio::time::sleep(ms(2))).await.unwrap();
            tokio::time::sleep(ms(10)).await;
        }
    });
    for _ in 0..3 {
        let guard = other.lock("k").wait(DEADLINE).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    assert!(!calls.is_finished());
    calls.abort();
}

/// A renewal restores a lock without a fence where it is missing, so it stays taken, but no longer than before.
#[tokio::test]
async fn a_lock_without_a_fence_that_is_released_by_force_ends_with_its_lease() {
    let quorum = Quorum::start(3);
    let (holding, admin) = (connect(&quorum).await, connect(&quorum).await);
    let guard = holding.lock("k").ttl(ms(4_000)).fencing(false).acquire().await.unwrap();
    let holder = admin.inspect("k").await.unwrap().holder.unwrap();
    assert!(admin.force_release("k", &holder).await.unwrap());
    for node in quorum.nodes() {
        let left: u64 = node.cli(&["PTTL", "k"]).parse().expect("it stays taken");
        assert!(left <= 4_000, "{left}");
    }
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    let next = admin.lock("k").wait(DEADLINE).acquire().await.unwrap();
    assert!(!admin.force_release("k", &holder).await.unwrap(), "it has another owner");
    next.verify().await.unwrap();
    next.release().await.unwrap();
}

/// Nodes accept no number that is a minute ahead of their clock.
#[tokio::test]
async fn locks_that_are_released_by_force_again_and_again_have_numbers_of_the_clock() {
    let quorum = Quorum::start(3);
    let (holding, admin) = (connect(&quorum).await, connect(&quorum).await);
    let mut last = None;
    for _ in 0..70 {
        let guard = holding.lock("k").wait(DEADLINE).acquire().await.unwrap();
        assert!(guard.fence() > last);
        last = guard.fence();
        let holder = admin.inspect("k").await.unwrap().holder.unwrap();
        assert!(admin.force_release("k", &holder).await.unwrap());
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let ahead = u128::from(last.unwrap().get()).saturating_sub(now.as_micros());
    assert!(ahead < 1_000_000, "{ahead} us ahead");
}

/// `count` pools, each with a node that is nearer than the others, and `meanwhile` once they are connected.
async fn simultaneous_tries(
    quorum: &Quorum,
    count: usize,
    keys: impl Fn(&str) -> Vec<String>,
    meanwhile: impl FnOnce(),
) {
    let (mut pools, mut wires) = (Vec::new(), Vec::new());
    for near in 0..count {
        let proxies: Vec<_> = quorum.nodes().iter().map(FaultProxy::start).collect();
        let url = Quorum::url_of(proxies.iter().map(|proxy| proxy.url().to_owned()));
        let pool = LockPool::connect(&url).await.unwrap();
        pool.lock("warm").acquire().await.unwrap().release().await.unwrap();
        for (at, proxy) in proxies.iter().enumerate() {
            if at != near {
                proxy.delay(Direction::ToServer, ms(8));
            }
        }
        pools.push(pool);
        wires.push(proxies);
    }
    meanwhile();
    let (mut won, mut trial) = (0, 0);
    // Three that back off three times each may still meet every time, on a busy machine more often.
    while won < 7 {
        trial += 1;
        assert!(trial <= 40, "a try got the free lock in {won} of 40 trials");
        let keys = keys(&format!("job:{trial}"));
        let try_it = |pool: &LockPool| tokio::spawn(pool.lock_all(keys.clone()).try_acquire());
        let tries: Vec<_> = pools.iter().map(try_it).collect();
        let mut guards = Vec::new();
        for one in tries {
            match one.await.unwrap() {
                Ok(guard) => guards.extend(guard),
                // A node may be late on a busy machine.
                Err(error) => assert!(error.is_backend(), "{error}"),
            }
        }
        assert!(guards.len() < 2);
        won += guards.len();
    }
}

#[tokio::test]
async fn a_refused_try_leaves_no_vote_behind_at_a_shutdown() {
    for fencing in [true, false] {
        let quorum = Quorum::start(3);
        for node in &quorum.nodes()[..2] {
            node.cli(&["SET", "k", "other"]);
        }
        let far = far(&quorum, ms(30_000), ms(20)).await;
        assert!(far.pool.lock("k").fencing(fencing).try_acquire().await.unwrap().is_none());
        far.pool.shutdown(ms(1_000)).await;
        until_free(&quorum, "k", "other").await;
    }
}
