//! Pushes of the server: a lock that is taken away, or freed outside the wait queue, is noticed at once by waiters
//! and by its holder. No storm of losses makes two valid leases.
//!
//! A second pool stands for another process.

#![allow(clippy::disallowed_methods)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::wait_queue::connect;
use lock_runtime::{Fence, LockGuard, LockPool, Wait};
use lock_tests::history::{FenceFault, History, Recorder, now_ns};
use lock_tests::monitor::{Caller, Ran};
use lock_tests::prelude::*;
use lock_tests::{FaultProxy, Latency, Monitor, RedisServer, eventually_async};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// No test waits as long, so that no ttl hides an unnoticed loss.
const TTL: Duration = ms(20_000);
/// The limit of a third of all rounds. Less than any polling interval.
const PROMPT: Duration = ms(50);
const KEY: &str = "k";

/// A waiter watches the key a moment after it was queued.
async fn until_watched(server: &RedisServer) {
    eventually_async(DEADLINE, "the key is watched", async || {
        let info = server.cli(&["INFO", "stats"]);
        !info.contains("tracking_total_keys:0")
    })
    .await;
}

/// Less than the interval of the polls of the first waiters in a queue.
const LESS_THAN_A_POLL: Duration = ms(280);

fn is_of_a_waiter(ran: &Ran) -> bool {
    ran.by != Caller::Script && ran.args.iter().any(|arg| arg == "claim")
}

/// Waits for one more request of a waiter, so that the next poll is far.
async fn until_polled(monitor: &Monitor<'_>) {
    let polls = || monitor.lines().iter().filter(|ran| is_of_a_waiter(ran)).count();
    let before = polls();
    eventually_async(DEADLINE, "the waiter polls", async || polls() > before).await;
}

/// The span between the requests of a waiter before and after the deletion of the lock, by the clock of the server. It is
/// as long as an interval if nothing but a poll notices the deletion, on a machine of any speed.
fn span_around_the_deletion(lines: &[Ran]) -> Duration {
    let deleted = lines.iter().position(|ran| ran.by != Caller::Script && ran.is("DEL", KEY));
    let (before, after) = lines.split_at(deleted.expect("the lock was deleted"));
    let last = before.iter().rfind(|ran| is_of_a_waiter(ran)).expect("there is a waiter");
    let next = after.iter().find(|ran| is_of_a_waiter(ran)).expect("the waiter requests it");
    Duration::from_micros(next.time_us.saturating_sub(last.time_us))
}

/// The time when `guard` is known to be lost.
fn watch(guard: LockGuard) -> JoinHandle<Instant> {
    tokio::spawn(async move {
        guard.lost().await;
        Instant::now()
    })
}

mod taken_away {
    use super::*;

