//! Requests of a tokio runtime travel over a connection of that runtime. What outlives the runtime stays with the driver.

#![allow(clippy::disallowed_methods)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use lock_runtime::{LockError, LockGuard, LockPool, Wait};
use lock_tests::monitor::{Caller, Ran};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Direction, named};
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{FaultProxy, Monitor, RedisServer, eventually, eventually_async};
use tokio::runtime::{Builder, Runtime};

const SOON: Duration = ms(20_000);

/// How many connections beside the drivers' serve locks. Those of drivers are subscribed to a channel.
fn used_by_callers(server: &RedisServer) -> usize {
    let clients = server.cli(&["CLIENT", "LIST"]);
    let is_used = |line: &&str| line.contains(" sub=0 ") && line.contains(" cmd=evalsha ");
    clients.lines().filter(is_used).count()
}

/// Whether the connection from `address` is a driver's.
fn is_of_driver(server: &RedisServer, address: &str) -> bool {
    let clients = server.cli(&["CLIENT", "LIST"]);
    let client = clients.lines().find(|line| line.contains(&format!(" addr={address} ")));
    !client.expect("the connection is open").contains(" sub=0 ")
}

/// Locks until one more runtime than `others` has a connection of its own that serves it.
async fn until_used(server: &RedisServer, pool: &LockPool, others: usize) {
    let key = format!("warm-up:{:?}", thread::current().id());
    eventually_async(SOON, "the runtime has a connection of its own", async || {
        cycle(pool, &key).await;
        used_by_callers(server) > others
    })
    .await;
}

/// A pool with connections to `url`: one of the driver, and those of callers.
fn connect(url: &str) -> LockPool {
    let builder = LockPool::builder(url).ttl(ms(60_000)).wait(SOON);
    current_thread().block_on(builder.connect()).unwrap()
}

#[test]
fn a_connection_ends_with_its_runtime() {
    let server = RedisServer::start();
    let pool = connect(&server.url());
    for runtime in [current_thread(), multi_thread()] {
        runtime.block_on(async {
            // On a worker thread, if there are any.
            let (server, pool) = (&server, pool.clone());
            until_used(server, &pool, 0).await;
            let mut tasks = tokio::task::JoinSet::new();
            for n in 0..16 {
                let pool = pool.clone();
                tasks.spawn(async move {
                    for _ in 0..20 {
                        cycle(&pool, &format!("k{n}")).await;
                    }
                });
            }
            tasks.join_all().await;
            assert_eq!(used_by_callers(server), 1);
        });
        drop(runtime);
        eventually(SOON, "the connection is closed", || used_by_callers(&server) == 0);
    }
    current_thread().block_on(cycle(&pool, "k"));
}

/// The login of each connection, as the server lists it. Versions before 7.2 do not list the name of a library.
fn logins(server: &RedisServer) -> Vec<Vec<String>> {
    const FACTS: [&str; 4] = ["user=", "db=", "lib-name=", "lib-ver="];
    let clients = server.cli(&["CLIENT", "LIST"]);
    let facts = |client: &str| {
        let is_one = |fact: &&str| FACTS.iter().any(|name| fact.starts_with(name));
        client.split(' ').filter(is_one).map(str::to_owned).collect()
    };
    clients.lines().filter(|client| !client.contains(" cmd=client|list ")).map(facts).collect()
}

/// Also with a password that the server does not ask for, a user of their own, and another database.
#[test]
fn connections_of_runtimes_log_in_as_the_one_of_the_driver() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "worker", "on", ">p", "~*", "&*", "+@all"]);
    let address = server.url().trim_start_matches("redis://").to_owned();
    for url in [
        format!("redis://:unasked@{address}"),
        format!("redis://worker:p@{address}/7"),
        format!("redis://{address}?db=3"),
    ] {
        let pool = connect(&url);
        current_thread().block_on(async {
            until_used(&server, &pool, 0).await;
            let logins = logins(&server);
            assert!(logins.len() == 2 && logins[0] == logins[1], "{url}: {logins:?}");
        });
        drop(pool);
        eventually(SOON, "the connections are closed", || logins(&server).is_empty());
    }
}

#[test]
fn some_requests_alone_open_no_connection() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = connect(proxy.url());
    for _ in 0..20 {
        current_thread().block_on(async {
            for _ in 0..10 {
                cycle(&pool, "k").await;
            }
        });
    }
    assert_eq!(proxy.connections(), 1);
}

