//! The test harness itself, on real servers.

#![allow(clippy::disallowed_methods)]

use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use lock_tests::monitor::Caller;
use lock_tests::proxy::{Action, Direction, named, nutcracker};
use lock_tests::server::fit;
use lock_tests::tls::{Authority, Tls};
use lock_tests::versions::{self, Make};
use lock_tests::{FaultProxy, Monitor, RedisServer, Worker, eventually, eventually_async};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisError, Value};

const SOON: Duration = Duration::from_secs(30);
const A_MOMENT: Duration = Duration::from_millis(100);

async fn connect(url: &str) -> Result<MultiplexedConnection, RedisError> {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(SOON));
    redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&config).await
}

async fn set(redis: &mut MultiplexedConnection, key: &str) -> Result<String, RedisError> {
    redis::cmd("SET").arg(key).arg("1").query_async(redis).await
}

async fn is_never_answered<T>(reply: impl Future<Output = T>) -> bool {
    tokio::time::timeout(A_MOMENT, reply).await.is_err()
}

#[test]
fn servers_are_apart() {
    let (one, two) = (RedisServer::start(), RedisServer::start());
    assert_ne!(one.port(), two.port());
    assert_eq!(one.cli(&["SET", "k", "v"]), "OK");
    assert_eq!(one.cli(&["GET", "k"]), "v");
    assert_eq!(two.cli(&["GET", "k"]), "(nil)");
    assert_eq!(one.cli(&["DEL", "k"]), "1");
    assert!(two.cli(&["LPOP"]).starts_with("ERR wrong number"));
}