    #[tokio::test]
    async fn a_deleted_lock_goes_to_the_waiter_and_its_holder_is_notified() {
        let server = RedisServer::start();
        let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
        let limit = LESS_THAN_A_POLL;
        let (mut entered, mut told) = (Latency::below(limit, 2), Latency::below(limit, 2));
        while entered.wants_more() || told.wants_more() {
            // The first renewal makes the server watch the key; the next one comes late.
            let guard = ours.lock(KEY).renew(ms(1_400)).acquire().await.unwrap();
            let monitor = Monitor::start(&server);
            monitor.wait_for(DEADLINE, |ran| ran.is("PEXPIRE", KEY));
            let next = acquire_in_task(&theirs, KEY);
            until_queued(&server, KEY, 1).await;
            let loss = watch(guard);
            // After recent waiters, a lock is watched from the second poll on.
            until_polled(&monitor).await;
            until_polled(&monitor).await;
            let deleted = Instant::now();
            server.cli(&["DEL", KEY]);
            let guard = joined("the waiter", next).await.1;
            told.push(joined("the holder is notified", loss).await - deleted);
            guard.release().await.unwrap();
            entered.push(span_around_the_deletion(&monitor.settled()));
        }
        println!(
            "DEL of a held lock: requested again after {entered}, the holder notified: {told}"
        );
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn a_flushed_server_notifies_holders_and_waiters_of_every_lock() {
        const LOCKS: usize = 5;
        let server = RedisServer::start();
        let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
        let (mut all_in, mut all_told) = (Latency::below(NOISE, 3), Latency::below(NOISE, 3));
        while all_in.wants_more() || all_told.wants_more() {
            let (mut held, mut waiting) = (Vec::new(), Vec::new());
            for n in 0..LOCKS {
                let key = &*format!("k{n}");
                held.push(ours.lock(key).acquire().await.unwrap());
                for _ in 0..2 {
                    waiting.push(acquire_in_task(&theirs, key));
                }
                until_queued(&server, key, 1).await;
            }
            let told: Vec<_> = held.into_iter().map(watch).collect();
            sleep(ms(20)).await;
            let flushed = Instant::now();
            server.cli(&["FLUSHALL"]);
            let (mut entered, mut lost) = (Duration::ZERO, Duration::ZERO);
            for told in told {
                lost = lost.max(joined("a holder is notified", told).await - flushed);
            }
            for next in waiting {
                let (got, guard) = joined("the waiter", next).await;
                entered = entered.max(got - flushed);
                guard.release().await.unwrap();
            }
            all_in.push(entered);
            all_told.push(lost);
        }
        println!("FLUSHALL: all in after {all_in}, all notified after {all_told}");
        until_nothing_is_left(&server).await;
    }

    /// A repeated or wrong message costs a request and nothing else.
    #[tokio::test]
    async fn false_alarms_are_harmless() {
        let server = RedisServer::start();
        let (ours, theirs) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = ours.lock(KEY).acquire().await.unwrap();
        let next = acquire_in_task(&theirs, KEY);
        until_queued(&server, KEY, 1).await;
        let token = server.cli(&["GET", KEY]);
        let waiting = server.cli(&["ZRANGE", "k:lock_runtime:line", "0", "-1"]);
        let channel = |token: &str| format!("lock_runtime:{}", &token[33..45]);
        let (holders, waiters) = (channel(&token), channel(&waiting));
        let (owner, other) = (&waiting[..32], "0".repeat(32));
        let monitor = Monitor::start(&server);
        for n in 0..100 {
            server.cli(&["PEXPIRE", KEY, &(20_000 + n).to_string()]);
            for (channel, message) in [
                (&waiters, format!("called:0:{owner}{KEY}")),
                (&waiters, format!("called:0:{other}{KEY}")),
                (&waiters, format!("called:100000000:{owner}{KEY}")),
                (&waiters, format!("called:0:{owner}another")),
                (&waiters, format!("wanted:0:{owner}{KEY}")),
                (&holders, format!("wanted:0:{}{KEY}", &token[..32])),
                (&holders, format!("called:0:{other}{KEY}")),
                (&holders, "called:-1:x".to_owned()),
                (&holders, String::new()),
            ] {
                assert_eq!(server.cli(&["PUBLISH", channel, &message]), "1");
            }
        }
        // A request of each, after the message.
        theirs.health().await.unwrap();
        guard.verify().await.unwrap();
        assert!(guard.is_held() && !next.is_finished());
        let commands =
            monitor.settled().iter().filter(|ran| ran.by != Caller::Script).count() - 1_000;
        println!("{commands} commands after 1000 false alarms");
        assert!(commands < 2_000, "{commands}");
        guard.release().await.unwrap();
        joined("the waiter", next).await.1.release().await.unwrap();
        until_nothing_is_left(&server).await;
    }
}

/// A holder without knowledge of wait queues: `SET NX PX` and a plain `DEL`.
mod foreign {
    use super::*;

