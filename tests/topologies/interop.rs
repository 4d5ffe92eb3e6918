//! A lock shared with the libraries of other languages: redis-py, node-redlock, redsync, rslock. No two clients are
//! inside together, in either direction. A waiter is served soon after a foreign release, and foreign values stay
//! unchanged.
//!
//! The programs are in `tests/foreign`; `tests/foreign/install.sh` installs the libraries.

#![allow(clippy::disallowed_methods)]

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use lock_runtime::{LockGuard, LockPool, Wait};
use lock_tests::foreign::installed;
use lock_tests::prelude::*;
use lock_tests::{Latency, RedisServer, Worker, eventually_async};
use redis::AsyncCommands;
use rslock::LockManager;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

/// Of foreign leases and of this library; no test waits as long.
const TTL: Duration = ms(30_000);
const DEADLINE: Duration = ms(10_000);
/// How long a waiter waits for a message before it asks again.
const RECHECK: Duration = ms(300);
const ROUNDS: usize = 5;
const KEY: &str = "order:7";
const QUEUE: &str = "order:7:lock_runtime:line";
const COUNT: &str = "order:7:count";

/// A foreign library, with one lock of it.
enum Foreign {
    Program { worker: Worker, read: usize },
    Rslock(Box<Rslock>),
}

struct Rslock {
    locks: LockManager,
    client: redis::Client,
    held: Option<rslock::Lock>,
}

/// The outcome of a foreign release.
#[derive(Debug, PartialEq)]
enum Freed {
    Yes,
    /// The client did not hold it any more.
    No,
}

fn source(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("foreign").join(name).display().to_string()
}

fn program(
    program: &Path,
    env: &[(&str, &str)],
    before: &[String],
    server: &RedisServer,
) -> Foreign {
    let port = server.port().to_string();
    let args = [before, &[port, KEY.to_owned()]].concat();
    Foreign::Program {
        worker: Worker::start_with_env(program.to_str().unwrap(), &args, env),
        read: 0,
    }
}

fn redis_py(server: &RedisServer) -> Foreign {
    program(&installed("python").join("bin/python"), &[], &[source("holder.py")], server)
}

fn node_redlock(server: &RedisServer) -> Foreign {
    let modules = installed("node").display().to_string();
    program(Path::new("node"), &[("MODULES", &modules)], &[source("holder.mjs")], server)
}

fn rslock(server: &RedisServer) -> Foreign {
    let url = server.url();
    let mut locks = LockManager::new(vec![url.clone()]);
    locks.set_retry(1500, ms(20));
    let client = redis::Client::open(url).unwrap();
    Foreign::Rslock(Box::new(Rslock { locks, client, held: None }))
}

/// `None` if the installation recorded a reason for its absence.
fn redsync(server: &RedisServer) -> Option<Foreign> {
    let why = installed("node").with_file_name("redsync.left_out");
    if let Ok(why) = std::fs::read_to_string(why) {
        println!("redsync is left out: {why}");
        return None;
    }
    Some(program(&installed("redsync"), &[], &[], server))
}

