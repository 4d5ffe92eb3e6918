//! From the release by one holder to the entry of the next.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use lock_runtime::{LockPool, Wait};
use lock_tests::RedisServer;
use rustix::process::Signal;

use super::between::run;
use crate::lockers::{BOUND, Bare, Locker, OURS, PEERS};
use crate::report::{Bar, Report};
use crate::stats::percentile;
use crate::worker::{Keys, Section, Work, Worker};
use crate::{Plan, clock, runtime};

const BODY: Duration = Duration::from_millis(1);

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("handoff", "from release to entry, 1 ms bodies");
    let server = RedisServer::start();
    let cold = cold_cycle(plan, &server);
    let cold = report.figure("cold cycle of the bound, p50", "us", &cold, Bar::None);

    same_process(plan, report, &server);
    two_processes(plan, report, &server, cold);
    idle(plan, report, &server, OURS);
    if plan.peers {
        for peer in PEERS {
            idle(plan, report, &server, peer);
        }
    }
    deleted(plan, report, &server, cold);
    foreign(plan, report, &server, cold);
    faults(plan, report, &server);
}

/// Cycles of the bound after a pause of 20 to 150 ms each, so that caches are cold.
fn cold_cycle(plan: Plan, server: &RedisServer) -> Vec<f64> {
    let runtime = runtime();
    let bound = runtime.block_on(Locker::connect(BOUND, &server.url()));
    let one_run = || {
        let mut cycles: Vec<f64> = (0..20)
            .map(|_| {
                std::thread::sleep(pause());
                runtime.block_on(async {
                    let bound = bound.clone();
                    let cycle = tokio::spawn(async move {
                        let began = clock::now();
                        bound.section("cold", || {}).await;
                        micros(began, clock::now())
                    });
                    cycle.await.expect("the server answers")
                })
            })
            .collect();
        percentile(&mut cycles, 50.0)
    };
    (0..plan.runs).map(|_| one_run()).collect()
}

fn pause() -> Duration {
    Duration::from_millis(fastrand::u64(20..150))
}

fn micros(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e3
}

fn same_process(plan: Plan, report: &mut Report, server: &RedisServer) {
    let url = server.url();
    let work =
        Work { locker: OURS, url: &url, tasks: 4, body: BODY, ttl: None, keys: Keys::Shared };
    let (mut halves, mut worst) = (Vec::new(), Vec::new());
    for _ in 0..plan.runs {
        let (sections, _) = run(work, 1, plan.run());
        let mut gaps = gaps(&sections, |_, _| true);
        halves.push(percentile(&mut gaps, 50.0));
        worst.push(percentile(&mut gaps, 99.0));
    }
    report.figure("same process, p50", "us", &halves, Bar::AtMost(40.0));
    report.figure("same process, p99", "us", &worst, Bar::AtMost(80.0));
}

/// Two processes that always request the lock.
fn two_processes(plan: Plan, report: &mut Report, server: &RedisServer, cold: f64) {
    let url = server.url();
    let work =
        Work { locker: OURS, url: &url, tasks: 1, body: BODY, ttl: None, keys: Keys::Shared };
    let (mut halves, mut worst) = (Vec::new(), Vec::new());
    for _ in 0..plan.runs {
        let (sections, _) = run(work, 2, plan.run());
        let mut gaps = gaps(&sections, |a, b| a.process != b.process);
        halves.push(percentile(&mut gaps, 50.0));
        worst.push(percentile(&mut gaps, 99.0));
    }
    let half = report.figure("between processes, p50", "us", &halves, Bar::AtMost(250.0));
    report.figure("between processes, p99", "us", &worst, Bar::AtMost(600.0));
    let name = "between processes, p50 in cold cycles";
    report.figure(name, "", &[half / cold], Bar::AtMost(1.0));
}