    #[tokio::test]
    async fn its_release_wakes_the_waiter() {
        let server = RedisServer::start();
        let pools = [connect(&server.url()).await, connect(&server.url()).await];
        let mut took = Latency::below(PROMPT, 10);
        while took.wants_more() {
            assert_eq!(server.cli(&["SET", KEY, "foreign", "NX", "PX", "20000"]), "OK");
            let waiting = pools.each_ref().map(|pool| {
                let acquiring = pool.lock(KEY).acquire();
                tokio::spawn(async move {
                    let guard = acquiring.await.unwrap();
                    let got = Instant::now();
                    guard.release().await.unwrap();
                    got
                })
            });
            until_queued(&server, KEY, 2).await;
            until_watched(&server).await;
            let freed = Instant::now();
            assert_eq!(server.cli(&["DEL", KEY]), "1");
            let mut got = Vec::new();
            for waiting in waiting {
                got.push(joined("the waiter", waiting).await - freed);
            }
            took.push(got[0].min(got[1]));
        }
        println!("after a foreign DEL: {took}");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn the_end_of_its_ttl_wakes_the_waiter() {
        let server = RedisServer::start();
        let pool = connect(&server.url()).await;
        let mut late = Latency::below(ms(100), 4);
        while late.wants_more() {
            let ttl = ms(400);
            let set = Instant::now();
            server.cli(&["SET", KEY, "foreign", "NX", "PX", "400"]);
            let (got, guard) = joined("the waiter", acquire_in_task(&pool, KEY)).await;
            assert!(got - set > ttl - ms(20), "{:?}", got - set);
            late.push((got - set).saturating_sub(ttl));
            guard.release().await.unwrap();
        }
        println!("after the end of a foreign ttl: {late}");
        until_nothing_is_left(&server).await;
    }

    #[tokio::test]
    async fn without_a_ttl_it_is_waited_for() {
        let server = RedisServer::start();
        let (pool, other) = (connect(&server.url()).await, connect(&server.url()).await);
        server.cli(&["SET", KEY, "foreign"]);
        let one = pool.lock(KEY).acquire();
        let several = other.lock_all(["another", KEY]).acquire();
        let [one, several] = [one, several].map(|acquiring| {
            tokio::spawn(async move {
                let guard = acquiring.await.unwrap();
                let got = Instant::now();
                guard.release().await.unwrap();
                got
            })
        });
        sleep(ms(1_200)).await;
        assert!(!one.is_finished() && !several.is_finished());
        assert_eq!(server.cli(&["GET", KEY]), "foreign", "its value is left alone");
        let freed = Instant::now();
        server.cli(&["DEL", KEY]);
        let took = [joined("one key", one).await - freed, joined("several", several).await - freed];
        println!("after a foreign DEL without a ttl, one key and several: {took:?}");
        assert!(took.iter().all(|&took| took < TTL / 4), "{took:?}");
        until_nothing_is_left(&server).await;
    }
}

mod held {
    use super::*;
    use lock_runtime::ErrorKind;

    /// Deleted right behind the grant, where the first renewal finds it, and later, where the server reports it.
    #[tokio::test]
    async fn a_deletion_ends_the_body_soon_if_the_first_renewal_is_early() {
        let server = RedisServer::start();
        let builder = LockPool::builder(server.url()).first_renewal(ms(25));
        let pool = builder.ttl(ms(600_000)).connect().await.unwrap();
        for is_tracked in [false, true] {
            let mut took = Latency::below(PROMPT, 5);
            while took.wants_more() {
                let entered = Arc::new(tokio::sync::Notify::new());
                let body = {
                    let entered = entered.clone();
                    async move {
                        entered.notify_one();
                        std::future::pending::<()>().await;
                    }
                };
                let body = tokio::spawn(pool.lock(KEY).run(body));
                entered.notified().await;
                if is_tracked {
                    until_watched(&server).await;
                }
                let deleted = Instant::now();
                server.cli(&["DEL", KEY]);
                let error = joined("the body", body).await.unwrap_err();
                took.push(deleted.elapsed());
                assert_eq!(error.kind(), ErrorKind::Lost);
            }
            println!("from the DEL to the end of the body, tracked {is_tracked}: {took}");
        }
    }

    #[tokio::test]
    async fn a_deletion_of_one_of_several_keys_ends_the_body_too() {
        let server = RedisServer::start();
        let builder = LockPool::builder(server.url()).first_renewal(ms(25));
        let pool = builder.ttl(ms(600_000)).connect().await.unwrap();
        for key in ["a", "b"] {
            let guard = pool.lock_all(["a", "b"]).acquire().await.unwrap();
            until_watched(&server).await;
            server.cli(&["DEL", key]);
            let lost = timeout(DEADLINE, guard.lost()).await;
            assert_eq!(lost.expect("the server reports it").kind(), ErrorKind::Lost, "{key}");
        }
    }

