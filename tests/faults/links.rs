//! How a connection is made and kept: over slow links, behind changing names, to servers that close connections.

#![allow(clippy::disallowed_methods)]

use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lock_runtime::{ErrorKind, LockPool};
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, Command, Direction, named};
use lock_tests::{FaultProxy, RedisServer, eventually, eventually_async};

const KEY: &str = "order:42";
/// The limit of immediate effects on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// Each direction takes half of it.
fn round_trip(proxy: &FaultProxy, time: Duration) {
    proxy.delay(Direction::ToServer, time / 2);
    proxy.delay(Direction::ToClient, time / 2);
}

async fn works(pool: &LockPool) {
    pool.lock(KEY).wait(SOON).acquire().await.unwrap().release().await.unwrap();
}

/// `new` has all that `old` has.
fn replicate(old: &RedisServer, new: &RedisServer) {
    new.cli(&["REPLICAOF", "127.0.0.1", &old.port().to_string()]);
    eventually(SOON, "the replica has a copy", || {
        new.cli(&["INFO", "replication"]).contains("master_link_status:up")
    });
}

fn fail_over(old: &RedisServer, new: &RedisServer) {
    new.cli(&["REPLICAOF", "NO", "ONE"]);
    old.cli(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
}

/// Failover by DNS, a virtual address, a Kubernetes service: the old master keeps its connections.
#[tokio::test]
async fn a_master_that_is_demoted_is_left_for_the_one_that_the_address_leads_to() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    replicate(&old, &new);
    let proxy = FaultProxy::start(&old);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    let held = pool.lock("held").ttl(ms(6_000)).acquire().await.unwrap();
    eventually(SOON, "the replica has the lock", || new.cli(&["EXISTS", "held"]) == "1");
    works(&pool).await;
    fail_over(&old, &new);
    proxy.redirect(new.port());
    let began = Instant::now();
    let guard = pool.lock(KEY).wait(SOON).acquire().await.unwrap();
    println!("first success {:?} after the failover", began.elapsed());
    assert_eq!(new.cli(&["EXISTS", KEY]), "1", "it is in the new master");
    guard.release().await.unwrap();
    let mut last = i64::MAX;
    eventually_async(SOON, "the held one is renewed there", async || {
        let left = new.cli(&["PTTL", "held"]).parse().unwrap();
        left > std::mem::replace(&mut last, left)
    })
    .await;
    held.verify().await.unwrap();
    held.release().await.unwrap();
}

