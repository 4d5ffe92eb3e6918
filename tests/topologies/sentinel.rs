//! A master that sentinels watch, and failovers.

#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::testing::{conformance, open_backend};
use lock_runtime::{ErrorKind, LockError, LockPool};
use lock_tests::prelude::*;
use lock_tests::sentinel::{FakeSentinel, Passwords, SERVICE, Watched, role};
use lock_tests::{RedisServer, eventually_async};

const KEYS: u64 = 4;
const TASKS: u64 = 8;
/// Of each kind; `LOCK_FAILOVERS` sets another number.
const FAILOVERS: u64 = 2;
/// Counted from the moment when the sentinels name another master.
const RECOVERY: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn it_conforms_with_passwords_on_both() {
    let passwords = Passwords { server: Some("m4ster"), sentinel: Some("s3ntinel") };
    let watched = Watched::start_with(passwords).without_failover();
    let url = watched.url();
    conformance(open_backend(&url).await.unwrap(), open_backend(&url).await.unwrap()).await;
    let master = watched.master().unwrap();
    assert_ne!(master.cli(&["GET", "lock_runtime:fence"]), "(nil)", "the locks were in the master");

    // Each password belongs to one side.
    for (server, sentinel, says) in [
        (
            Some("m4ster"),
            None,
            ["the sentinel at 127.0.0.1:", "wants a password", "sentinel_password"],
        ),
        (
            Some("m4ster"),
            Some("c4n4ry"),
            ["the sentinel at 127.0.0.1:", "does not accept", "sentinel_password"],
        ),
        (None, Some("s3ntinel"), ["Redis at 127.0.0.1:", "wants a password", "redis://:password@"]),
        (
            Some("c4n4ry"),
            Some("s3ntinel"),
            ["Redis at 127.0.0.1:", "does not accept", "check both"],
        ),
    ] {
        let url = watched.url_with(Passwords { server, sentinel });
        let error = LockPool::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        let text = format!("{error} {error:?}");
        assert!(says.iter().all(|says| text.contains(says)), "{text}");
        assert!(!text.contains("c4n4ry") && !text.contains("s3ntinel"), "{text}");
    }
}

#[tokio::test]
async fn errors_say_which_side_it_is() {
    let master = RedisServer::start();
    let fake = FakeSentinel::start(&master);
    let text = async |url: &str| {
        let error = LockPool::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
        error.to_string()
    };

    let url = FakeSentinel::url(&[&fake]);
    let unknown = text(&url.replace(SERVICE, "orders")).await;
    assert!(unknown.contains("no master with the name `orders`"), "{unknown}");
    assert!(unknown.contains("sentinel monitor"), "{unknown}");

    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let unreachable = text(&format!("redis+sentinel://127.0.0.1:{free},127.0.0.1:{free}/m")).await;
    assert!(unreachable.contains("no sentinel of `m` is reachable"), "{unreachable}");
    assert!(unreachable.contains("refused") && unreachable.contains("26379"), "{unreachable}");

    let server = text(&format!("redis+sentinel://127.0.0.1:{}/m", master.port())).await;
    assert!(server.contains("is not a sentinel"), "{server}");

    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    let silent = text(&format!("redis+sentinel://127.0.0.1:{port}/m")).await;
    assert!(silent.contains("no sentinel of `m`"), "{silent}");

    // Any one of three is enough.
    let url = format!("redis+sentinel://127.0.0.1:{free},127.0.0.1:{port},");
    let url = FakeSentinel::url(&[&fake]).replace("redis+sentinel://", &url);
    works(&LockPool::connect(&url).await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_sentinel_in_the_url_of_a_server_is_named() {
    let watched = Watched::start();
    let server = format!("127.0.0.1:{}", watched.sentinels[0].port());
    let error = LockPool::connect(&format!("redis://{server}")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("the server at {server} is a sentinel")), "{text}");
    assert!(text.contains("redis+sentinel://"), "{text}");
}

#[tokio::test]
async fn a_named_server_that_is_no_master_is_not_used() {
    let (master, replica) = pair();
    let fake = FakeSentinel::start(&replica);
    let url = FakeSentinel::url(&[&fake]);
    let error = LockPool::connect(&url).await.unwrap_err();
    assert!(error.to_string().contains("is not a master"), "{error}");
    fake.say(&master, 0);
    works(&LockPool::connect(&url).await.unwrap()).await.unwrap();
    fake.say(&replica, 0);
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
    works(&LockPool::connect(&url).await.unwrap()).await.unwrap();
}

/// The old master answers, and two of three sentinels still name it.
#[tokio::test]
async fn the_latest_configuration_is_followed_at_once() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let fakes = [(); 3].map(|()| FakeSentinel::start(&old));
    let [one, two, three] = &fakes;
    let pool = LockPool::connect(&FakeSentinel::url(&[one, two, three])).await.unwrap();
    assert!(is_in(&old, &pool).await.unwrap());
    two.say(&new, 1);
    eventually_async(RECOVERY, "the new master is used", async || {
        is_in(&new, &pool).await.unwrap_or(false)
    })
    .await;
    // Also by a new connection.
    for _ in 0..3 {
        new.kill_clients();
        eventually_async(RECOVERY, "the new master is used", async || works(&pool).await.is_ok())
            .await;
        assert!(is_in(&new, &pool).await.unwrap());
    }
}

