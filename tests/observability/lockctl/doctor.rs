//! `lockctl doctor`: each thing that it names, provoked on a real server.

use lock_tests::lockctl::{Ended, lockctl, run};
use lock_tests::prelude::*;
use lock_tests::quorum::Quorum;
use lock_tests::server::fit;
use lock_tests::skew::Step;
use lock_tests::{
    EtcdServer, PostgresServer, RedisCluster, RedisServer, Skew, eventually, versions,
};
use serde_json::Value;

fn doctor(url: &str) -> Ended {
    run(lockctl(["doctor", url]))
}

/// The checks that are not good.
fn bad_checks(ended: &Ended) -> Vec<Value> {
    let json = ended.json();
    assert_eq!(json["connected"], true, "{ended:?}");
    let findings = json["findings"].as_array().unwrap();
    assert!(!findings.is_empty());
    let mut bad: Vec<_> = findings.iter().filter(|it| it["verdict"] != "good").cloned().collect();
    let code = match bad.iter().any(|it| it["verdict"] == "bad") {
        true => 1,
        false if bad.is_empty() => 0,
        false => 4,
    };
    assert_eq!(ended.code, code, "{ended:?}");
    // A machine that is busy is slow.
    bad.retain(|it| it["check"] != "latency");
    bad
}

/// One check has led to a warning, with these words in the text and in the remedy.
#[track_caller]
fn warns(url: &str, check: &str, text: &str, remedy: &str) {
    let bad = bad_checks(&doctor(url));
    let [one] = &bad[..] else { panic!("{bad:#?}") };
    is_warning(one, check, text, remedy);
}

/// No lock can be acquired, for this reason.
#[track_caller]
fn is_bad(one: &Value, text: &str) {
    assert_eq!((&one["check"], &one["verdict"]), (&"lock".into(), &"bad".into()), "{one:#}");
    assert!(one["text"].as_str().unwrap().contains(text), "{one:#}");
}

/// No lock can be acquired for the reason `refusal`, and one other check has led to a warning.
#[track_caller]
fn refuses_and_warns(url: &str, refusal: &str, check: &str, text: &str, remedy: &str) {
    let bad = bad_checks(&doctor(url));
    let [lock, other] = &bad[..] else { panic!("{bad:#?}") };
    is_bad(lock, refusal);
    is_warning(other, check, text, remedy);
}

#[track_caller]
fn is_warning(one: &Value, check: &str, text: &str, remedy: &str) {
    assert_eq!((&one["check"], &one["verdict"]), (&check.into(), &"warning".into()), "{one:#}");
    assert!(one["text"].as_str().unwrap().contains(text), "{one:#}");
    assert!(one["remedy"].as_str().unwrap().contains(remedy), "{one:#}");
}

#[test]
fn a_fit_server_is_good() {
    let server = fit().start();
    let ended = doctor(&server.url());
    assert_eq!(bad_checks(&ended), Vec::<Value>::new());
    let checks: Vec<_> = ended.json()["findings"].as_array().unwrap().clone();
    let names: Vec<_> = checks.iter().map(|it| it["check"].as_str().unwrap()).collect();
    let expected = [
        "latency",
        "lock",
        "version",
        "role",
        "eviction",
        "persistence",
        "clock",
        "scripts",
        "tracking",
        "wait queue",
    ];
    assert_eq!(names, expected);
    let text = run(lockctl(["doctor", &server.url(), "--text"])).stdout;
    for name in expected {
        assert!(text.lines().any(|line| line.starts_with(&format!("ok   {name} "))), "{text}");
    }
}

#[test]
fn eviction() {
    let full = fit().arg("maxmemory", "100mb").arg("maxmemory-policy", "allkeys-lru").start();
    warns(&full.url(), "eviction", "`allkeys-lru`", "noeviction");
}

#[test]
fn an_old_version() {
    let server = fit().program(&versions::too_old()).start();
    refuses_and_warns(&server.url(), "syntax error", "version", "version 6.0.9", "upgrade");
}

#[test]
fn no_persistence() {
    // The servers of the harness keep nothing.
    let server = RedisServer::start();
    warns(&server.url(), "persistence", "nothing on disk", "appendonly yes");
    let text = run(lockctl(["doctor", &server.url(), "--text"])).stdout;
    let mut warned = text.lines().skip_while(|line| !line.starts_with("warn persistence"));
    let remedy = warned.nth(1).unwrap();
    assert!(remedy.trim_start().starts_with("-> set `appendonly yes`"), "{text}");
}

#[test]
fn a_replica_given_as_master() {
    let master = RedisServer::start();
    let replica = fit().config_line(&format!("replicaof 127.0.0.1 {}", master.port())).start();
    eventually(DEADLINE, "the replica has its data", || {
        replica.cli(&["INFO", "replication"]).contains("master_link_status:up")
    });
    let (refusal, remedy) = ("read only replica", "point the URL at the master");
    refuses_and_warns(&replica.url(), refusal, "role", "is a replica", remedy);
}

/// Everything else about the server is good.
#[test]
fn a_server_that_grants_no_lock() {
    let full = fit().start();
    full.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let alone = fit().arg("min-replicas-to-write", "1").start();
    let single = fit().start();
    let restricted = fit().config_line("user worker on >pw ~app:* &* +@all").start();
    let restricted = format!("redis://worker:pw@127.0.0.1:{}", restricted.port());
    for (url, text) in [
        (full.url(), "memory"),
        (alone.url(), "NOREPLICAS"),
        (format!("{}?replicas=3", single.url()), "replicas"),
        (restricted, "NOPERM"),
    ] {
        let ended = doctor(&url);
        let bad = bad_checks(&ended);
        is_bad(bad.iter().find(|it| it["check"] == "lock").unwrap(), text);
        let lines = run(lockctl(["doctor", &url, "--text"])).stdout;
        assert!(lines.lines().any(|line| line.starts_with("bad  lock ")), "{lines}");
    }
}