#[test]
fn a_hundred_servers_find_ports() {
    let start = || std::thread::spawn(|| (0..25).for_each(|_| drop(RedisServer::start())));
    let threads: Vec<_> = (0..4).map(|_| start()).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
#[should_panic(expected = "Bad directive")]
fn a_server_that_cannot_start_shows_its_log() {
    RedisServer::builder().arg("no-such-directive", "1").start();
}

#[test]
fn a_paused_server_answers_nothing_until_resumed() {
    let server = RedisServer::start();
    let mut waiting = server.connect().unwrap();
    server.pause();
    assert!(server.is_running());
    std::io::Write::write_all(&mut waiting, b"PING\r\n").unwrap();
    waiting.set_read_timeout(Some(A_MOMENT)).unwrap();
    let mut pong = [0; 7];
    assert!(std::io::Read::read_exact(&mut waiting, &mut pong).is_err());
    server.resume();
    waiting.set_read_timeout(Some(SOON)).unwrap();
    std::io::Read::read_exact(&mut waiting, &mut pong).unwrap();
    assert_eq!(&pong, b"+PONG\r\n");
}

#[test]
fn a_killed_server_refuses_and_comes_back_without_its_data() {
    let server = RedisServer::start();
    let (url, pid) = (server.url(), server.pid());
    server.cli(&["SET", "k", "v"]);
    server.kill();
    assert!(!server.is_running());
    assert!(TcpStream::connect(("127.0.0.1", server.port())).is_err());
    server.restart();
    assert_eq!((server.url(), server.cli(&["GET", "k"])), (url, "(nil)".into()));
    assert_ne!(server.pid(), pid);
}

#[test]
fn a_server_with_a_synced_file_comes_back_with_its_data() {
    let server = fit().start();
    server.cli(&["SET", "k", "v"]);
    server.pause();
    server.restart();
    assert_eq!(server.cli(&["GET", "k"]), "v");
}

#[tokio::test]
async fn a_password_is_required_and_stands_in_the_url() {
    let server = RedisServer::builder().password("p@ss/w:rd%").start();
    assert_eq!(server.cli(&["PING"]), "PONG");
    connect(&server.url()).await.unwrap();
    let bare = format!("redis://127.0.0.1:{}", server.port());
    let error = set(&mut connect(&bare).await.unwrap(), "k").await.unwrap_err();
    assert_eq!(error.code(), Some("NOAUTH"));
    let proxy = FaultProxy::start(&server);
    set(&mut connect(proxy.url()).await.unwrap(), "k").await.unwrap();
}

#[test]
fn tls_is_served_with_our_authority_and_client_certificates() {
    let authority = Authority::new();
    let tls = Tls::new(&authority).require_client_certificate();
    let server = RedisServer::builder().tls(tls).start();
    let files = server.tls_files();
    let ping = |port: u16, extra: &[&Path]| {
        let mut cli = std::process::Command::new("redis-cli");
        cli.args(["--tls", "-h", "127.0.0.1", "-p"]).arg(port.to_string());
        cli.arg("--cacert").arg(&files.authority);
        if let [certificate, key] = extra {
            cli.arg("--cert").arg(certificate).arg("--key").arg(key);
        }
        let output = cli.arg("PING").output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let port = server.tls_port().unwrap();
    assert_eq!(server.url(), format!("rediss://127.0.0.1:{port}"));
    assert_eq!(ping(port, &[&files.client_certificate, &files.client_key]), "PONG");
    assert_ne!(ping(port, &[]), "PONG");
    assert_eq!(server.cli(&["PING"]), "PONG");

    let tls = Tls::new(&authority).server(authority.issue_expired(&["127.0.0.1"]));
    let expired = RedisServer::builder().tls(tls).start();
    assert_ne!(ping(expired.tls_port().unwrap(), &[]), "PONG");

    let sound = RedisServer::builder().tls(Tls::new(&authority)).start();
    assert_eq!(ping(sound.tls_port().unwrap(), &[]), "PONG");
    let opaque = FaultProxy::to_port(sound.tls_port().unwrap());
    assert_eq!(ping(opaque.port(), &[]), "PONG");
    assert_eq!((opaque.connections(), opaque.commands()), (1, 0));
}

/// The server, the worker that holds it, and its directory.
fn a_held_server(ends_by: &str) -> (Worker, u32, String) {
    let worker = Worker::start(env!("CARGO_BIN_EXE_hold-server"), &[ends_by]);
    let line = worker.wait_for_line(SOON, |line| line.contains("lock-tests-"));
    let mut words = line.split(' ');
    let pid = words.next().unwrap().parse().unwrap();
    (worker, pid, words.nth(1).unwrap().into())
}

fn is_alive(pid: u32) -> bool {
    // A zombie has no command line.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
fn no_server_outlives_a_panicking_test() {
    let (worker, pid, dir) = a_held_server("panic");
    assert_eq!(worker.wait_for_exit(SOON).code(), Some(101));
    assert!(worker.stderr().iter().any(|line| line.contains("as told")));
    assert!(!is_alive(pid));
    assert!(!Path::new(&dir).exists());
}

#[test]
fn no_server_outlives_a_killed_test() {
    let (worker, pid, dir) = a_held_server("wait");
    assert!(is_alive(pid));
    worker.pause();
    worker.kill();
    eventually(SOON, "the server ends with its test", || !is_alive(pid));
    // Also of a killed process.
    eventually(SOON, "its folder is removed", || !Path::new(&dir).exists());
}

#[test]
fn a_worker_is_asked_to_end() {
    let (worker, pid, dir) = a_held_server("wait");
    worker.terminate();
    assert!(worker.wait_for_exit(SOON).code().is_none());
    eventually(SOON, "the server ends with its worker", || !is_alive(pid));
    eventually(SOON, "its folder is removed", || !Path::new(&dir).exists());
}

#[test]
fn the_monitor_has_seen_all_when_settled() {
    let server = RedisServer::start();
    server.cli(&["SET", "before", "1"]);
    let monitor = Monitor::start(&server);
    for n in 0..100 {
        server.cli(&["SET", "k", &n.to_string()]);
    }
    let script = "return redis.call('INCR', KEYS[1])";
    server.cli(&["EVAL", script, "1", "fence"]);
    let ran = monitor.settled();
    assert_eq!(ran.len(), 102);
    assert!(ran[99].is("SET", "99") && matches!(ran[99].by, Caller::Client(_)));
    assert!(ran[100].is("EVAL", script));
    assert!(ran[101].is("INCR", "fence") && ran[101].by == Caller::Script);
    assert_eq!(monitor.settled().len(), 102);
}

#[tokio::test]
async fn a_faultless_proxy_changes_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(&format!("{}/?protocol=resp3", proxy.url())).await.unwrap();
    let handshake = proxy.commands();
    let (big, list) = ("x".repeat(1 << 20), ["a", "b", "c"]);
    let (echo, pushed, range): (String, i64, Vec<String>) = redis::pipe()
        .cmd("ECHO")
        .arg(&big)
        .cmd("RPUSH")
        .arg("list")
        .arg(&list)
        .cmd("LRANGE")
        .arg("list")
        .arg(0)
        .arg(-1)
        .query_async(&mut redis)
        .await
        .unwrap();
    assert!(echo == big && pushed == 3 && range == list);
    assert_eq!((proxy.connections(), proxy.commands() - handshake), (1, 3));
    drop(redis);
    eventually_async(SOON, "the connection ends", async || proxy.open_connections() == 0).await;
}

#[tokio::test]
async fn a_lost_reply_takes_the_rest_of_its_connection_with_it() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    let trap = proxy.drop_reply_of(2);
    set(&mut redis, "a").await.unwrap();
    assert!(!trap.sprung());
    assert!(is_never_answered(set(&mut redis, "b")).await);
    trap.wait(SOON);
    assert_eq!(server.cli(&["GET", "b"]), "1");
    assert!(is_never_answered(set(&mut redis, "c")).await);
    set(&mut connect(proxy.url()).await.unwrap(), "d").await.unwrap();
    drop(redis);
    eventually_async(SOON, "both connections end", async || proxy.open_connections() == 0).await;
}

#[tokio::test]
async fn a_connection_is_cut_before_the_reply_or_before_the_command() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    proxy.cut_before_reply_of(1);
    let error = set(&mut redis, "ran").await.unwrap_err();
    assert!(error.is_connection_dropped(), "{error:?}");
    assert_eq!(server.cli(&["GET", "ran"]), "1");

    let mut redis = connect(proxy.url()).await.unwrap();
    let trap = proxy.on_next(|command| command.mentions("never"), Action::CutBeforeForward);
    set(&mut redis, "other").await.unwrap();
    let error = set(&mut redis, "never").await.unwrap_err();
    assert!(error.is_connection_dropped() && trap.sprung(), "{error:?}");
    assert_eq!(server.cli(&["GET", "never"]), "(nil)");
    set(&mut connect(proxy.url()).await.unwrap(), "never").await.unwrap();
}

