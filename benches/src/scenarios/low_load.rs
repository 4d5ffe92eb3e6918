//! The time of one cycle on an idle service: each library locks a hundred times a second, all in turn.

use std::time::{Duration, Instant};

use lock_tests::RedisServer;
use tokio::time::MissedTickBehavior;

use crate::lockers::{BOUND, Locker, OURS, OURS_FENCED};
use crate::report::{Bar, Report};
use crate::stats::percentile;
use crate::{Plan, runtime};

/// The interval between two cycles of one library.
const INTERVAL: Duration = Duration::from_millis(10);

/// The percentiles, and what ours may take of the bound's.
const PERCENTILES: [(f64, &str, f64); 3] =
    [(50.0, "p50", 1.15), (99.0, "p99", 1.5), (99.9, "p99.9", 2.0)];

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report
        .begin("low-load", "a cycle of one of 100 uncontended locks a second, against the bound's");
    let server = RedisServer::start();
    let runtime = runtime();
    let mut subjects = vec![BOUND, OURS, OURS_FENCED];
    if plan.peers {
        subjects.push("rslock");
    }
    let rounds = if plan.quick { 400 } else { 2_000 };
    let mut ratios = vec![vec![Vec::new(); PERCENTILES.len()]; subjects.len()];
    for _ in 0..plan.runs {
        let url = server.url();
        let names = subjects.clone();
        // A spawned task, like a handler of a service.
        let task = runtime.spawn(async move {
            let mut lockers = Vec::new();
            for name in names {
                lockers.push(Locker::connect(name, &url).await);
            }
            cycles(&lockers, rounds).await
        });
        let mut times = runtime.block_on(task).expect("no cycle panics");
        let of = |times: &mut Vec<f64>| PERCENTILES.map(|(percent, ..)| percentile(times, percent));
        let bound = of(&mut times[0]);
        for (subject, times) in times.iter_mut().enumerate() {
            for (at, value) in of(times).into_iter().enumerate() {
                let value = if subject == 0 { value } else { value / bound[at] };
                ratios[subject][at].push(value);
            }
        }
    }
    for (subject, ratios) in subjects.into_iter().zip(ratios) {
        for ((_, name, limit), values) in PERCENTILES.into_iter().zip(ratios) {
            let bar = if subject == OURS { Bar::AtMost(limit) } else { Bar::None };
            let unit = if subject == BOUND { "us" } else { "x bound" };
            report.figure(&format!("{subject}: {name}"), unit, &values, bar);
        }
    }
}

/// Microseconds of each cycle, for each of `lockers`. Between two cycles the process is idle.
async fn cycles(lockers: &[Locker], rounds: usize) -> Vec<Vec<f64>> {
    /// Rounds that open connections and load scripts.
    const WARM_UP: usize = 50;
    let mut times = vec![Vec::with_capacity(rounds); lockers.len()];
    let mut turn = tokio::time::interval(INTERVAL / u32::try_from(lockers.len()).unwrap_or(1));
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for round in 0..WARM_UP + rounds {
        let key = (round % 100).to_string();
        for (locker, times) in lockers.iter().zip(&mut times) {
            turn.tick().await;
            let began = Instant::now();
            locker.section(&key, || {}).await;
            if round >= WARM_UP {
                times.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    times
}