    #[tokio::test]
    async fn a_lock_that_ends_before_its_first_renewal_costs_no_renewal() {
        const CYCLES: usize = 50;
        let server = RedisServer::start();
        let builder = LockPool::builder(server.url()).first_renewal(ms(5_000));
        let pool = builder.ttl(ms(600_000)).connect().await.unwrap();
        cycle(&pool, KEY).await;
        let monitor = Monitor::start(&server);
        for _ in 0..CYCLES {
            pool.lock(KEY).fencing(false).acquire().await.unwrap().release().await.unwrap();
        }
        let commands = monitor.settled();
        let count = |name: &str| commands.iter().filter(|ran| ran.name() == name).count();
        assert_eq!([count("SET"), count("EVALSHA"), count("PEXPIRE")], [CYCLES, CYCLES, 0]);
    }
}

mod missed {
    use super::*;

    #[tokio::test]
    async fn what_happened_while_the_connection_was_down_is_noticed_at_once() {
        let server = RedisServer::start();
        let pool = connect(&server.url()).await;
        let mut took = Latency::below(LESS_THAN_A_POLL, 5);
        while took.wants_more() {
            let monitor = Monitor::start(&server);
            server.cli(&["SET", KEY, "foreign"]);
            let next = acquire_in_task(&pool, KEY);
            until_polled(&monitor).await;
            // The greeting of the new connection takes four round trips. Monitors are not of this type.
            assert_eq!(server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]), "1");
            server.cli(&["DEL", KEY]);
            joined("the waiter", next).await.1.release().await.unwrap();
            took.push(span_around_the_deletion(&monitor.settled()));
        }
        println!("deleted behind a killed connection: {took}");
        until_nothing_is_left(&server).await;
    }

    /// The release finds no subscriber; then the deletion of the lock notifies no waiter either.
    #[tokio::test]
    async fn a_message_without_a_receiver() {
        let server = RedisServer::start();
        let ours = connect(&server.url()).await;
        let proxy = FaultProxy::start(&server);
        let theirs = connect(proxy.url()).await;
        let mut took = Latency::below(NOISE, 5);
        while took.wants_more() {
            let guard = ours.lock(KEY).acquire().await.unwrap();
            let next = acquire_in_task(&theirs, KEY);
            until_queued(&server, KEY, 1).await;
            proxy.refuse(true);
            proxy.cut();
            let alone = || server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]).lines().count() == 1;
            eventually_async(DEADLINE, "one pool is cut off", async || alone()).await;
            guard.release().await.unwrap();
            assert_eq!(server.cli(&["EXISTS", KEY]), "0", "there is no waiter to grant it to");
            let back = Instant::now();
            proxy.refuse(false);
            let (got, guard) = joined("the waiter", next).await;
            took.push(got - back);
            guard.release().await.unwrap();
        }
        println!("released while cut off, after the return: {took}");
        until_nothing_is_left(&server).await;
    }
}

mod storms {
    use super::*;

    const POOLS: usize = 4;
    const TASKS: usize = 8;
    const KEYS: u8 = 3;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Storm {
        Cuts,
        Flushes,
        Both,
    }

    struct Crowd {
        server: RedisServer,
        served: Arc<[AtomicUsize; POOLS * TASKS]>,
    }

