//! Every example ends well, on memory and on a real server.

use std::time::Duration;

use lock_tests::{Quorum, RedisServer, Worker, eventually, example};

const DEADLINE: Duration = Duration::from_secs(60);

/// Runs the example on memory, and on a server that has no lock left afterwards. The output of each run contains
/// `says`.
#[track_caller]
fn ends_well(name: &str, says: &[&str]) {
    run(name, &[], says);
    let server = RedisServer::start();
    run(name, &[&server.url()], says);
    let taken = server.cli(&["INFO", "commandstats"]);
    assert!(taken.contains("cmdstat_set:"), "{name} took no lock in the store");
    let left = server.cli(&["KEYS", "*"]);
    assert!(left.lines().all(|key| key == "lock_runtime:fence"), "{name} leaves {left}");
}

#[track_caller]
fn run(name: &str, args: &[&str], says: &[&str]) -> String {
    let worker = Worker::start(&example(name), args);
    let status = worker.wait_for_exit(DEADLINE);
    let output = worker.stdout().join("\n");
    assert!(status.success(), "{name} {args:?}: {status}\n{output}\n{:#?}", worker.stderr());
    for words in says {
        assert!(output.contains(words), "{name} {args:?}: {words}?\n{output}");
    }
    output
}

#[test]
fn quickstart() {
    ends_well("quickstart", &["anna is in  order 1", "eve is out of order 2"]);
}

#[test]
fn order_state() {
    ends_well("order_state", &["with the lock  0 of 200", "200 callers learned"]);
}

#[test]
fn batch_dispatcher() {
    ends_well("batch_dispatcher", &["500 tasks were handed out, 500 different ones"]);
}

#[test]
fn scheduled_job() {
    let says = "12 minutes were reported, each once";
    run("scheduled_job", &[], &[says]);
    let server = RedisServer::start();
    // On a busy machine the others may be first at the lock in each minute.
    let dies =
        |_| run("scheduled_job", &[&server.url()], &[says]).contains("instance 0: signal: 6");
    assert!((0..5).any(dies), "instance 0 never gets the lock");
    eventually(DEADLINE, "`min_hold` is over", || {
        server.cli(&["KEYS", "jobs:*"]).trim().is_empty()
    });
}

#[test]
fn cache_stampede() {
    ends_well("cache_stampede", &["without a lock  100 builds", "an expired page 1 build"]);
}

#[test]
fn idempotent_webhook() {
    ends_well("idempotent_webhook", &["of 50 events: 50 payments"]);
}

#[test]
fn graceful_shutdown() {
    ends_well(
        "graceful_shutdown",
        &[
            "3 locks released, 0 left to their ttl",
            "short: done",
            "long: stopped: the lock was released: the pool shut down",
            "all keys are free",
        ],
    );
}

/// What they do is tested in `web_orders`.
#[test]
fn web_services() {
    ["axum_orders", "actix_orders"].into_iter().for_each(web_service);
}

fn web_service(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let args = ["memory://", "0", folder.path().to_str().unwrap()];
    let worker = Worker::start(&example(name), &args);
    worker.wait_for_line(DEADLINE, |line| line.starts_with("listening on "));
    eventually(DEADLINE, "signal handlers are installed", || catches_sigterm(worker.pid()));
    worker.terminate();
    assert!(worker.wait_for_exit(DEADLINE).success());
}

/// An instance of each framework, which share their locks or not.
fn load(urls: [&str; 2]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let names = ["axum_orders", "actix_orders"];
    let instances: [Worker; 2] = std::array::from_fn(|n| {
        Worker::start(&example(names[n]), &[urls[n], "0", folder.path().to_str().unwrap()])
    });
    let addresses = instances.each_ref().map(|instance| {
        let line = instance.wait_for_line(DEADLINE, |line| line.starts_with("listening on "));
        line.trim_start_matches("listening on ").to_owned()
    });
    let load = Worker::start(&example("orders_load"), &["2000", &addresses[0], &addresses[1]]);
    let succeeds = load.wait_for_exit(DEADLINE).success();
    (succeeds, [load.stdout(), load.stderr()].concat().join("\n"))
}

#[test]
fn orders_load() {
    let server = RedisServer::start();
    let url = server.url();
    let (succeeds, says) = load([&url, &url]);
    assert!(succeeds && says.contains("each of 100 orders was settled once"), "{says}");
    // Locks of two processes without a store between them.
    let (succeeds, says) = load(["memory://"; 2]);
    assert!(!succeeds && says.contains("were not settled once"), "{says}");
}

fn catches_sigterm(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & 1 << (15 - 1) != 0)
}

/// On the other stores: see the test program `engines`.
#[test]
fn choose_store() {
    ends_well("choose_store", &["one at a time, and fences have grown", "round trip "]);
    let quorum = Quorum::start(3);
    run("choose_store", &[&quorum.url()], &["redlock: 80 calls in 2 processes, one at a time"]);
}

#[test]
fn redlock_five_nodes() {
    let says = [
        "one is frozen: half of 200 orders are settled",
        "and fences keep growing",
        "a node came back empty, and the lock is held",
        "2 of five gone: settled",
        "3 of five gone: not settled: ",
    ];
    run("redlock_five_nodes", &[], &says);
}

#[test]
fn custom_backend() {
    run("custom_backend", &[], &["the table passes the suite", "day 1 was reported under fence"]);
}
