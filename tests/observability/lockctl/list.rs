//! `lockctl ls`, `watch` and `bench`.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use lock_tests::lockctl::{lockctl, run};
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, RedisCluster, RedisServer, eventually, eventually_some};
use serde_json::Value;

#[tokio::test]
async fn locks_are_listed_with_their_holders() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let guards = pool.lock_all(["order:1", "order:2", "stock:1"]).acquire().await.unwrap();
    let owner = pool.snapshot().held[0].owner.to_string();
    let url = server.url();
    let listed = run(lockctl(["ls", "order:*", "--url", &url]));
    let json = listed.json();
    let locks = json["locks"].as_array().unwrap();
    assert_eq!((listed.code, locks.len(), &json["complete"]), (0, 2, &true.into()), "{json:#}");
    assert_eq!(
        (&locks[1]["key"], &locks[1]["holder"]["owner"]),
        (&"order:2".into(), &owner.as_str().into())
    );
    let text = run(lockctl(["ls", "--limit", "1", "--text", "--url", &url])).stdout;
    let lines: Vec<_> = text.lines().collect();
    assert!(
        lines.len() == 3 && lines[0].starts_with("KEY ") && lines[2].contains("--limit"),
        "{text}"
    );
    assert!(lines[1].starts_with("order:1 ") && lines[1].contains(&owner), "{text}");
    guards.release().await.unwrap();
}

/// The keys of each reading of `watch`, until `until` of them.
fn watch(url: &str, interval: &str, mut until: impl FnMut(&[Value]) -> bool) {
    let mut command = lockctl(["watch", "--interval", interval, "--url", url]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines {
        let reading: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if until(reading["locks"].as_array().unwrap()) {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_holder_shows_and_goes() {
    let server = RedisServer::start();
    a_holder_shows_and_goes(&server.url(), "100ms").await;
}

/// A reading at intervals comes far behind the deadlines.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_the_store_reports_shows_at_once() {
    let (redis, cluster) = (RedisServer::start(), RedisCluster::start());
    let (etcd, root) = EtcdServer::shared();
    for url in
        [redis.url(), format!("{}?scripts=off", redis.url()), cluster.url(), etcd.url_of(&root)]
    {
        a_holder_shows_and_goes(&url, "5m").await;
    }
}

async fn a_holder_shows_and_goes(url: &str, interval: &'static str) {
    // The program is built before any time counts.
    assert_eq!(run(lockctl(["--version"])).code, 0);
    let pool = patient(url, ms(20_000)).await;
    let url = url.to_owned();
    let (acquire, acquired) = std::sync::mpsc::channel();
    let watching = tokio::task::spawn_blocking(move || {
        let mut seen = 0;
        watch(&url, interval, |locks| {
            match (seen, locks.len()) {
                // Free, held, and free again.
                (0, 0) | (1, 1) => {
                    seen += 1;
                    acquire.send(()).unwrap();
                }
                (2, 0) => seen += 1,
                _ => {}
            }
            seen == 3
        });
    });
    let acquired = tokio::task::spawn_blocking(move || {
        acquired.recv().unwrap();
        acquired
    });
    let acquired = joined("the first reading", acquired).await;
    let guard = pool.lock("order:1").fencing(false).acquire().await.unwrap();
    let acquired = tokio::task::spawn_blocking(move || acquired.recv().unwrap());
    joined("the holder shows", acquired).await;
    guard.release().await.unwrap();
    joined("it goes", watching).await;
}

#[test]
fn costs_are_measured_and_nothing_is_left() {
    let server = RedisServer::start();
    let (etcd, root) = EtcdServer::shared();
    for url in [server.url(), etcd.url_of(&root)] {
        let measured = run(lockctl(["bench", &url, "--time", "300ms", "--tasks", "4"]));
        assert_eq!(measured.code, 0, "{measured:?}");
        let json = measured.json();
        let parts = json["parts"].as_array().unwrap();
        let tasks: Vec<_> = parts.iter().map(|part| part["tasks"].as_u64().unwrap()).collect();
        assert_eq!(tasks, [1, 4, 4], "{json:#}");
        for part in parts {
            assert!(part["cycles"].as_u64().unwrap() > 0, "{part:#}");
            assert!(part["p50_us"].as_u64() <= part["p99_us"].as_u64(), "{part:#}");
        }
        let left = run(lockctl(["ls", "--url", &url])).json();
        assert_eq!(left["locks"], Value::Array(Vec::new()));
    }
}

/// A pool has room for 10,000 waiters unless it is told otherwise.
#[test]
fn a_measurement_has_room_for_all_of_its_tasks() {
    let server = RedisServer::start();
    let bench = ["bench", &server.url(), "--time", "50ms", "--tasks", "11000"];
    let ended = run(lockctl(bench));
    assert_eq!(ended.code, 0, "{ended:?}");
    let json = ended.json();
    assert_eq!(json["parts"][2]["tasks"], 11_000, "{json:#}");
}

/// Locks of other tasks are released behind the failure of one.
#[test]
fn nothing_is_left_of_a_measurement_that_fails() {
    let server = RedisServer::start();
    let keys = || server.cli(&["KEYS", "lockctl-bench:*"]);
    let mut bench = lockctl(["bench", &server.url(), "--time", "2s", "--tasks", "64"]);
    let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually(DEADLINE, "several tasks hold a lock", || keys().lines().count() > 8);
    server.cli(&["ACL", "SETUSER", "default", "-set"]);
    let ended = bench.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(String::from_utf8_lossy(&ended.stderr).contains("NOPERM"), "{ended:?}");
    assert_eq!(keys(), "");
}

/// Others are shown all the same.
#[tokio::test]
async fn a_holder_that_is_not_known_is_no_success() {
    let rights = "user worker on >pw ~* &* +@all -pttl (+@all ~order:* ~lock_runtime:*)";
    let server = RedisServer::builder().config_line(rights).start();
    let pool = patient(server.url(), ms(20_000)).await;
    // More than are read at once come before the one that is known.
    let items = (0..40).map(|number| format!("item:{number:02}"));
    let keys = items.chain(["order:1", "stock:1"].map(str::to_owned));
    let guards = pool.lock_all(keys).acquire().await.unwrap();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    let listed = run(lockctl(["ls", "--url", &url]));
    assert_eq!(listed.code, 4, "{listed:?}");
    let json = listed.json();
    assert!(json["locks"][40]["holder"]["owner"].is_string(), "{json:#}");
    let error = &json["locks"][41]["error"];
    assert!(error.as_str().is_some_and(|it| it.contains("pttl")), "{json:#}");
    let text = run(lockctl(["ls", "--text", "--url", &url])).stdout;
    let row = |key, state| text.lines().any(|it| it.starts_with(key) && it.contains(state));
    assert!(row("stock:1 ", " unknown") && row("unknown: ", "pttl"), "{text}");
    // None is known.
    let listed = run(lockctl(["ls", "stock:*", "--url", &url]));
    assert_eq!((listed.code, &listed.json()["complete"]), (1, &true.into()), "{listed:?}");
    guards.release().await.unwrap();
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let server = RedisServer::start();
    let mut watch = lockctl(["watch", "--interval", "10ms", "--url", &server.url()]);
    let mut child = watch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    reader.read_line(&mut String::new()).unwrap();
    drop(reader);
    let has_ended = eventually_some(DEADLINE, "it ends", || child.try_wait().unwrap());
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!((has_ended.code(), &*errors), (Some(0), ""));
}