#[test]
fn a_runtime_that_ends_leaves_its_requests_to_the_driver() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = connect(proxy.url());
    for acquires in [true, false] {
        let runtime = multi_thread();
        runtime.block_on(async {
            until_used(&server, &pool, 0).await;
            let guard = if acquires { None } else { Some(pool.lock("k").acquire().await.unwrap()) };
            proxy.hold(Direction::ToClient);
            let (began, begins) = tokio::sync::oneshot::channel();
            let pool = pool.clone();
            drop(tokio::spawn(async move {
                let request = async {
                    match guard {
                        Some(guard) => guard.release().await.unwrap(),
                        None => drop(pool.lock("k").acquire().await),
                    }
                };
                let mut request = pin!(request);
                assert!(poll_once(request.as_mut()).await.is_none());
                began.send(()).unwrap();
                request.await;
            }));
            begins.await.unwrap();
        });
        if acquires {
            eventually(SOON, "it is granted", || server.cli(&["EXISTS", "k"]) == "1");
        }
        drop(runtime);
        proxy.release_held();
        eventually(SOON, "the lock is free", || server.cli(&["EXISTS", "k"]) == "0");
        current_thread().block_on(cycle(&pool, "k"));
    }
}

/// The answer to its release arrives, and no thread reads it.
#[test]
fn a_blocked_runtime_keeps_no_other_from_its_lock() {
    let server = RedisServer::start();
    let pool = connect(&server.url());
    let (unblock, blocked) = mpsc::channel::<()>();
    let (released, releases) = mpsc::channel();
    thread::scope(|scope| {
        let (server, of_thread) = (&server, pool.clone());
        scope.spawn(move || {
            current_thread().block_on(async {
                until_used(server, &of_thread, 0).await;
                let guard = of_thread.lock("k").acquire().await.unwrap();
                let mut release = pin!(guard.release());
                assert!(poll_once(release.as_mut()).await.is_none());
                // The request is written, and its answer is not read.
                tokio::task::yield_now().await;
                released.send(()).unwrap();
                blocked.recv().unwrap();
                // Of no other owner: the driver has repeated the release.
                release.await.unwrap();
            });
        });
        releases.recv().unwrap();
        current_thread().block_on(cycle(&pool, "k"));
        unblock.send(()).unwrap();
    });
}