#[tokio::test]
async fn a_held_request_lands_after_its_client_has_gone() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    let trap = proxy.on_next(named("set"), Action::HoldRequest);
    assert!(is_never_answered(set(&mut redis, "late")).await);
    drop(redis);
    trap.wait(SOON);
    assert_eq!(server.cli(&["GET", "late"]), "(nil)");
    proxy.release_held();
    eventually_async(SOON, "the request lands", async || server.cli(&["GET", "late"]) == "1").await;
    eventually_async(SOON, "the connection ends", async || proxy.open_connections() == 0).await;
}

#[tokio::test]
async fn a_held_reply_comes_late() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    let trap = proxy.on_next(named("SET"), Action::HoldReply);
    let mut copy = redis.clone();
    let reply = tokio::spawn(async move { set(&mut copy, "k").await });
    eventually_async(SOON, "the server has answered", async || trap.sprung()).await;
    assert_eq!(server.cli(&["GET", "k"]), "1");
    tokio::time::sleep(A_MOMENT).await;
    assert!(!reply.is_finished());
    proxy.release_held();
    reply.await.unwrap().unwrap();
    set(&mut redis, "k").await.unwrap();
}

#[tokio::test]
async fn what_clients_send_while_it_is_held_is_known() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    set(&mut redis, "before").await.unwrap();
    // The second key is `late` in hexadecimal digits.
    for (key, text) in [("order:1", "order:1"), ("6c617465", "late")] {
        proxy.hold(Direction::ToServer);
        assert!(!proxy.has_held("order:1") && !proxy.has_held("before"));
        let mut copy = redis.clone();
        let setting = tokio::spawn(async move { set(&mut copy, key).await });
        eventually_async(SOON, "the command is held", async || proxy.has_held(text)).await;
        proxy.release_held();
        setting.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_direction_is_held_and_released_in_order() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    for (direction, on_server) in [(Direction::ToServer, "(nil)"), (Direction::ToClient, "1")] {
        server.cli(&["DEL", "k"]);
        let before = proxy.commands();
        proxy.hold(direction);
        let incr = |mut redis: MultiplexedConnection| async move {
            redis::cmd("INCR").arg("k").query_async::<i64>(&mut redis).await
        };
        let first = tokio::spawn(incr(redis.clone()));
        eventually_async(SOON, "it is sent", async || proxy.commands() == before + 1).await;
        let arrived = async || server.cli(&["GET", "k"]) == on_server;
        eventually_async(SOON, "it gets as far as it may", arrived).await;
        tokio::time::sleep(A_MOMENT).await;
        assert_eq!(server.cli(&["GET", "k"]), on_server);
        assert!(!first.is_finished());
        let second = tokio::spawn(incr(redis.clone()));
        eventually_async(SOON, "it is sent", async || proxy.commands() == before + 2).await;
        proxy.release_held();
        assert_eq!((first.await.unwrap().unwrap(), second.await.unwrap().unwrap()), (1, 2));
    }
    set(&mut redis, "k").await.unwrap();
}

