//! One key, requested by all tasks of a process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_tests::RedisServer;
use tokio::task::JoinSet;

use super::commands_sent;
use super::uncontended::rate;
use crate::lockers::{BOUND, Locker, OURS, OURS_FENCED, PEERS};
use crate::report::{Bar, Report};
use crate::{Plan, runtime};

const TASKS: usize = 64;

struct Run {
    per_second: f64,
    most_over_least: f64,
    longest_wait_ms: f64,
    starved: usize,
    sections: usize,
}

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("hot", "one key, one process, 64 tasks");
    let server = RedisServer::start();
    let runtime = runtime();
    let bound = runtime.block_on(Locker::connect(BOUND, &server.url()));
    let mut subjects = vec![OURS, OURS_FENCED];
    if plan.peers {
        subjects.extend(PEERS);
    }
    for subject in subjects {
        let ours = subject == OURS;
        let bar = |bar: Bar| if ours { bar } else { Bar::None };
        let locker = runtime.block_on(Locker::connect(subject, &server.url()));
        let (mut rates, mut spread, mut waits) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..plan.runs {
            let serial = runtime.block_on(rate(&bound, 1, plan.run() / 3));
            let run = runtime.block_on(contend(&locker, Duration::ZERO, plan.run()));
            rates.push(run.per_second / serial);
            spread.push(run.most_over_least);
            waits.push(run.longest_wait_ms);
        }
        let name = |what: &str| format!("empty body, {subject}: {what}");
        report.figure(&name("sections"), "x serial", &rates, bar(Bar::AtLeast(15.0)));
        report.figure(&name("most/least per task"), "", &spread, bar(Bar::AtMost(1.05)));
        report.figure(&name("longest wait"), "ms", &waits, bar(Bar::AtMost(10.0)));
        if ours {
            let mut sections = 1;
            let commands = commands_sent(&server, || {
                sections =
                    runtime.block_on(contend(&locker, Duration::ZERO, plan.run() / 5)).sections;
            });
            let per_section = commands as f64 / sections as f64;
            report.figure(&name("commands"), "/section", &[per_section], Bar::AtMost(0.05));
        }
        let (mut shares, mut starved) = (Vec::new(), Vec::new());
        for _ in 0..plan.runs {
            let ceiling = ceiling(plan.run() / 3);
            let run = runtime.block_on(contend(&locker, BODY, plan.run()));
            shares.push(run.per_second / ceiling);
            starved.push(run.starved as f64);
        }
        let name = |what: &str| format!("1 ms body, {subject}: {what}");
        report.figure(&name("share of the ceiling"), "", &shares, bar(Bar::AtLeast(0.95)));
        report.figure(&name("tasks that were never served"), "", &starved, bar(Bar::AtMost(0.0)));
    }
}

const BODY: Duration = Duration::from_millis(1);

/// Bodies per second without a lock, in sequence.
fn ceiling(length: Duration) -> f64 {
    let began = Instant::now();
    let mut bodies = 0_u32;
    while began.elapsed() < length {
        std::thread::sleep(BODY);
        bodies += 1;
    }
    f64::from(bodies) / began.elapsed().as_secs_f64()
}

async fn contend(locker: &Locker, body: Duration, length: Duration) -> Run {
    let began = Instant::now();
    let gate = Arc::new(tokio::sync::Barrier::new(TASKS));
    let mut set = JoinSet::new();
    for _ in 0..TASKS {
        let (locker, gate) = (locker.clone(), gate.clone());
        set.spawn(async move {
            gate.wait().await;
            // Sections that end after the window only let the tasks finish; they are not counted.
            let (mut in_time, mut sections, mut longest) = (0_usize, 0_usize, Duration::ZERO);
            while began.elapsed() < length {
                let asked = Instant::now();
                let (entered, at) = std::sync::mpsc::channel();
                let run = move || {
                    let _ = entered.send(Instant::now());
                    if !body.is_zero() {
                        std::thread::sleep(body);
                    }
                };
                locker.section("hot", run).await;
                longest = longest.max(at.recv().expect("the body has run") - asked);
                sections += 1;
                in_time += usize::from(began.elapsed() < length);
            }
            (in_time, sections, longest)
        });
    }
    let tasks = set.join_all().await;
    let in_time: Vec<usize> = tasks.iter().map(|(in_time, ..)| *in_time).collect();
    let (least, most) = (in_time.iter().min().copied(), in_time.iter().max().copied());
    let waits = tasks.iter().map(|(.., wait)| wait.as_secs_f64() * 1e3);
    Run {
        per_second: in_time.iter().sum::<usize>() as f64 / length.as_secs_f64(),
        most_over_least: most.unwrap_or(0) as f64 / least.unwrap_or(0).max(1) as f64,
        longest_wait_ms: waits.fold(0.0, f64::max),
        starved: in_time.iter().filter(|count| **count == 0).count(),
        sections: tasks.iter().map(|(_, sections, _)| sections).sum(),
    }
}