/// So many cycles at once that requests travel in batches.
async fn load(pool: &LockPool, cycles: usize) {
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..64 {
        let pool = pool.clone();
        tasks.spawn(async move {
            for _ in 0..cycles {
                let guard = pool.lock(format!("load:{n}")).fencing(false).acquire().await.unwrap();
                guard.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
}

#[test]
fn batches_travel_over_the_connection_of_their_runtime() {
    const CYCLES: usize = 20;
    let server = RedisServer::start();
    let pool = connect(&server.url());
    for runtime in [current_thread(), multi_thread()] {
        runtime.block_on(async {
            until_used(&server, &pool, 0).await;
            load(&pool, CYCLES).await;
            let monitor = Monitor::start(&server);
            load(&pool, CYCLES).await;
            let mut by_connection = HashMap::<Caller, usize>::new();
            let sets = |ran: &Ran| ran.name() == "SET" && ran.args[1].starts_with("load:");
            for ran in monitor.settled().into_iter().filter(sets) {
                *by_connection.entry(ran.by).or_default() += 1;
            }
            let all: usize = by_connection.values().sum();
            assert_eq!(all, 64 * CYCLES);
            let Some((Caller::Client(address), most)) =
                by_connection.iter().max_by_key(|(_, count)| **count)
            else {
                panic!("{by_connection:?}");
            };
            // The driver sends what a thread without processor time has not sent for some milliseconds, and requests travel
            // alone until the first batch.
            assert!(most * 2 > all, "{by_connection:?}");
            assert!(!is_of_driver(&server, address), "{by_connection:?}");
            cycle(&pool, "alone").await;
        });
        drop(runtime);
        eventually(SOON, "the connection is closed", || used_by_callers(&server) == 0);
    }
}

/// Too few for a batch that is sent at once.
const FEW: usize = 7;

fn exist(server: &RedisServer) -> usize {
    let keys: Vec<_> = (0..FEW).map(|n| format!("batch:{n}")).collect();
    let command: Vec<_> = ["EXISTS"].into_iter().chain(keys.iter().map(String::as_str)).collect();
    server.cli(&command).parse().unwrap()
}

/// Acquires that have been polled once, and nothing else of the runtime since.
async fn batch(
    pool: &LockPool,
    count: usize,
) -> Vec<impl Future<Output = Result<LockGuard, LockError>> + Unpin> {
    let mut requests = Vec::new();
    for n in 0..count {
        let mut request = Box::pin(pool.lock(format!("batch:{n}")).acquire());
        assert!(poll_once(request.as_mut()).await.is_none());
        requests.push(request);
    }
    requests
}

/// The task that sends them cannot run.
#[test]
fn a_batch_of_a_blocked_runtime_is_sent_by_the_driver() {
    let server = RedisServer::start();
    let pool = connect(&server.url());
    current_thread().block_on(async {
        until_used(&server, &pool, 0).await;
        load(&pool, 20).await;
        let requests = batch(&pool, FEW).await;
        eventually(SOON, "all are granted", || exist(&server) == FEW);
        for acquiring in requests {
            drop(acquiring.await.unwrap());
        }
        eventually(SOON, "all are free", || exist(&server) == 0);
    });
}

/// Their guards are dropped, and nothing of the runtime runs since. The next owners are on another one.
#[test]
fn releases_of_a_blocked_runtime_are_sent_by_the_driver() {
    const MANY: usize = 64;
    let server = RedisServer::start();
    let builder = LockPool::builder(server.url()).ttl(ms(60_000)).request_timeout(ms(30_000));
    let pool = current_thread().block_on(builder.connect()).unwrap();
    current_thread().block_on(async {
        until_used(&server, &pool, 0).await;
        load(&pool, 20).await;
        let mut guards = Vec::new();
        for n in 0..MANY {
            guards.push(pool.lock(format!("dropped:{n}")).acquire().await.unwrap());
        }
        // Enough for a batch that is sent at once, so that large ones are expected.
        let requests = batch(&pool, 2 * FEW).await;
        drop(guards);
        // A release that this runtime had sent would be answered when its thread goes on.
        let others = async {
            for n in 0..MANY {
                let request = pool.lock(format!("dropped:{n}")).wait(SOON);
                drop(request.acquire().await.unwrap());
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| current_thread().block_on(others));
        });
        drop(requests);
    });
}

#[test]
fn a_batch_of_a_runtime_that_has_ended_is_sent_by_the_driver() {
    let server = RedisServer::start();
    let pool = connect(&server.url());
    let runtime = current_thread();
    let requests: Vec<_> = runtime.block_on(async {
        until_used(&server, &pool, 0).await;
        load(&pool, 20).await;
        batch(&pool, FEW).await
    });
    drop(runtime);
    eventually(SOON, "all are granted", || exist(&server) == FEW);
    let guards: Vec<_> = current_thread().block_on(async {
        let mut guards = Vec::new();
        for acquiring in requests {
            guards.push(acquiring.await.unwrap());
        }
        guards
    });
    drop(guards);
    eventually(SOON, "all are free", || exist(&server) == 0);
}

/// A thread that does other work between two calls of `block_on` reads no answers.
#[test]
fn a_guard_that_is_dropped_is_released_by_the_driver() {
    let server = RedisServer::start();
    let builder = LockPool::builder(server.url()).ttl(ms(60_000)).request_timeout(ms(20_000));
    let pool = current_thread().block_on(builder.connect()).unwrap();
    let runtime = current_thread();
    runtime.block_on(async {
        until_used(&server, &pool, 0).await;
        drop(pool.lock("k").acquire().await.unwrap());
    });
    eventually(ms(10_000), "the lock is free", || server.cli(&["EXISTS", "k"]) == "0");
    drop(runtime);
}

#[test]
fn the_runtimes_of_one_pool_exclude_each_other() {
    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).wait(Wait::Forever);
    let pool = current_thread().block_on(pool.connect()).unwrap();
    let (is_inside, last) = (AtomicBool::new(false), Mutex::new(None));
    let runtimes = [current_thread(), multi_thread(), current_thread(), multi_thread()];
    for (n, runtime) in runtimes.iter().enumerate() {
        runtime.block_on(until_used(&server, &pool, n));
    }
    thread::scope(|scope| {
        for runtime in &runtimes {
            let (pool, is_inside, last) = (&pool, &is_inside, &last);
            scope.spawn(move || {
                runtime.block_on(async {
                    for _ in 0..200 {
                        let guard = pool.lock("k").acquire().await.unwrap();
                        assert!(!is_inside.swap(true, Ordering::SeqCst));
                        let before = last.lock().unwrap().replace(guard.fence());
                        assert!(guard.fence() > before.flatten());
                        tokio::task::yield_now().await;
                        assert!(is_inside.swap(false, Ordering::SeqCst));
                        guard.release().await.unwrap();
                    }
                });
            });
        }
    });
}

/// The clock would jump while the connection is opened.
#[tokio::test(start_paused = true)]
async fn a_runtime_with_a_paused_clock_gets_no_connection() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let url = proxy.url().to_owned();
    let pool = thread::spawn(move || connect(&url)).join().unwrap();
    for _ in 0..200 {
        cycle(&pool, "k").await;
    }
    assert_eq!(proxy.connections(), 1);
}

/// tokio panics where the connection is opened.
#[test]
fn a_runtime_without_io_uses_the_connection_of_the_driver() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = connect(proxy.url());
    let runtimes = [
        Builder::new_current_thread().build(),
        Builder::new_current_thread().enable_time().build(),
        Builder::new_multi_thread().build(),
    ];
    // That of the driver, and an attempt for each runtime.
    let connections = 1 + runtimes.len();
    for runtime in runtimes {
        runtime.unwrap().block_on(async {
            for _ in 0..500 {
                cycle(&pool, "k").await;
            }
        });
    }
    assert_eq!(proxy.connections(), connections);
}

