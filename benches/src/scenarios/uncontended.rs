//! Cycles of an uncontended lock, each task with its own key.

use std::time::{Duration, Instant};

use lock_tests::RedisServer;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::lockers::{BOUND, Locker, OURS, OURS_FENCED, OURS_IN_BACKGROUND, PEERS};
use crate::report::{Bar, Report};
use crate::stats::median;
use crate::{Plan, runtime};

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report
        .begin("uncontended", "cycles per second against the bound's, each task with its own key");
    let server = RedisServer::start();
    let two_threads = [(1, 0.65), (64, 1.0), (1024, 1.4)];
    compare(plan, report, &server, &runtime(), "", &two_threads);
    let one_thread = Builder::new_current_thread().enable_all().build();
    let one_thread = one_thread.expect("a runtime can be started");
    compare(plan, report, &server, &one_thread, "one thread, ", &[(16, 0.65), (64, 1.0)]);
}

/// Compares at these numbers of tasks, each with the bar of ours. `on` names the runtime.
fn compare(
    plan: Plan,
    report: &mut Report,
    server: &RedisServer,
    runtime: &Runtime,
    on: &str,
    tasks: &[(usize, f64)],
) {
    let mut subjects = vec![OURS, OURS_FENCED, OURS_IN_BACKGROUND];
    if plan.peers {
        subjects.extend(PEERS);
    }
    let bound = runtime.block_on(Locker::connect(BOUND, &server.url()));
    for &(tasks, bar) in tasks {
        let mut bounds = Vec::new();
        for subject in &subjects {
            let locker = runtime.block_on(Locker::connect(subject, &server.url()));
            let mut ratios = Vec::new();
            // The first pair warms up.
            for run in 0..=plan.runs {
                let of_bound = runtime.block_on(rate(&bound, tasks, plan.run() / 3));
                let of_subject = runtime.block_on(rate(&locker, tasks, plan.run() / 3));
                if run > 0 {
                    bounds.push(of_bound);
                    ratios.push(of_subject / of_bound);
                }
            }
            let bar = if *subject == OURS { Bar::AtLeast(bar) } else { Bar::None };
            report.figure(&format!("{on}{tasks} tasks: {subject}"), "x bound", &ratios, bar);
        }
        let bound = median(bounds);
        report.figure(&format!("{on}{tasks} tasks: {BOUND}"), "cycles/s", &[bound], Bar::None);
    }
}

/// Cycles per second of `tasks` tasks.
pub(crate) async fn rate(locker: &Locker, tasks: usize, length: Duration) -> f64 {
    let began = Instant::now();
    let mut set = JoinSet::new();
    for id in 0..tasks {
        let locker = locker.clone();
        set.spawn(async move {
            // Not the same key twice in a row: a release in the background may still be in transit.
            let keys = [0, 1, 2, 3].map(|n| format!("{id}:{n}"));
            let mut cycles = 0_u32;
            while began.elapsed() < length {
                locker.section(&keys[cycles as usize % keys.len()], || {}).await;
                cycles += 1;
            }
            cycles
        });
    }
    let cycles: u32 = set.join_all().await.iter().sum();
    f64::from(cycles) / began.elapsed().as_secs_f64()
}