/// It copies the data of the new master, and answers `LOADING` until it has them.
#[tokio::test]
async fn a_master_that_loads_the_data_of_another_is_left_too() {
    let config = || RedisServer::builder().arg("enable-debug-command", "yes");
    let old = config().arg("key-load-delay", "5000").arg("repl-diskless-load", "disabled");
    let old = old.arg("loading-process-events-interval-bytes", "1024").start();
    let new = config().start();
    new.cli(&["DEBUG", "POPULATE", "10000", "key", "100"]);
    let proxy = FaultProxy::start(&old);
    // While it loads it answers slowly, which is no reason to leave it.
    let pool = LockPool::builder(proxy.url()).request_timeout(SOON).connect().await.unwrap();
    works(&pool).await;
    // A server that has served for a while.
    tokio::time::sleep(ms(1_100)).await;
    works(&pool).await;
    old.cli(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
    eventually(SOON, "it loads", || old.cli(&["INFO", "persistence"]).contains("\nloading:1"));
    let error = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
    assert!(error.to_string().contains("LOADING"), "{error}");
    proxy.redirect(new.port());
    let began = Instant::now();
    works(&pool).await;
    println!("first success {:?} after the redirect", began.elapsed());
    assert!(old.cli(&["INFO", "persistence"]).contains("\nloading:1"), "it would load for long");
}

/// It serves as soon as it has its data. Until then another connection would not help.
#[tokio::test]
async fn a_server_that_loads_its_own_data_keeps_its_connection() {
    let server = RedisServer::builder()
        .arg("enable-debug-command", "yes")
        // In microseconds. It loads for 60 s, or until the test has seen enough.
        .arg("key-load-delay", "60000")
        .arg("loading-process-events-interval-bytes", "1024")
        .start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::builder(proxy.url()).request_timeout(SOON).connection_per_runtime(false);
    let pool = pool.connect().await.unwrap();
    works(&pool).await;
    server.cli(&["DEBUG", "POPULATE", "1000", "key", "100"]);
    server.cli(&["SAVE"]);
    let server = Arc::new(server);
    let again = Arc::clone(&server);
    let restarted = tokio::task::spawn_blocking(move || again.restart());
    let single = || pool.lock(KEY).wait(Duration::ZERO).acquire();
    let says_loading = async || match single().await {
        Ok(_) => false,
        Err(error) => error.to_string().contains("LOADING"),
    };
    eventually_async(SOON, "the server says LOADING", says_loading).await;
    let (began, before) = (Instant::now(), proxy.connections());
    while began.elapsed() < ms(3_500) {
        assert!(says_loading().await);
        tokio::time::sleep(ms(10)).await;
    }
    assert_eq!(proxy.connections(), before);
    assert_eq!(server.cli(&["CONFIG", "SET", "key-load-delay", "0"]), "OK");
    works(&pool).await;
    restarted.await.unwrap();
}

/// A name that still resolves to the replica is looked up at intervals.
#[tokio::test]
async fn a_replica_is_not_dialled_all_the_time() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    replicate(&old, &new);
    let proxy = FaultProxy::start(&old);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    works(&pool).await;
    fail_over(&old, &new);
    let (began, before) = (Instant::now(), proxy.connections());
    let mut refusals = 0;
    while began.elapsed() < ms(3_000) {
        let error = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
        assert!(error.to_string().contains("READONLY"), "{error}");
        refusals += 1;
        tokio::time::sleep(ms(2)).await;
    }
    let (took, dialled) = (began.elapsed(), proxy.connections() - before);
    println!("{dialled} connections and {refusals} refusals in {took:?}");
    assert!(dialled >= 2, "it is looked for");
    assert!(dialled < 40, "{dialled} connections in {took:?}");
    proxy.redirect(new.port());
    works(&pool).await;
}

#[tokio::test]
async fn a_link_of_half_a_second_is_connected_to_and_survives_a_cut() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    round_trip(&proxy, ms(500));
    let began = Instant::now();
    let pool = LockPool::builder(proxy.url()).request_timeout(ms(2_000)).connect().await.unwrap();
    println!("connected after {:?}", began.elapsed());
    let held = pool.lock("held").ttl(ms(15_000)).acquire().await.unwrap();
    for _ in 0..2 {
        proxy.cut();
        let began = Instant::now();
        works(&pool).await;
        println!("first success {:?} after the cut", began.elapsed());
    }
    held.verify().await.unwrap();
    held.release().await.unwrap();
}

/// With the default request timeout of a second.
#[tokio::test]
async fn a_link_of_300_ms_needs_no_settings() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    round_trip(&proxy, ms(300));
    let began = Instant::now();
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    println!("connected after {:?}", began.elapsed());
    works(&pool).await;
}

/// The TCP connection through the proxy is at once. The log-in, and the questions about the server, are sent without
/// waiting for the answers before.
#[tokio::test]
async fn a_connect_takes_three_round_trips_at_most() {
    const ROUND_TRIP: Duration = ms(1_600);
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    round_trip(&proxy, ROUND_TRIP);
    let began = Instant::now();
    let limit = ROUND_TRIP * 4 - ms(200);
    let pool = LockPool::builder(proxy.url()).connect_timeout(limit).connect().await.unwrap();
    println!("connected after {:?}", began.elapsed());
    pool.shutdown(ms(0)).await;
}