    impl Crowd {
        /// Works while `storm` hits the server.
        async fn work(dir: &Path, storm: Storm) -> Self {
            let server = RedisServer::start();
            let served: Arc<[AtomicUsize; POOLS * TASKS]> =
                Arc::new(std::array::from_fn(|_| 0.into()));
            let over = Arc::new(AtomicBool::new(false));
            let mut tasks = JoinSet::new();
            for n in 0..POOLS {
                let pool = connect(&server.url()).await;
                let recorder = Arc::new(Recorder::create(dir, &format!("p{n}")).unwrap());
                for task in 0..TASKS {
                    let (pool, recorder) = (pool.clone(), recorder.clone());
                    let (served, over) = (served.clone(), over.clone());
                    tasks.spawn(async move {
                        while !over.load(Ordering::Relaxed) {
                            if section(&pool, &recorder, task as u64).await {
                                served[n * TASKS + task].fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    });
                }
            }
            let began = Instant::now();
            let all_served = || served.iter().all(|count| count.load(Ordering::Relaxed) > 0);
            while began.elapsed() < ms(3_000) || (!all_served() && began.elapsed() < DEADLINE) {
                // More and more time between two faults: on a slow machine a new connection needs it.
                sleep(ms(100) + began.elapsed() / 30).await;
                if storm != Storm::Flushes {
                    server.kill_clients();
                }
                if storm != Storm::Cuts {
                    sleep(ms(fastrand::u64(..20))).await;
                    server.cli(&["FLUSHALL"]);
                }
            }
            over.store(true, Ordering::Relaxed);
            timeout(DEADLINE, tasks.join_all()).await.expect("all are served");
            Self { server, served }
        }

        fn assert_all_served(&self, least: usize) {
            let served: Vec<_> =
                self.served.iter().map(|count| count.load(Ordering::Relaxed)).collect();
            println!("sections: {}, by task {served:?}", served.iter().sum::<usize>());
            assert!(served.iter().all(|&count| count >= least), "{served:?}");
        }
    }

    /// True if the section ended without an error or a loss.
    async fn section(pool: &LockPool, recorder: &Recorder, task: u64) -> bool {
        let key = format!("hot:{}", fastrand::u8(..KEYS));
        let asked = now_ns();
        let Ok(guard) = pool.lock(key.as_str()).acquire().await else { return false };
        let fence = guard.fence().map(Fence::get);
        let grant = recorder.granted(&key, task, asked, || guard.valid_for(), fence);
        let lost = timeout(Duration::from_micros(fastrand::u64(..3_000)), guard.lost()).await;
        if lost.is_ok() || !guard.is_held() {
            recorder.lost(grant);
        }
        recorder.release(grant);
        guard.release().await.is_ok() && lost.is_err()
    }

    /// The store loses nothing, so no two may hold the lock.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_cut_connections_never_make_two_valid_leases() {
        let dir = tempfile::tempdir().unwrap();
        let crowd = Crowd::work(dir.path(), Storm::Cuts).await;
        History::read(dir.path()).unwrap().assert_safe();
        crowd.assert_all_served(1);
        until_nothing_is_left(&crowd.server).await;
    }

