//! `lockctl ls`, `watch` and `bench`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use lock_tests::lockctl::{lockctl, run};
use lock_tests::prelude::*;
use lock_tests::{EtcdServer, RedisServer};
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
fn watch(url: &str, mut until: impl FnMut(&[Value]) -> bool) {
    let mut command = lockctl(["watch", "--interval", "100ms", "--url", url]);
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
    // The program is built before any time counts.
    assert_eq!(run(lockctl(["--version"])).code, 0);
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let url = server.url();
    let (acquire, acquired) = std::sync::mpsc::channel();
    let watching = tokio::task::spawn_blocking(move || {
        let mut seen = 0;
        watch(&url, |locks| {
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
    let guard = pool.lock("order:1").acquire().await.unwrap();
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
        let measured = run(lockctl([
            "bench",
            &url,
            "--time",
            "300ms",
            "--tasks",
            "4",
            "--request-timeout",
            "20s",
        ]));
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