#[test]
fn a_clock_that_is_off_by_five_seconds() {
    for (step, word) in [(Step::Forward, "ahead of"), (Step::Back, "behind")] {
        let (server, skew) = Skew::start(fit());
        skew.step(ms(5_000), step);
        warns(&server.url(), "clock", word, "synchronise");
        let ended = doctor(&server.url());
        let text = bad_checks(&ended)[0]["text"].as_str().unwrap().to_owned();
        let seconds = text.split(" s ").next().unwrap().rsplit(' ').next().unwrap();
        let seconds: f64 = seconds.parse().unwrap();
        // The way of the answer counts, too.
        assert!((3.5..6.5).contains(&seconds), "{text}");
    }
}

#[test]
fn no_scripts() {
    let server = fit()
        .config_line("user worker on >pw ~* &* +@all -eval -evalsha -script -fcall -function")
        .start();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    warns(&url, "scripts", "runs no scripts", "allow `EVAL` and `EVALSHA`");
}

#[test]
fn no_tracking() {
    let server = fit().config_line("user worker on >pw ~* &* +@all -client|tracking").start();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    warns(&url, "tracking", "reports no changes of keys", "CLIENT TRACKING");
}

#[test]
fn no_channels() {
    let server = fit().config_line("user worker on >pw ~* resetchannels +@all").start();
    let url = format!("redis://worker:pw@127.0.0.1:{}", server.port());
    warns(&url, "wait queue", "no wait queues", "lock_runtime:*");
}

#[test]
fn what_the_login_may_not_read_is_unknown() {
    let may = "+@all -info -config";
    let server = fit().config_line(&format!("user worker on >pw ~* &* {may}")).start();
    let ended = doctor(&format!("redis://worker:pw@127.0.0.1:{}", server.port()));
    let bad = bad_checks(&ended);
    assert!(bad.iter().all(|it| it["verdict"] == "unknown"), "{bad:#?}");
    let names: Vec<_> = bad.iter().map(|it| it["check"].as_str().unwrap()).collect();
    assert_eq!(names, ["version", "role", "eviction", "persistence"]);
}

/// Without it an append-only file may be flushed once a second.
#[test]
fn how_often_the_file_is_flushed_is_unknown_without_the_right_to_read_it() {
    let server = fit().config_line("user worker on >pw ~* &* +@all -config").start();
    let ended = doctor(&format!("redis://worker:pw@127.0.0.1:{}", server.port()));
    let bad = bad_checks(&ended);
    let names: Vec<_> = bad.iter().map(|it| (&it["check"], &it["verdict"])).collect();
    assert_eq!(names, [(&"persistence".into(), &"unknown".into())], "{bad:#?}");
}

#[test]
fn each_server_of_a_cluster_is_checked() {
    let cluster = RedisCluster::start();
    let ended = doctor(&cluster.url());
    let bad = bad_checks(&ended);
    let masters = cluster.masters();
    assert!(bad.iter().all(|it| it["check"] == "persistence"), "{bad:#?}");
    for master in &masters {
        let at = format!(":{}", master.port());
        let of_it = bad.iter().filter(|it| it["server"].as_str().unwrap().ends_with(&at));
        assert_eq!(of_it.count(), 1, "{bad:#?}");
    }
}

#[test]
fn each_node_of_a_quorum_is_checked() {
    let quorum = Quorum::of(3, &fit());
    assert_eq!(bad_checks(&doctor(&quorum.url())), Vec::<Value>::new());
    quorum[1].cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    quorum[2].kill();
    let bad = bad_checks(&doctor(&quorum.url()));
    let names: Vec<_> = bad.iter().map(|it| it["check"].as_str().unwrap()).collect();
    assert_eq!(names, ["eviction", "quorum"], "{bad:#?}");
}

#[test]
fn other_stores_have_their_warnings() {
    let postgres = PostgresServer::start();
    let ended = doctor(&postgres.url());
    let json = ended.json();
    let (first, others) = json["findings"].as_array().unwrap().split_at(2);
    let names: Vec<_> = first.iter().map(|it| it["check"].as_str().unwrap()).collect();
    assert_eq!(names, ["latency", "lock"]);
    for found in others {
        assert_eq!(found["check"], "store", "{found:#}");
    }
    let (etcd, root) = EtcdServer::shared();
    let bad = bad_checks(&doctor(&etcd.url_of(&root)));
    let is_named = |it: &Value| it["text"].as_str().unwrap().contains("a single member");
    assert!(bad.iter().any(is_named), "{bad:#?}");
}

#[test]
fn a_store_that_is_not_reachable_is_named() {
    let port = lock_tests::server::another_port();
    let url = format!("redis://user:canary@127.0.0.1:{port}");
    let ended = doctor(&url);
    assert_eq!((ended.code, &ended.json()["connected"]), (1, &false.into()), "{ended:?}");
    assert!(ended.json()["error"].as_str().unwrap().contains(&port.to_string()), "{ended:?}");
    assert!(!format!("{ended:?}").contains("canary"));
}