/// It keeps its connections, and the sentinels have not noticed yet.
#[tokio::test]
async fn a_master_that_becomes_a_replica_is_left() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let fake = FakeSentinel::start(&old);
    let pool = LockPool::connect(&FakeSentinel::url(&[&fake])).await.unwrap();
    let guard = pool.lock("held").ttl(ms(300)).acquire().await.unwrap();
    old.cli(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
    // Over the old connection every write would be refused.
    eventually_async(RECOVERY, "the replica is left", async || match works(&pool).await {
        Ok(()) => false,
        Err(error) => error.to_string().contains("is not a master"),
    })
    .await;
    fake.say(&new, 0);
    eventually_async(RECOVERY, "the new master is used", async || {
        is_in(&new, &pool).await.unwrap_or(false)
    })
    .await;
    assert!(guard.lost().await.is_lost(), "it was not in the new master");
}

/// A host that hangs keeps its connections open.
#[tokio::test]
async fn a_master_that_hangs_is_left() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let fake = FakeSentinel::start(&old);
    let pool = LockPool::connect(&FakeSentinel::url(&[&fake])).await.unwrap();
    works(&pool).await.unwrap();
    old.pause();
    let hung = pool.lock("waits").wait(ms(100)).acquire().await.unwrap_err();
    assert_eq!(hung.kind(), ErrorKind::Backend, "{hung}");
    fake.say(&new, 1);
    eventually_async(RECOVERY, "the new master is used", async || works(&pool).await.is_ok()).await;
    assert!(is_in(&new, &pool).await.unwrap());
    old.resume();
}

/// No message reaches a waiter at the old master about a release at the new one.
#[tokio::test]
async fn a_waiter_retries_at_the_new_master() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let fake = FakeSentinel::start(&old);
    let pool = LockPool::connect(&FakeSentinel::url(&[&fake])).await.unwrap();
    old.cli(&["SET", "busy", "another", "PX", "600000"]);
    let request = pool.lock("busy").wait(ms(30_000));
    let waiting = tokio::spawn(request.acquire());
    eventually_async(RECOVERY, "it waits", async || {
        old.cli(&["EXISTS", "busy:lock_runtime:line"]) == "1"
    })
    .await;
    fake.say(&new, 1);
    let began = Instant::now();
    let guard = waiting.await.unwrap().unwrap();
    assert!(began.elapsed() < RECOVERY, "{:?}", began.elapsed());
    assert_eq!(new.cli(&["EXISTS", "busy"]), "1");
    guard.release().await.unwrap();
}