impl Foreign {
    /// Sends a command line and returns the answer.
    async fn ask(&mut self, line: &str) -> String {
        let Self::Program { worker, read } = self else { panic!("it is no program") };
        worker.send_line(line);
        timeout(TTL, async {
            loop {
                if let Some(answer) = worker.stdout().get(*read) {
                    *read += 1;
                    return answer.trim().to_owned();
                }
                tokio::time::sleep(ms(1)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("no answer to {line}: {}", worker.stderr().join("\n")))
    }

    /// Whether it got the lock without waiting.
    async fn try_lock(&mut self) -> bool {
        match self {
            Self::Program { .. } => match &*self.ask("try").await {
                "held" => true,
                "busy" => false,
                other => panic!("{other}"),
            },
            Self::Rslock(it) => {
                let Rslock { locks, held, .. } = &mut **it;
                let mut hasty = locks.clone();
                hasty.set_retry(0, ms(1));
                *held = hasty.lock(KEY, TTL).await.ok();
                held.is_some()
            }
        }
    }

    async fn lock(&mut self) {
        match self {
            Self::Program { .. } => assert_eq!(self.ask("lock").await, "held"),
            Self::Rslock(it) => it.held = Some(it.locks.lock(KEY, TTL).await.unwrap()),
        }
    }

    async fn free(&mut self) -> Freed {
        match self {
            Self::Program { .. } => match &*self.ask("free").await {
                "lost" => Freed::No,
                "held" | "busy" => panic!("it did not hold it"),
                _ => Freed::Yes,
            },
            Self::Rslock(it) => {
                let Rslock { locks, held, .. } = &mut **it;
                let lock = held.take().unwrap();
                let was_ours = locks.query_redis_for_key_value(KEY.as_bytes()).await.unwrap();
                let was_ours = was_ours.as_deref() == Some(&*lock.val);
                locks.unlock(&lock).await;
                if was_ours { Freed::Yes } else { Freed::No }
            }
        }
    }

    /// Adds one so many times, protected only by the lock.
    async fn count(&mut self, times: usize) {
        match self {
            Self::Program { .. } => {
                assert_eq!(self.ask(&format!("count {times}")).await, "counted");
            }
            Self::Rslock(it) => {
                let Rslock { locks, client, .. } = &**it;
                let mut client = client.get_multiplexed_async_connection().await.unwrap();
                for _ in 0..times {
                    let lock = locks.lock(KEY, TTL).await.unwrap();
                    add_one(&mut client).await;
                    locks.unlock(&lock).await;
                }
            }
        }
    }
}

async fn add_one(client: &mut redis::aio::MultiplexedConnection) {
    let count: Option<u64> = client.get(COUNT).await.unwrap();
    tokio::time::sleep(ms(2)).await;
    let (): () = client.set(COUNT, count.unwrap_or_default() + 1).await.unwrap();
}

fn come(pool: &LockPool, fencing: bool) -> JoinHandle<(Instant, LockGuard)> {
    let acquiring = pool.lock(KEY).fencing(fencing).acquire();
    tokio::spawn(async move {
        let guard = acquiring.await.unwrap();
        (Instant::now(), guard)
    })
}

/// Waits until one waiter is queued and watches the key.
async fn until_it_waits(server: &RedisServer) {
    eventually_async(DEADLINE, "one is queued", async || server.cli(&["ZCARD", QUEUE]) == "1")
        .await;
    eventually_async(DEADLINE, "the key is watched", async || {
        !server.cli(&["INFO", "stats"]).contains("tracking_total_keys:0")
    })
    .await;
}

/// Waits until the waiter sends its next request. Returns a moment shortly before: without a message, the one after that is not
/// sent within [`RECHECK`] of it.
async fn until_it_asks_again(server: &RedisServer) -> Instant {
    let requests = || server.calls("evalsha");
    let (before, since) = (requests(), Cell::new(Instant::now()));
    eventually_async(DEADLINE, "it asks again", async || {
        let now = Instant::now();
        let asks = requests() > before;
        if !asks {
            since.set(now);
        }
        asks
    })
    .await;
    since.get()
}

/// The foreign client holds, this library waits.
async fn they_hold(library: &str, server: &RedisServer, theirs: &mut Foreign) {
    let pool = patient(server.url(), TTL).await;
    let mut took = Latency::below(RECHECK, 3);
    for round in 0.. {
        if !took.wants_more() {
            break;
        }
        assert!(theirs.try_lock().await, "it is free");
        let value = server.cli(&["GET", KEY]);
        for fencing in [false, true] {
            let none = pool.lock(KEY).fencing(fencing).try_acquire().await.unwrap();
            assert!(none.is_none(), "they hold it");
        }
        let waiting = come(&pool, round % 2 == 0);
        until_it_waits(server).await;
        assert_eq!(server.cli(&["GET", KEY]), value, "the foreign value is unchanged");
        let asked = until_it_asks_again(server).await;
        assert!(!waiting.is_finished());
        assert_eq!(theirs.free().await, Freed::Yes);
        let (got, guard) = within(DEADLINE, "this library gets it", waiting).await.unwrap();
        took.push(got.saturating_duration_since(asked));
        assert!(!theirs.try_lock().await, "this library holds it");
        guard.release().await.unwrap();
    }
    println!("{library} releases: this library is in after {took}, since it asked last");
}

/// This library holds; a foreign client and a pool of this library wait.
async fn we_hold(library: &str, server: &RedisServer, theirs: &mut Foreign) {
    let (ours, others) = (patient(server.url(), TTL).await, patient(server.url(), TTL).await);
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        let guard = ours.lock(KEY).fencing(round % 2 == 0).acquire().await.unwrap();
        assert!(!theirs.try_lock().await, "this library holds it");
        let ours_too = (round % 2 == 1).then(|| come(&others, true));
        if ours_too.is_some() {
            eventually_async(DEADLINE, "a waiter of this library is queued", async || {
                server.cli(&["ZCARD", QUEUE]) == "1"
            })
            .await;
        }
        assert!(!theirs.try_lock().await, "this library holds it and another pool waits");
        let release = async {
            // The foreign client polls every 20 ms: it waits by now.
            tokio::time::sleep(ms(100)).await;
            let freed = Instant::now();
            guard.release().await.unwrap();
            if let Some(ours) = ours_too {
                within(DEADLINE, "ours", ours).await.unwrap().1.release().await.unwrap();
            }
            freed
        };
        let ((), freed) = tokio::join!(theirs.lock(), release);
        took.push(freed.elapsed());
        assert!(ours.lock(KEY).try_acquire().await.unwrap().is_none(), "they hold it");
        assert_eq!(theirs.free().await, Freed::Yes);
    }
    println!("this library releases: {library} is in after {took:?}");
    // A lock that is kept for the next waiter of this library stays locked for a second.
    assert!(median(took) < NOISE);
}

/// The key is deleted during a hold.
async fn an_operator_deletes(server: &RedisServer, theirs: &mut Foreign) {
    let pool = patient(server.url(), TTL).await;
    assert!(theirs.try_lock().await);
    let waiting = come(&pool, true);
    until_it_waits(server).await;
    assert_eq!(server.cli(&["DEL", KEY]), "1");
    let (_, guard) = within(DEADLINE, "this library gets the deleted lock", waiting).await.unwrap();
    assert_eq!(theirs.free().await, Freed::No);
    guard.verify().await.unwrap();

    assert_eq!(server.cli(&["DEL", KEY]), "1");
    theirs.lock().await;
    let value = server.cli(&["GET", KEY]);
    assert!(guard.release().await.unwrap_err().is_lost());
    assert_eq!(server.cli(&["GET", KEY]), value, "the foreign value is unchanged");
    assert_eq!(theirs.free().await, Freed::Yes);
    // A foreign lock without a time limit: it is waited for until it is deleted.
    assert!(theirs.try_lock().await);
    assert_eq!(server.cli(&["PERSIST", KEY]), "1");
    let waiting = come(&pool, false);
    until_it_waits(server).await;
    assert!(!waiting.is_finished());
    assert_eq!(theirs.free().await, Freed::Yes);
    within(DEADLINE, "this library gets the lock that had no limit", waiting)
        .await
        .unwrap()
        .1
        .release()
        .await
        .unwrap();
}

async fn everything(library: &str, server: &RedisServer, mut theirs: Foreign) {
    they_hold(library, server, &mut theirs).await;
    we_hold(library, server, &mut theirs).await;
    an_operator_deletes(server, &mut theirs).await;
    eventually_async(DEADLINE, "nothing is left", async || server.cli(&["EXISTS", KEY]) == "0")
        .await;
}

#[tokio::test]
async fn with_redis_py() {
    let server = RedisServer::start();
    everything("redis-py", &server, redis_py(&server)).await;
}

#[tokio::test]
async fn with_node_redlock() {
    let server = RedisServer::start();
    everything("node-redlock", &server, node_redlock(&server)).await;
}

#[tokio::test]
async fn with_redsync() {
    let server = RedisServer::start();
    if let Some(redsync) = redsync(&server) {
        everything("redsync", &server, redsync).await;
    }
}

#[tokio::test]
async fn with_rslock() {
    let server = RedisServer::start();
    everything("rslock", &server, rslock(&server)).await;
}

/// This library waits by polling alone, for a holder without a time limit.
#[tokio::test]
async fn a_user_without_channels_polls() {
    let server = RedisServer::builder()
        .config_line("user deaf on >secret ~* resetchannels +@all -client|tracking")
        .start();
    let mut theirs = redis_py(&server);
    let url = format!("redis://deaf:secret@127.0.0.1:{}", server.port());
    let pool = LockPool::builder(url).wait(Wait::Forever).connect().await.unwrap();
    for fencing in [false, true] {
        assert!(theirs.try_lock().await);
        assert_eq!(server.cli(&["PERSIST", KEY]), "1");
        let waiting = come(&pool, fencing);
        let looks = || server.calls("pttl");
        let before = looks();
        eventually_async(DEADLINE, "it polls again", async || looks() >= before + 2).await;
        assert!(!waiting.is_finished());
        assert_eq!(theirs.free().await, Freed::Yes);
        within(DEADLINE, "this library gets it", waiting).await.unwrap().1.release().await.unwrap();
    }
}

/// All clients count under one lock at the same time; two inside would lose an addition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_libraries_are_inside_together() {
    const TIMES: usize = 25;
    let server = RedisServer::start();
    let mut foreign = vec![redis_py(&server), node_redlock(&server), rslock(&server)];
    foreign.extend(redsync(&server));
    let mut everybody = JoinSet::new();
    let mut sum = 0;
    for mut theirs in foreign {
        everybody.spawn(async move { theirs.count(TIMES).await });
        sum += TIMES;
    }
    for fencing in [false, true] {
        let pool = patient(server.url(), TTL).await;
        let client = redis::Client::open(server.url()).unwrap();
        let mut client = client.get_multiplexed_async_connection().await.unwrap();
        everybody.spawn(async move {
            for _ in 0..TIMES {
                let guard = pool.lock(KEY).fencing(fencing).acquire().await.unwrap();
                add_one(&mut client).await;
                guard.release().await.unwrap();
            }
        });
        sum += TIMES;
    }
    timeout(6 * DEADLINE, everybody.join_all()).await.expect("no client starves");
    assert_eq!(server.cli(&["GET", COUNT]), sum.to_string());
}