#[test]
fn a_pool_may_have_one_connection_only() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let one = LockPool::builder(proxy.url()).connection_per_runtime(false);
    let pool = current_thread().block_on(one.connect()).unwrap();
    current_thread().block_on(async {
        for _ in 0..500 {
            cycle(&pool, "k").await;
        }
    });
    assert_eq!(proxy.connections(), 1);
}

/// The destructors of thread-local values run where no runtime context can be entered any more.
#[test]
fn a_thread_ends_with_a_guard_and_its_runtime() {
    thread_local! {
        static LAST: RefCell<Option<(LockGuard, LockPool, Runtime)>> = const { RefCell::new(None) };
    }
    let server = RedisServer::start();
    let pool = connect(&server.url());
    for shares_its_pool in [true, false] {
        let of_thread = if shares_its_pool { pool.clone() } else { connect(&server.url()) };
        thread::scope(|scope| {
            scope.spawn(|| {
                // Initialised before the values of the client library, so dropped after them.
                LAST.with(|_| ());
                let runtime = current_thread();
                runtime.block_on(until_used(&server, &of_thread, 0));
                let guard = runtime.block_on(of_thread.lock("k").acquire()).unwrap();
                LAST.set(Some((guard, of_thread, runtime)));
            });
        });
        eventually(SOON, "the lock is free", || server.cli(&["EXISTS", "k"]) == "0");
        eventually(SOON, "the connection is closed", || used_by_callers(&server) == 0);
        current_thread().block_on(cycle(&pool, "k"));
    }
}

/// As behind a name with a new address.
#[test]
fn a_connection_that_leads_to_another_server_is_not_used() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::start(&server);
    let pool = connect(proxy.url());
    proxy.redirect(other.port());
    current_thread().block_on(async {
        eventually_async(SOON, "connections are tried", async || {
            cycle(&pool, "k").await;
            proxy.connections() > 2
        })
        .await;
    });
    let calls = other.cli(&["INFO", "commandstats"]);
    assert!(!calls.contains("cmdstat_evalsha") && !calls.contains("cmdstat_set:"), "{calls}");
    assert!(server.cli(&["INFO", "commandstats"]).contains("cmdstat_evalsha"));
}

#[test]
fn a_lost_reply_on_the_connection_of_a_runtime_is_made_up_for_by_the_driver() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = connect(proxy.url());
    current_thread().block_on(async {
        for cut in [false, true] {
            until_used(&server, &pool, 0).await;
            until_the_next_fence_is_a_script().await;
            let action = || if cut { Action::CutBeforeReply } else { Action::DropReply };
            let trap = proxy.on_next(named("EVALSHA"), action());
            let guard = pool.lock("k").acquire().await.unwrap();
            assert!(trap.sprung());
            let trap = proxy.on_next(named("EVALSHA"), action());
            guard.release().await.unwrap();
            assert!(trap.sprung());
            assert_eq!(server.cli(&["EXISTS", "k"]), "0");
        }
    });
}

#[test]
fn a_demoted_master_is_left() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::start(&server);
    let pool = connect(proxy.url());
    current_thread().block_on(async {
        until_used(&server, &pool, 0).await;
        proxy.redirect(other.port());
        server.cli(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        let guard = pool.lock("k").acquire().await.unwrap();
        assert_eq!(other.cli(&["EXISTS", "k"]), "1");
        guard.release().await.unwrap();
        assert_eq!(used_by_callers(&server), 0);
        until_used(&other, &pool, 0).await;
    });
}

#[test]
fn a_pool_that_is_dropped_closes_the_connections_of_all_runtimes() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let runtimes = [current_thread(), multi_thread()];
    for ends in [
        |pool: LockPool| drop(pool),
        |pool: LockPool| {
            current_thread().block_on(pool.shutdown(SOON));
        },
    ] {
        let pool = connect(proxy.url());
        for (n, runtime) in runtimes.iter().enumerate() {
            runtime.block_on(until_used(&server, &pool, n));
        }
        ends(pool);
        eventually(SOON, "all connections are closed", || proxy.open_connections() == 0);
    }
}