#[tokio::test]
async fn the_setting_for_a_slow_link_is_named_and_works() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    round_trip(&proxy, ms(600));
    let builder =
        |url: String| LockPool::builder(url).connect_timeout(ms(300)).request_timeout(SOON);
    let error = builder(proxy.url().to_owned()).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    for says in ["within 300ms", "TCP connection", "`connect_timeout`", "?connect_timeout=10s"] {
        assert!(error.to_string().contains(says), "{says}: {error}");
    }
    // The URL comes first.
    let pool = builder(format!("{}?connect_timeout=30s", proxy.url())).connect().await.unwrap();
    works(&pool).await;
    let error = LockPool::builder(proxy.url()).connect_timeout(Duration::ZERO).connect().await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Config);
}

/// `wait` bounds the start of further requests. One request always gets the time that it takes.
#[tokio::test]
async fn a_wait_below_the_round_trip_is_enough_for_a_free_lock() {
    const CALLS: u64 = 8;
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    round_trip(&proxy, ms(400));
    let builder = LockPool::builder(proxy.url()).request_timeout(ms(4_000)).wait(ms(100));
    let pool = builder.connect_timeout(SOON).connect().await.unwrap();
    // The pool also adapts to a link that becomes slow. A stall of the machine may cost a call.
    for (link, most) in [(400, 2), (900, 4)] {
        round_trip(&proxy, ms(link));
        let mut failures = 0;
        for n in 0..CALLS {
            match pool.lock(format!("order:{n}")).acquire().await {
                Ok(guard) => guard.release().await.unwrap(),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Backend, "{error}");
                    failures += 1;
                }
            }
        }
        let of = format!("{failures} of {CALLS} free locks");
        println!("{of} were not acquired over a link of {link} ms");
        assert!(failures <= most, "{of} were not acquired over a link of {link} ms");
    }
}

/// Whichever answer is lost.
#[test]
fn a_connect_ends_whatever_is_lost() {
    const LIMIT: Duration = ms(1_500);
    let said = Mutex::new(Vec::new());
    on_each(["", "?scripts=off", "?replicas=1"], async |scripts| {
        for n in 1..12 {
            let server = RedisServer::start();
            let proxy = FaultProxy::start(&server);
            let trap = proxy.drop_reply_of(n);
            let began = Instant::now();
            let url = format!("{}{scripts}", proxy.url());
            let connecting = LockPool::builder(url).connect_timeout(LIMIT).connect();
            let connected = tokio::time::timeout(SOON, connecting).await;
            let Ok(connected) = connected else { panic!("{scripts} {n}: still at it") };
            if !trap.sprung() {
                connected.unwrap();
                break;
            }
            if let Err(error) = connected {
                let text = error.to_string();
                let took = began.elapsed();
                assert!(text.contains("did not answer within 1.5s: "), "{scripts} {n}: {text}");
                assert!(text.contains("`connect_timeout`"), "{scripts} {n}: {text}");
                said.lock().unwrap().push(format!("{scripts} {n} {took:?}: {text}"));
            } else {
                let connected = format!("{scripts} {n} connected after {:?}", began.elapsed());
                said.lock().unwrap().push(connected);
            }
        }
    });
    let said = said.into_inner().unwrap().join("\n");
    println!("{said}");
    for reached in ["no answer over it", "the log-in is answered", "it is connected, and"] {
        assert!(said.contains(reached), "{reached}: {said}");
    }
}

/// Each connection is logged in and closed.
#[tokio::test]
async fn a_server_that_hangs_up_on_its_clients_is_not_dialled_all_the_time() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    works(&pool).await;
    let (began, before) = (Instant::now(), proxy.connections());
    while began.elapsed() < ms(3_000) {
        server.kill_clients();
        tokio::time::sleep(ms(1)).await;
    }
    let (took, dialled) = (began.elapsed(), proxy.connections() - before);
    println!("{dialled} connections in {took:?}");
    assert!(dialled >= 2, "it is tried");
    assert!(dialled < 40, "{dialled} connections in {took:?}");
    let began = Instant::now();
    works(&pool).await;
    println!("first success {:?} after the last kill", began.elapsed());
}