/// One process holds the lock for a while, another waits. The holder does not request it again before the waiter is
/// served: with polling libraries the holder would mostly win.
fn idle(plan: Plan, report: &mut Report, server: &RedisServer, of: &str) {
    let runtime = runtime();
    let one_run = || {
        runtime.block_on(async {
            let holder = Locker::connect(of, &server.url()).await;
            let waiter = Locker::connect(of, &server.url()).await;
            let mut woken = Vec::new();
            for n in 0..20 {
                let key = format!("idle:{n}");
                let (entered, has_entered) = tokio::sync::oneshot::channel();
                let (holder, waiter) = (holder.clone(), waiter.clone());
                let held_for = pause();
                let holding = {
                    let key = key.clone();
                    tokio::spawn(async move {
                        let (released, at) = std::sync::mpsc::channel();
                        let body = move || {
                            let _ = entered.send(());
                            std::thread::sleep(held_for);
                            let _ = released.send(clock::now());
                        };
                        holder.section(&key, body).await;
                        at.recv().expect("the body has run")
                    })
                };
                has_entered.await.expect("the lock is free");
                let (entered, at) = std::sync::mpsc::channel();
                let body = move || {
                    let _ = entered.send(clock::now());
                };
                let waiting = tokio::spawn(async move { waiter.section(&key, body).await });
                let released = holding.await.expect("it lets go");
                waiting.await.expect("it gets the lock");
                woken.push(micros(released, at.recv().expect("the body has run")));
            }
            percentile(&mut woken, 50.0)
        })
    };
    let runs: Vec<f64> = (0..plan.runs).map(|_| one_run()).collect();
    report.figure(&format!("to one that waits, p50: {of}"), "us", &runs, Bar::None);
}

/// From the end of each section to the beginning of the next, in microseconds.
pub(crate) fn gaps(sections: &[Section], counts: impl Fn(&Section, &Section) -> bool) -> Vec<f64> {
    let pairs = sections.windows(2).filter(|pair| counts(&pair[0], &pair[1]));
    pairs.map(|pair| micros(pair[0].left, pair[1].entered)).collect()
}

/// The lock of another library that is freed by a plain `DEL`.
fn deleted(plan: Plan, report: &mut Report, server: &RedisServer, cold: f64) {
    let runtime = runtime();
    let runs: Vec<f64> = (0..plan.runs)
        .map(|_| {
            runtime.block_on(async {
                let bare = Bare::connect(&server.url()).await;
                let mut woken = Vec::new();
                for n in 0..20 {
                    let key = format!("deleted:{n}");
                    bare.take(&key).await;
                    let waiting = waiter(&server.url(), &key).await;
                    tokio::time::sleep(pause()).await;
                    let released = clock::now();
                    bare.delete(&key).await;
                    woken.push(micros(released, waiting.await.expect("it gets the lock")));
                }
                percentile(&mut woken, 50.0)
            })
        })
        .collect();
    let name = "from a plain DEL, p50 in cold cycles";
    report.figure(
        name,
        "",
        &runs.iter().map(|run| run / cold).collect::<Vec<_>>(),
        Bar::AtMost(1.3),
    );
}

/// A task that waits for `key` and sends the time of its entry.
async fn waiter(url: &str, key: &str) -> tokio::task::JoinHandle<u64> {
    let pool = LockPool::connect(url).await.expect("the server is reachable");
    let key = key.to_owned();
    tokio::spawn(async move {
        let request = pool.lock(key).wait(Wait::Forever).fencing(false);
        request.run(async { clock::now() }).await.expect("a wait forever ends well")
    })
}

/// Locks of libraries in other languages, if they are installed.
fn foreign(plan: Plan, report: &mut Report, server: &RedisServer, cold: f64) {
    if !plan.peers {
        return;
    }
    for (library, command) in [("redis-py", python()), ("node-redlock", node())] {
        let Some(command) = command else {
            report.note(&format!("{library}: left out, it is not available here"));
            continue;
        };
        let runs = from_foreign(plan, server, command, library);
        let name = format!("from {library}, p50 in cold cycles");
        report.figure(
            &name,
            "",
            &runs.iter().map(|run| run / cold).collect::<Vec<_>>(),
            Bar::AtMost(1.3),
        );
    }
}

fn from_foreign(plan: Plan, server: &RedisServer, mut command: Command, key: &str) -> Vec<f64> {
    command.arg(server.port().to_string()).arg(key);
    let mut holder = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the holder can be started");
    let mut input = holder.stdin.take().expect("it is piped");
    let mut output = BufReader::new(holder.stdout.take().expect("it is piped"));
    let runtime = runtime();
    let mut runs = Vec::new();
    for _ in 0..plan.runs {
        let mut woken = Vec::new();
        for _ in 0..20 {
            let mut ask = || {
                writeln!(input, "go").expect("the holder listens");
                let mut line = String::new();
                output.read_line(&mut line).expect("the holder speaks");
                line.trim().to_owned()
            };
            assert_eq!(ask(), "held");
            let waiting = runtime.block_on(waiter(&server.url(), key));
            std::thread::sleep(pause());
            let released: u64 = ask().parse().expect("nanoseconds");
            let entered = runtime.block_on(waiting).expect("it gets the lock");
            woken.push(micros(released, entered));
            // Released before the next request of the holder.
            std::thread::sleep(Duration::from_millis(5));
        }
        runs.push(percentile(&mut woken, 50.0));
    }
    drop(input);
    let _ = holder.kill();
    let _ = holder.wait();
    runs
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join("lock-benches").join(name)
}

