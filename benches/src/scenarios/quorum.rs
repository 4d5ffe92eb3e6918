//! Five independent servers, all up and with one frozen; and a growing number of tasks on three and on five.

use std::time::{Duration, Instant};

use lock_runtime::{LockPool, Wait};
use lock_tests::Quorum;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::uncontended::rate;
use crate::lockers::Locker;
use crate::report::{Bar, Report};
use crate::stats::percentile;
use crate::{Plan, runtime};

const NODES: usize = 5;

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    crowds(plan, report);
    report.begin("quorum", "five servers");
    let quorum = Quorum::start(NODES);
    let runtime = runtime();
    let pool = runtime.block_on(LockPool::connect(&quorum.url())).expect("the nodes are reachable");
    let ours = Locker::Ours(pool.clone());
    if plan.peers {
        let urls = quorum.nodes().iter().map(lock_tests::RedisServer::url).collect();
        let rslock = Locker::Rslock(rslock::LockManager::new(urls));
        for tasks in [1, 64] {
            let (mut rates, mut ratios) = (Vec::new(), Vec::new());
            for run in 0..=plan.runs {
                let of_peer = runtime.block_on(rate(&rslock, tasks, plan.run() / 2));
                let of_ours = runtime.block_on(rate(&ours, tasks, plan.run() / 2));
                // The first pair warms up.
                if run > 0 {
                    rates.push(of_ours);
                    ratios.push(of_ours / of_peer);
                }
            }
            report.figure(&format!("{tasks} tasks: ours"), "cycles/s", &rates, Bar::None);
            let name = format!("{tasks} tasks: ours against rslock");
            report.figure(&name, "x", &ratios, Bar::AtLeast(1.3));
        }
    }
    let mut seen = Seen::default();
    for run in 0..=plan.runs {
        let all_up = runtime.block_on(cycles(&pool, plan.run() / 3));
        let frozen = &quorum[run % NODES];
        frozen.pause();
        let one_frozen = runtime.block_on(cycles(&pool, plan.run() / 3));
        frozen.resume();
        // Until it has processed all requests that were sent to it.
        lock_tests::eventually(Duration::from_secs(30), "the frozen node is back", || {
            frozen.cli(&["PING"]) == "PONG"
        });
        if run > 0 {
            seen.add(all_up, one_frozen);
        }
    }
    let Seen { acquire, cycle } = seen;
    for (what, spans) in [("acquire", acquire), ("cycle", cycle)] {
        let [up, ratio, p99] = spans;
        report.figure(&format!("{what}, all up, p50"), "us", &up, Bar::None);
        let name = format!("{what}, one frozen, p50 against all up");
        report.figure(&name, "x", &ratio, Bar::AtMost(1.15));
        report.figure(&format!("{what}, one frozen, p99"), "ms", &p99, Bar::AtMost(2.0));
    }
}

/// Numbers of tasks. Each task has keys of its own.
const CROWDS: [usize; 4] = [64, 256, 1024, 4096];

/// The throughput with a growing number of tasks.
fn crowds(plan: Plan, report: &mut Report) {
    report.begin("quorum", "cycles per second of more and more tasks, each with its own keys");
    let runs = if plan.quick { 1 } else { plan.runs };
    for nodes in [3, NODES] {
        let quorum = Quorum::start(nodes);
        let runtime = runtime();
        let pool =
            runtime.block_on(LockPool::connect(&quorum.url())).expect("the nodes are reachable");
        let urls = quorum.nodes().iter().map(lock_tests::RedisServer::url).collect();
        let rslock = Crowd::Rslock(rslock::LockManager::new(urls));
        let ours = |fencing| Crowd::Ours { pool: pool.clone(), fencing };
        for (name, crowd) in [("ours", ours(false)), ("ours, fenced", ours(true))] {
            crowd.measure(&format!("{nodes} nodes, {name}"), &runtime, runs, report);
        }
        if plan.peers {
            rslock.measure(&format!("{nodes} nodes, rslock"), &runtime, runs, report);
        }
        quorum[1].pause();
        for (name, crowd) in [("ours", ours(false)), ("ours, fenced", ours(true))] {
            let name = format!("{nodes} nodes, one frozen, {name}");
            crowd.measure(&name, &runtime, runs, report);
        }
        quorum[1].resume();
    }
}

