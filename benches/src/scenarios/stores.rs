//! The stores beside each other, and beside locks of other libraries on the same servers.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use lock_tests::foreign;
use lock_tests::{EtcdServer, MysqlServer, PostgresServer, RedisServer, ZooKeeperServer};

use super::between::run_workers;
use super::handoff::gaps;
use crate::Plan;
use crate::lockers::{OURS, SHEDLOCK};
use crate::report::{Bar, Report};
use crate::stats::percentile;
use crate::worker::{Keys, Work, Worker};

const TASKS: usize = 64;

/// One store, with what is expected of it.
struct Store<'a> {
    name: &'a str,
    url: String,
    handoff_ms: Bar,
    cycles: Bar,
}

/// A lock of another library.
enum Peer {
    /// In Rust, at this URL.
    Locker(&'static str, String),
    /// A program.
    Foreign(Command),
}

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin(
        "stores",
        "durable servers on this machine, one node each; 1 ms bodies in hand-offs",
    );
    let redis = RedisServer::start();
    let store = |name, url, handoff_ms: f64, cycles: f64| Store {
        name,
        url,
        handoff_ms: Bar::AtMost(handoff_ms),
        cycles: Bar::AtLeast(cycles),
    };
    of_one(plan, report, &store("Redis", redis.url(), 0.25, 5000.0), None);
    let postgres = PostgresServer::builder().setting("fsync", "on").start();
    let peer = Peer::Locker(SHEDLOCK, postgres.url());
    let of = store("PostgreSQL", postgres.url(), 6.0, 5000.0);
    of_one(plan, report, &of, Some((SHEDLOCK, peer)));
    drop(postgres);
    let mysql = MysqlServer::builder().durable().start();
    let peer = Peer::Locker(SHEDLOCK, mysql.url());
    let of = store("MariaDB", mysql.url(), 25.0, 5000.0);
    of_one(plan, report, &of, Some((SHEDLOCK, peer)));
    drop(mysql);
    let etcd = EtcdServer::start();
    let of = store("etcd", etcd.url(), 4.0, 2500.0);
    let peer = go_mutex(&etcd).map(|it| ("Go's concurrency.Mutex", Peer::Foreign(it)));
    of_one(plan, report, &of, peer);
    drop(etcd);
    let zookeeper = ZooKeeperServer::builder().property("zookeeper.forceSync", "yes").start();
    let of = Store { cycles: Bar::None, ..store("ZooKeeper", zookeeper.url(), 4.0, 0.0) };
    let peer = ("Curator", Peer::Foreign(curator(&zookeeper)));
    of_one(plan, report, &of, Some(peer));
}

fn of_one(plan: Plan, report: &mut Report, store: &Store<'_>, peer: Option<(&str, Peer)>) {
    let url = store.url.as_str();
    let name = format!("{}, {OURS}", store.name);
    let start = |work: Work<'_>, log: &Path| {
        Worker::sections(Work { locker: OURS, url, ..work }, log, false)
    };
    figures(plan, report, &name, start, (store.handoff_ms, store.cycles));
    match peer.filter(|_| plan.peers) {
        Some((library, peer)) => {
            let name = format!("{}, {library}", store.name);
            let start = |work: Work<'_>, log: &Path| match &peer {
                Peer::Locker(locker, url) => {
                    Worker::sections(Work { locker, url, ..work }, log, false)
                }
                Peer::Foreign(program) => Worker::foreign(program, work, log),
            };
            figures(plan, report, &name, start, (Bar::None, Bar::None));
        }
        None => report.note(&format!("{}: no other library here", store.name)),
    }
}

fn figures(
    plan: Plan,
    report: &mut Report,
    name: &str,
    start: impl Fn(Work<'_>, &Path) -> Worker,
    (handoff_ms, cycles): (Bar, Bar),
) {
    let work = |tasks, body, keys| Work { locker: "", url: "", tasks, body, ttl: None, keys };
    // Programs in Java and Go are slow at first.
    let warm_up = Duration::from_secs(1);
    let (mut halves, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..plan.runs {
        let one = work(1, Duration::from_millis(1), Keys::Shared);
        let sections = run_workers(|log| start(one, log), 2, warm_up, plan.run());
        let mut gaps = gaps(&sections, |a, b| a.process != b.process);
        halves.push(percentile(&mut gaps, 50.0) / 1e3);
        let all = work(TASKS, Duration::ZERO, Keys::Own);
        let sections = run_workers(|log| start(all, log), 1, warm_up, plan.run());
        rates.push(sections.len() as f64 / plan.run().as_secs_f64());
    }
    report.figure(&format!("{name}: hand-off, p50"), "ms", &halves, handoff_ms);
    report.figure(&format!("{name}: {TASKS} tasks and keys"), "cycles/s", &rates, cycles);
}

/// Built by Go, if that is installed.
fn go_mutex(server: &EtcdServer) -> Option<Command> {
    let program = std::env::temp_dir().join("lock-benches-etcd-mutex");
    let built = Command::new("go")
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/foreign/etcd"))
        .args(["build", "-o"])
        .arg(&program)
        .arg("./mutex")
        .status();
    built.ok().filter(|status| status.success())?;
    let mut command = Command::new(program);
    command.args([format!("127.0.0.1:{}", server.port()), "bench".into()]);
    Some(command)
}

fn curator(server: &ZooKeeperServer) -> Command {
    let libraries = foreign::installed("zookeeper").join("*");
    let mut command = Command::new("java");
    command.args(["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp"]).arg(libraries);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/foreign/zookeeper/Mutex.java"));
    command.args([format!("127.0.0.1:{}", server.port()), "/bench".into()]);
    command
}