/// As behind a proxy without a server: no request is answered, and the connection is closed.
#[tokio::test]
async fn a_server_that_hangs_up_on_requests_is_not_dialled_all_the_time() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    works(&pool).await;
    proxy.know_only(|command: &Command| !command.is("SET") && !command.is("EVALSHA"));
    let (began, before) = (Instant::now(), proxy.connections());
    while began.elapsed() < ms(3_000) {
        let error = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Backend);
        tokio::time::sleep(ms(2)).await;
    }
    let (took, dialled) = (began.elapsed(), proxy.connections() - before);
    println!("{dialled} connections in {took:?}");
    assert!(dialled < 40, "{dialled} connections in {took:?}");
    proxy.know_only(|_| true);
    let began = Instant::now();
    works(&pool).await;
    println!("first success {:?} after the first answer", began.elapsed());
}

#[tokio::test]
async fn a_server_with_all_its_clients_is_dialled_once_by_each_attempt() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    works(&pool).await;
    let others: Vec<TcpStream> = (0..5).map(|_| server.connect().unwrap()).collect();
    eventually(SOON, "they are connected", || {
        server.cli(&["CLIENT", "LIST"]).lines().count() >= others.len() + 2
    });
    server.cli(&["CONFIG", "SET", "maxclients", "1"]);
    proxy.cut();
    let (began, before) = (Instant::now(), proxy.connections());
    let mut text = String::new();
    while began.elapsed() < ms(3_000) {
        let error = pool.lock(KEY).wait(Duration::ZERO).acquire().await.unwrap_err();
        text = error.to_string();
        tokio::time::sleep(ms(2)).await;
    }
    let (took, dialled) = (began.elapsed(), proxy.connections() - before);
    println!("{dialled} connections in {took:?}; {text}");
    assert!(text.contains("maxclients"), "{text}");
    assert!(dialled < 40, "{dialled} connections in {took:?}");
    server.cli(&["CONFIG", "SET", "maxclients", "1000"]);
    let began = Instant::now();
    works(&pool).await;
    println!("first success {:?} after there is room", began.elapsed());

    // The error of a first attempt contains the reason, too.
    server.cli(&["CONFIG", "SET", "maxclients", "1"]);
    let before = proxy.connections();
    let error = LockPool::connect(proxy.url()).await.unwrap_err();
    assert!(error.to_string().contains("maxclients"), "{error}");
    let dialled = proxy.connections() - before;
    assert!(dialled <= 2, "{dialled} dials");
}

/// It fails within two request timeouts, however many tries were made.
#[tokio::test]
async fn a_release_at_a_frozen_server_fails_in_time() {
    const REQUEST_TIMEOUT: Duration = ms(3_000);
    let server = RedisServer::start();
    let pool =
        LockPool::builder(server.url()).request_timeout(REQUEST_TIMEOUT).connect().await.unwrap();
    let guard = pool.lock(KEY).ttl(ms(60_000)).acquire().await.unwrap();
    server.pause();
    let began = Instant::now();
    let error = guard.release().await.unwrap_err();
    let took = began.elapsed();
    println!("failed after {took:?}: {error}");
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert!(took < REQUEST_TIMEOUT * 29 / 10, "{took:?}");
    server.resume();
    eventually_async(SOON, "it is released all the same", async || {
        server.cli(&["EXISTS", KEY]) == "0"
    })
    .await;
    works(&pool).await;
}

/// A link that breaks during the greeting leaves nothing out: the next connection is greeted in full.
#[tokio::test]
async fn a_server_that_was_known_is_not_taken_for_a_proxy() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let pool = LockPool::connect(proxy.url()).await.unwrap();
    for command in ["HELLO", "SUBSCRIBE", "EVAL"] {
        let trap = proxy.on_next(named(command), Action::CutBeforeForward);
        let before = proxy.connections();
        proxy.cut();
        works(&pool).await;
        assert!(trap.sprung(), "{command}");
        assert_eq!(proxy.connections() - before, 2, "{command}: one that broke, and one more");
        let clients = server.cli(&["CLIENT", "LIST"]);
        assert!(clients.contains("resp=3") && clients.contains("sub=1"), "{command}: {clients}");
    }
}