/// The store of a number of tasks.
#[derive(Clone)]
enum Crowd {
    Ours { pool: LockPool, fencing: bool },
    Rslock(rslock::LockManager),
}

impl Crowd {
    fn measure(&self, name: &str, runtime: &Runtime, runs: usize, report: &mut Report) {
        let mut fewer = None;
        for tasks in CROWDS {
            let (mut rates, mut errors) = (Vec::new(), Vec::new());
            for _ in 0..runs {
                let (rate, failed) = runtime.block_on(self.rate(tasks));
                rates.push(rate);
                errors.push(failed);
            }
            let is_ours = matches!(self, Self::Ours { .. });
            let bar = |bar| if is_ours { bar } else { Bar::None };
            let rate =
                report.figure(&format!("{tasks} tasks: {name}"), "cycles/s", &rates, Bar::None);
            if let Some(fewer) = fewer.replace(rate) {
                let name = format!("{tasks} tasks: {name}, against fewer");
                report.figure(&name, "x", &[rate / fewer], bar(Bar::AtLeast(0.8)));
            }
            let name = format!("{tasks} tasks: {name}, errors");
            report.figure(&name, "", &errors, bar(Bar::AtMost(0.0)));
        }
    }

    /// Cycles per second, and the number of failed cycles.
    async fn rate(&self, tasks: usize) -> (f64, f64) {
        /// Some cycles of the largest number of tasks.
        const LENGTH: Duration = Duration::from_millis(1500);
        let began = Instant::now();
        let mut set = JoinSet::new();
        for id in 0..tasks {
            let crowd = self.clone();
            set.spawn(async move {
                let keys = [0, 1, 2, 3].map(|n| format!("{id}:{n}"));
                let (mut cycles, mut errors) = (0_usize, 0_usize);
                while began.elapsed() < LENGTH {
                    let is_well = crowd.cycle(&keys[cycles % keys.len()]).await;
                    cycles += 1;
                    errors += usize::from(!is_well);
                }
                (cycles, errors)
            });
        }
        let (cycles, errors): (Vec<_>, Vec<_>) = set.join_all().await.into_iter().unzip();
        let (cycles, errors) = (cycles.iter().sum::<usize>(), errors.iter().sum::<usize>());
        ((cycles - errors) as f64 / began.elapsed().as_secs_f64(), errors as f64)
    }

    async fn cycle(&self, key: &str) -> bool {
        match self {
            Self::Ours { pool, fencing } => {
                let lock = pool.lock(key).fencing(*fencing).wait(Wait::Forever).acquire().await;
                match lock {
                    Ok(guard) => guard.release().await.is_ok(),
                    Err(_) => false,
                }
            }
            Self::Rslock(manager) => {
                let ttl = Duration::from_secs(30);
                match manager.acquire_no_guard(key.as_bytes(), ttl).await {
                    Ok(lock) => {
                        manager.unlock(&lock).await;
                        true
                    }
                    Err(_) => false,
                }
            }
        }
    }
}

/// Of acquires and of whole cycles: p50 all up, p50 with one frozen against it, p99 with one frozen.
#[derive(Default)]
struct Seen {
    acquire: [Vec<f64>; 3],
    cycle: [Vec<f64>; 3],
}

impl Seen {
    fn add(&mut self, all_up: [Vec<f64>; 2], one_frozen: [Vec<f64>; 2]) {
        let places = [&mut self.acquire, &mut self.cycle];
        for ((place, mut up), mut frozen) in places.into_iter().zip(all_up).zip(one_frozen) {
            let all_up = percentile(&mut up, 50.0);
            place[0].push(all_up);
            place[1].push(percentile(&mut frozen, 50.0) / all_up);
            place[2].push(percentile(&mut frozen, 99.0) / 1e3);
        }
    }
}

/// Microseconds of acquires, and of whole cycles, in sequence.
async fn cycles(pool: &LockPool, length: Duration) -> [Vec<f64>; 2] {
    let began = Instant::now();
    let (mut acquires, mut cycles) = (Vec::new(), Vec::new());
    while began.elapsed() < length {
        let asked = Instant::now();
        let guard = pool.lock("quorum").fencing(false).acquire().await;
        let guard = guard.expect("a majority is up");
        acquires.push(asked.elapsed().as_secs_f64() * 1e6);
        guard.release().await.expect("a majority is up");
        cycles.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    [acquires, cycles]
}