fn python() -> Option<Command> {
    let folder = scratch("python");
    let install = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--target"])
        .arg(&folder)
        .arg("redis")
        .stderr(Stdio::null())
        .status();
    install.ok().filter(|status| status.success())?;
    let mut command = Command::new("python3");
    command
        .env("PYTHONPATH", folder)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/foreign/holder.py"));
    Some(command)
}

fn node() -> Option<Command> {
    let folder = scratch("node");
    let install = Command::new("npm")
        .args(["install", "--silent", "--prefix"])
        .arg(&folder)
        .args(["redlock@5.0.0-beta.2", "ioredis"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    install.ok().filter(|status| status.success())?;
    let mut command = Command::new("node");
    command
        .env("MODULES", folder)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/foreign/holder.mjs"));
    Some(command)
}

/// The longest time without a running section after a fault of one of four processes.
fn faults(plan: Plan, report: &mut Report, server: &RedisServer) {
    let ttl = Duration::from_millis(1500);
    let killed = |victim: &Worker| victim.signal(Signal::KILL);
    let frozen = |victim: &Worker| {
        victim.signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(1));
        victim.signal(Signal::CONT);
    };
    let runs = fault(plan, server, ttl, BODY, false, &killed);
    report.figure("a waiting process is killed: pause", "ms", &runs, Bar::AtMost(20.0));
    let grant = (ttl / 10).as_secs_f64() * 1e3;
    let runs = fault(plan, server, ttl, BODY, false, &frozen);
    report.figure("a waiting process is frozen: pause", "ms", &runs, Bar::AtMost(grant + 60.0));
    let runs = fault(plan, server, ttl, Duration::from_millis(300), true, &killed);
    let bar = ttl.as_secs_f64() * 1e3 + 50.0;
    report.figure("the holding process is killed: pause", "ms", &runs, Bar::AtMost(bar));
}

/// The longest pauses, for runs in which `strike` met a process inside a section, and for the others.
fn fault(
    plan: Plan,
    server: &RedisServer,
    ttl: Duration,
    body: Duration,
    inside: bool,
    strike: &dyn Fn(&Worker),
) -> Vec<f64> {
    let url = server.url();
    let mut pauses = Vec::new();
    while pauses.len() < plan.runs {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let work =
            Work { locker: OURS, url: &url, tasks: 4, body, ttl: Some(ttl), keys: Keys::Shared };
        let mut workers: Vec<_> = (0..4)
            .map(|n| Worker::sections(work, &folder.path().join(n.to_string()), true))
            .collect();
        let begin = clock::now() + 50_000_000;
        let end = begin + 6_000_000_000;
        for worker in &mut workers {
            worker.go(begin, end);
        }
        std::thread::sleep(Duration::from_millis(fastrand::u64(1000..1500)));
        let struck = clock::now();
        strike(&workers[0]);
        let mut sections: Vec<_> =
            workers.into_iter().enumerate().flat_map(|(n, worker)| worker.finish(n)).collect();
        server.cli(&["FLUSHALL"]);
        let victim_inside = sections.iter().any(|section| {
            section.process == 0
                && section.entered <= struck + 1_000_000
                && (section.left == 0 || section.left > struck)
        });
        if victim_inside != inside {
            continue;
        }
        for section in &mut sections {
            if section.left == 0 {
                section.left = struck;
            }
        }
        sections.sort_by_key(|section| section.entered);
        let around = |pair: &&[Section]| {
            pair[1].entered > struck && pair[1].entered < struck + 4_000_000_000
        };
        let pause = |pair: &[Section]| micros(pair[0].left, pair[1].entered) / 1e3;
        pauses.push(sections.windows(2).filter(around).map(pause).fold(0.0, f64::max));
    }
    pauses
}