    /// The store loses its locks, so two may hold one: the old holder until it is notified, and the next one.
    /// This lasts a moment, not the rest of a ttl; the fences differ.
    async fn share_for_a_moment(storm: Storm) {
        let dir = tempfile::tempdir().unwrap();
        let crowd = Crowd::work(dir.path(), storm).await;
        let history = History::read(dir.path()).unwrap();
        let overlaps = history.overlaps();
        let longest = overlaps.iter().map(|overlap| {
            let end = overlap.first.valid_until().min(overlap.second.valid_until());
            Duration::from_nanos(end - overlap.second.granted_ns)
        });
        println!(
            "{storm:?}: {} grants, {} overlaps, the longest {:?}",
            history.grants().len(),
            overlaps.len(),
            longest.clone().max()
        );
        assert!(longest.clone().all(|span| span < TTL / 4));
        // Until the old holder is notified, its process may hand the lock on. Such a hold has a fence and the validity of
        // the old grant, so a resource that has seen the new fence refuses it.
        let mut faults = history.fence_faults();
        faults.retain(|FenceFault { before, after }| {
            after.fence == before.fence || after.deadline_ns > before.deadline_ns
        });
        assert!(faults.is_empty(), "{faults:#?}");
        crowd.assert_all_served(1);
        until_nothing_is_left(&crowd.server).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_flushes_make_two_holders_for_a_moment_at_most() {
        share_for_a_moment(Storm::Flushes).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_both_make_two_holders_for_a_moment_at_most() {
        share_for_a_moment(Storm::Both).await;
    }

    /// Scripts and plain acquires of waiters, without the commands of new connections.
    #[tokio::test]
    async fn cause_no_continuous_requests() {
        let server = RedisServer::start();
        let pool = connect(&server.url()).await;
        server.cli(&["SET", KEY, "foreign"]);
        let next = acquire_in_task(&pool, KEY);
        until_queued(&server, KEY, 1).await;
        let asks = || -> u64 {
            let stats = server.cli(&["INFO", "commandstats"]);
            let calls = |name: &str| {
                let line = stats.lines().find_map(|line| line.strip_prefix(name));
                let calls = line.and_then(|rest| rest.split(',').next()?.parse::<u64>().ok());
                calls.unwrap_or(0)
            };
            calls("cmdstat_evalsha:calls=") + calls("cmdstat_eval:calls=")
        };
        let before = asks();
        for _ in 0..10 {
            server.kill_clients();
            sleep(ms(50)).await;
            // Each change is a message and leads to another request.
            for _ in 0..20 {
                server.cli(&["SET", KEY, "foreign"]);
            }
            sleep(ms(50)).await;
        }
        let asked = asks() - before;
        println!("{asked} scripts in a second of cuts and false alarms");
        assert!(asked < 500, "{asked}");
        server.cli(&["DEL", KEY]);
        joined("the waiter", next).await.1.release().await.ok();
    }
}

/// A value that resembles an owner token of this library is foreign all the same.
#[tokio::test]
async fn a_foreign_value_is_waited_for_and_left_as_it_is() {
    let server = RedisServer::start();
    let pool = connect(&server.url()).await;
    let owner = "4bf92f3577b34da6a3ce929d0e0e4736";
    for host in ["@worker-01.prod.example", "@0123456789abcdef-", "@0123456789abcdef++"] {
        let value = format!("{owner}{host}");
        assert_eq!(server.cli(&["SET", KEY, &value, "PX", "20000"]), "OK");
        let waiting = acquire_in_task(&pool, KEY);
        until_queued(&server, KEY, 1).await;
        // For one or two polls.
        sleep(ms(400)).await;
        assert_eq!(server.cli(&["GET", KEY]), value);
        server.cli(&["DEL", KEY]);
        let (_, guard) = joined("it has the lock", waiting).await;
        guard.release().await.unwrap();
    }
}

/// A lock that is handed off continuously is free only in the barging window.
mod window {
    use super::*;

    /// Keeps the lock busy with tasks of two pools until `stop`, and counts the sections of each.
    fn crowd(pools: &[LockPool; 2]) -> (Arc<AtomicBool>, Arc<[AtomicUsize; 8]>, JoinSet<()>) {
        let (stop, sections) =
            (Arc::new(AtomicBool::new(false)), Arc::<[AtomicUsize; 8]>::default());
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let (pool, stop, sections) = (pools[task % 2].clone(), stop.clone(), sections.clone());
            tasks.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let request = pool.lock(KEY).fencing(false);
                    request.run(sleep(ms(1))).await.unwrap();
                    sections[task].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        (stop, sections, tasks)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiters_outside_the_queue_get_the_lock_in_the_window() {
        let server = RedisServer::start();
        let connect = async || {
            let pool = LockPool::builder(server.url()).ttl(TTL).wait(Wait::Forever);
            pool.barging_window(ms(100), ms(15)).connect().await.unwrap()
        };
        let (stop, sections, tasks) = crowd(&[connect().await, connect().await]);
        // A request for several keys, and a client of another library that polls.
        let several = connect().await;
        for _ in 0..3 {
            let request = several.lock_all([KEY, "another"]);
            let guard = timeout(DEADLINE, request.acquire()).await.expect("in a window").unwrap();
            guard.release().await.unwrap();
        }
        for _ in 0..3 {
            eventually_async(DEADLINE, "the other client's turn", async || {
                server.cli(&["SET", KEY, "foreign client", "NX", "PX", "20000"]) == "OK"
            })
            .await;
            assert_eq!(server.cli(&["GET", KEY]), "foreign client", "and no other owner has it");
            server.cli(&["DEL", KEY]);
        }
        eventually_async(DEADLINE, "all other tasks had many turns, too", async || {
            sections.iter().all(|sections| sections.load(Ordering::Relaxed) > 5)
        })
        .await;
        stop.store(true, Ordering::Relaxed);
        timeout(DEADLINE, tasks.join_all()).await.expect("no task is left waiting");
        until_nothing_is_left(&server).await;
    }
}