#[tokio::test]
async fn a_delay_is_per_direction_and_keeps_the_throughput() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let redis = connect(proxy.url()).await.unwrap();
    proxy.delay(Direction::ToServer, Duration::from_millis(80));
    proxy.delay(Direction::ToClient, Duration::from_millis(40));
    let start = Instant::now();
    let sets: Vec<_> = (0..50)
        .map(|n| {
            let mut redis = redis.clone();
            tokio::spawn(async move { set(&mut redis, &n.to_string()).await })
        })
        .collect();
    for set in sets {
        set.await.unwrap().unwrap();
    }
    let took = start.elapsed().as_millis();
    // One after the other they would take six seconds.
    assert!((120..3000).contains(&took), "{took} ms");
    proxy.delay(Direction::ToServer, Duration::ZERO);
    proxy.delay(Direction::ToClient, Duration::ZERO);
    let mut fastest = Duration::MAX;
    for _ in 0..20 {
        let start = Instant::now();
        set(&mut redis.clone(), "k").await.unwrap();
        fastest = fastest.min(start.elapsed());
    }
    assert!(fastest < Duration::from_millis(80), "{fastest:?}");
}

#[tokio::test]
async fn cut_resets_what_is_there_and_refuse_what_comes() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    set(&mut redis, "k").await.unwrap();
    proxy.refuse(true);
    set(&mut redis, "k").await.unwrap();
    assert!(connect(proxy.url()).await.is_err());
    proxy.cut();
    assert!(set(&mut redis, "k").await.unwrap_err().is_connection_dropped());
    proxy.refuse(false);
    set(&mut connect(proxy.url()).await.unwrap(), "k").await.unwrap();
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn a_killed_server_is_a_closed_connection_behind_the_proxy_too() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    server.kill();
    assert!(set(&mut redis, "k").await.is_err());
    assert!(connect(proxy.url()).await.is_err());
    server.restart();
    set(&mut connect(proxy.url()).await.unwrap(), "k").await.unwrap();
}

/// Pushes and confirmations stand between replies and must not be counted as such.
#[tokio::test]
async fn pushes_are_no_replies() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let (pushes, mut pushed) = tokio::sync::mpsc::unbounded_channel();
    let config = AsyncConnectionConfig::new().set_push_sender(pushes);
    let client = redis::Client::open(format!("{}/?protocol=resp3", proxy.url())).unwrap();
    let mut redis = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
    let run = |redis: &MultiplexedConnection, words: &'static str| {
        let mut redis = redis.clone();
        async move {
            let mut words = words.split(' ');
            let mut command = redis::cmd(words.next().unwrap());
            for word in words {
                command.arg(word);
            }
            command.query_async::<Value>(&mut redis).await
        }
    };
    run(&redis, "CLIENT TRACKING ON").await.unwrap();
    redis.subscribe(&["news", "weather"]).await.unwrap();
    run(&redis, "GET k").await.unwrap();
    server.cli(&["SET", "k", "2"]);
    server.cli(&["PUBLISH", "news", "none"]);
    let mut kinds = Vec::new();
    while kinds.len() < 4 {
        kinds.push(tokio::time::timeout(SOON, pushed.recv()).await.unwrap().unwrap().kind);
    }
    assert!(kinds.contains(&redis::PushKind::Invalidate), "{kinds:?}");
    assert!(kinds.contains(&redis::PushKind::Message), "{kinds:?}");
    // If a push had been taken for a reply, this would cut one command late.
    proxy.cut_before_reply_of(2);
    assert_eq!(run(&redis, "GET k").await.unwrap(), Value::BulkString(b"2".into()));
    let error = run(&redis, "INCR k").await.unwrap_err();
    assert!(error.is_connection_dropped(), "{error:?}");
    assert_eq!(server.cli(&["GET", "k"]), "3");
}

#[tokio::test]
async fn a_proxy_hangs_up_on_what_it_does_not_know() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let mut redis = connect(proxy.url()).await.unwrap();
    proxy.know_only(nutcracker);
    assert_eq!(set(&mut redis, "k").await.unwrap(), "OK");
    assert_eq!(proxy.hang_ups(), 0);
    let script = |keys| redis::cmd("EVAL").arg("return 1").arg(keys).arg("k").clone();
    assert_eq!(script(1).query_async::<u64>(&mut redis).await.unwrap(), 1);
    let error = script(0).query_async::<u64>(&mut redis).await.unwrap_err();
    assert!(error.is_connection_dropped(), "{error}");
    assert_eq!(proxy.hang_ups(), 1);
    assert_eq!(server.cli(&["INFO", "commandstats"]).matches("cmdstat_eval:calls=1,").count(), 1);
}

#[test]
fn every_installed_version_starts_by_its_path() {
    for version in versions::installed() {
        let server = RedisServer::builder().program(&version.program).start();
        let info = server.cli(&["INFO", "server"]);
        let (major, minor) = version.number;
        let name = match version.make {
            Make::Redis => "redis_version",
            Make::Valkey => "valkey_version",
        };
        assert!(info.contains(&format!("{name}:{major}.{minor}.")), "{version}: {info}");
    }
}