/// Meanwhile the old master would continue to answer OK.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_graceful_failover_the_old_master_is_left() {
    let watched = Watched::start();
    let pool = LockPool::connect(&watched.url()).await.unwrap();
    for _ in 0..failovers() {
        let old = watched.master().unwrap();
        assert!(is_in(old, &pool).await.unwrap());
        let begun = watched.sentinels[0].ask(&["SENTINEL", "FAILOVER", SERVICE]).unwrap();
        assert_eq!(begun.to_string(), "OK");
        let new = watched.wait_for_another_than(old);
        eventually_async(RECOVERY, "the new master is used", async || {
            is_in(new, &pool).await.unwrap_or(false)
        })
        .await;
        assert_eq!(
            role(old),
            "master",
            "the old master is not demoted yet, so the pool left it by itself"
        );
        watched.wait_until_ready();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_masters_deaths_are_survived_under_load() {
    let watched = Watched::start();
    let pools = [watched.url(), watched.url()].map(|url| async move {
        // Each acquire goes to the store.
        LockPool::builder(&url).local_handoff_limit(Duration::ZERO).connect().await.unwrap()
    });
    let [one, two] = pools;
    let load = Load::start(&[one.await, two.await]);
    load.next_success(Instant::now()).await;
    for round in 0..failovers() {
        let old = watched.master().unwrap();
        let killed = Instant::now();
        old.kill();
        let new = watched.wait_for_another_than(old);
        let promoted = Instant::now();
        load.next_success(promoted).await;
        println!(
            "failover {round}: promoted after {:?}, all pools serve {:?} later",
            promoted - killed,
            promoted.elapsed()
        );
        assert_eq!(role(new), "master");
        old.restart();
        watched.wait_until_ready();
        load.next_success(Instant::now()).await;
    }
    eventually_async(RECOVERY, "the load has many grants", async || {
        load.shared.grants.load(Ordering::Relaxed) > 100 * failovers()
    })
    .await;
    println!("{} grants", load.end().await);
}

/// Tasks that acquire and release all the time.
struct Load {
    shared: Arc<Shared>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

struct Shared {
    ended: AtomicBool,
    grants: AtomicU64,
    /// For each pool, the latest request time among its granted locks.
    successes: Vec<Mutex<Instant>>,
    fences: Mutex<BTreeSet<u64>>,
    /// The last one by pool and key: a pool has one key once at a time.
    last: Mutex<BTreeMap<(usize, u64), u64>>,
    faults: Mutex<Vec<String>>,
}

impl Load {
    fn start(pools: &[LockPool]) -> Self {
        let shared = Arc::new(Shared {
            ended: AtomicBool::new(false),
            grants: AtomicU64::new(0),
            successes: pools.iter().map(|_| Mutex::new(Instant::now())).collect(),
            fences: Mutex::default(),
            last: Mutex::default(),
            faults: Mutex::default(),
        });
        let tasks = (0..TASKS).flat_map(|task| {
            let shared = &shared;
            let all = pools.iter().cloned().enumerate();
            all.map(move |(at, pool)| tokio::spawn(work(shared.clone(), pool, at, task % KEYS)))
        });
        let tasks = tasks.collect();
        Self { shared, tasks }
    }

    /// Waits until each pool was granted a lock that it requested after `moment`.
    async fn next_success(&self, moment: Instant) {
        let all =
            async || self.shared.successes.iter().all(|success| *success.lock().unwrap() > moment);
        eventually_async(RECOVERY, "each pool gives locks", all).await;
    }

    async fn end(self) -> u64 {
        self.shared.ended.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        let faults = std::mem::take(&mut *self.shared.faults.lock().unwrap());
        assert!(faults.is_empty(), "{faults:#?}");
        self.shared.grants.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn succeeded(&self, pool: usize, asked: Instant) {
        let mut success = self.successes[pool].lock().unwrap();
        *success = asked.max(*success);
    }
}

async fn work(shared: Arc<Shared>, pool: LockPool, at: usize, key: u64) {
    let fault = |text: String| shared.faults.lock().unwrap().push(text);
    while !shared.ended.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let request = pool.lock(format!("order:{key}")).ttl(ms(300)).wait(ms(500));
        match request.acquire().await {
            Ok(guard) => {
                let fence = guard.fence().unwrap().get();
                shared.grants.fetch_add(1, Ordering::Relaxed);
                if !shared.fences.lock().unwrap().insert(fence) {
                    fault(format!("fence {fence} was given twice"));
                }
                let last = shared.last.lock().unwrap().insert((at, key), fence);
                if last.is_some_and(|last| last >= fence) {
                    fault(format!("fence {fence} of {key} after {last:?}"));
                }
                shared.succeeded(at, asked);
                tokio::time::sleep(ms(2)).await;
                // The lease may be lost.
                let _ = guard.release().await;
            }
            Err(error) => match error.kind() {
                // A lease may be lost before its task is scheduled.
                ErrorKind::Backend | ErrorKind::Conflict | ErrorKind::Lost => {
                    tokio::time::sleep(ms(5)).await;
                }
                _ => fault(error.to_string()),
            },
        }
    }
}

fn failovers() -> u64 {
    let set = std::env::var("LOCK_FAILOVERS").ok();
    set.map_or(FAILOVERS, |text| text.parse().expect("a number"))
}

/// A master and its replica.
fn pair() -> (RedisServer, RedisServer) {
    let master = RedisServer::start();
    let follow = format!("replicaof 127.0.0.1 {}", master.port());
    let replica = RedisServer::builder().config_line(&follow).start();
    (master, replica)
}

async fn works(pool: &LockPool) -> Result<(), LockError> {
    pool.lock("works").wait(ms(1_000)).acquire().await?.release().await.map(drop)
}

/// Whether a lock of this pool is to be found in `server` while it is held.
async fn is_in(server: &RedisServer, pool: &LockPool) -> Result<bool, LockError> {
    let guard = pool.lock("where").wait(ms(1_000)).acquire().await?;
    let there = server.cli(&["EXISTS", "where"]) == "1";
    guard.release().await?;
    Ok(there)
}
