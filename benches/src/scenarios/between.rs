//! One key, requested by several processes.

use std::path::Path;
use std::time::Duration;

use lock_tests::RedisServer;

use super::commands_sent;
use super::uncontended::rate;
use crate::lockers::{BOUND, Locker, OURS, PEERS};
use crate::report::{Bar, Report};
use crate::stats::evenness;
use crate::worker::{Keys, Section, Work, Worker};
use crate::{Plan, clock, runtime};

/// The warm-up, which is not counted.
const WARM_UP: Duration = Duration::from_millis(200);

/// One set-up: the number of processes and tasks, and the expected figures.
struct Setup {
    processes: usize,
    tasks: usize,
    body: Duration,
    busy: Bar,
    /// A multiple of the serial rate of the bound.
    rate: Bar,
    per_process: Bar,
    per_task: Bar,
    longest_wait_ms: Bar,
    commands: Bar,
}

const MILLISECOND: Duration = Duration::from_millis(1);

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("between", "one key, several processes; evenness is least over most");
    let server = RedisServer::start();
    let setups = [
        Setup {
            processes: 4,
            tasks: 16,
            body: MILLISECOND,
            busy: Bar::AtLeast(0.93),
            rate: Bar::None,
            per_process: Bar::AtLeast(0.90),
            per_task: Bar::AtLeast(0.80),
            longest_wait_ms: Bar::AtMost(130.0),
            commands: Bar::AtMost(0.5),
        },
        Setup {
            processes: 4,
            tasks: 16,
            body: Duration::ZERO,
            busy: Bar::None,
            rate: Bar::AtLeast(10.0),
            per_process: Bar::AtLeast(0.85),
            per_task: Bar::None,
            longest_wait_ms: Bar::AtMost(40.0),
            commands: Bar::None,
        },
        few(2, Bar::AtLeast(0.95)),
        few(8, Bar::AtLeast(0.95)),
        Setup {
            processes: 1,
            tasks: 16,
            body: MILLISECOND,
            busy: Bar::AtLeast(0.97),
            rate: Bar::None,
            per_process: Bar::None,
            per_task: Bar::None,
            longest_wait_ms: Bar::None,
            commands: Bar::AtMost(0.02),
        },
    ];
    for setup in &setups {
        measure_one(plan, report, &server, setup, OURS);
    }
    if plan.peers {
        for peer in PEERS {
            let [of_all, ..] = &setups;
            measure_one(plan, report, &server, &without_bars(of_all), peer);
        }
    }
}

fn few(processes: usize, per_process: Bar) -> Setup {
    Setup {
        processes,
        tasks: 1,
        body: MILLISECOND,
        busy: Bar::None,
        rate: Bar::None,
        per_process,
        per_task: Bar::None,
        longest_wait_ms: Bar::None,
        commands: Bar::AtMost(3.1),
    }
}

fn without_bars(setup: &Setup) -> Setup {
    Setup {
        busy: Bar::None,
        rate: Bar::None,
        per_process: Bar::None,
        per_task: Bar::None,
        longest_wait_ms: Bar::None,
        commands: Bar::None,
        ..*setup
    }
}

fn measure_one(plan: Plan, report: &mut Report, server: &RedisServer, setup: &Setup, of: &str) {
    let Setup { processes, tasks, body, .. } = *setup;
    let name = |what: &str| format!("{processes} x {tasks}, {} ms, {of}: {what}", body.as_millis());
    let (mut busy, mut rates, mut per_process, mut per_task, mut waits) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let url = server.url();
    let work = Work { locker: of, url: &url, tasks, body, ttl: None, keys: Keys::Shared };
    for _ in 0..plan.runs {
        let serial = {
            let runtime = runtime();
            runtime.block_on(async {
                rate(&Locker::connect(BOUND, &url).await, 1, plan.run() / 3).await
            })
        };
        let (sections, wall) = run(work, processes, plan.run());
        assert_eq!(overlaps(&sections), 0, "two processes were inside at the same time");
        let inside: u64 = sections.iter().map(|section| section.left - section.entered).sum();
        busy.push(inside as f64 / 1e9 / wall.as_secs_f64());
        rates.push(sections.len() as f64 / wall.as_secs_f64() / serial);
        per_process.push(evenness(&counts(&sections, processes, |section| section.process)));
        per_task.push(evenness(&counts(&sections, processes * tasks, |section| {
            section.process * tasks + section.task
        })));
        let wait = |section: &Section| (section.entered - section.asked) as f64 / 1e6;
        waits.push(sections.iter().map(wait).fold(0.0, f64::max));
    }
    report.figure(&name("busy"), "", &busy, setup.busy);
    report.figure(&name("sections"), "x serial", &rates, setup.rate);
    report.figure(&name("evenness of processes"), "", &per_process, setup.per_process);
    report.figure(&name("evenness of tasks"), "", &per_task, setup.per_task);
    report.figure(&name("longest wait"), "ms", &waits, setup.longest_wait_ms);
    // In a separate run: `MONITOR` slows the server down.
    let mut sections = 1;
    let commands = commands_sent(server, || {
        sections = run_all(work, processes, Duration::ZERO, plan.run() / 2).len();
    });
    // Commands for the set-up of a connection do not count.
    let greeting = 8 * processes;
    let per_section = commands.saturating_sub(greeting) as f64 / sections as f64;
    report.figure(&name("commands"), "/section", &[per_section], setup.commands);
}

/// All sections after the warm-up, in order, and the measured time.
pub(crate) fn run(work: Work<'_>, processes: usize, length: Duration) -> (Vec<Section>, Duration) {
    (run_all(work, processes, WARM_UP, length), length)
}

fn run_all(work: Work<'_>, processes: usize, warm_up: Duration, length: Duration) -> Vec<Section> {
    let start = |log: &Path| Worker::sections(work, log, false);
    run_workers(start, processes, warm_up, length)
}

/// Like [`run`], with any workers.
pub(crate) fn run_workers(
    start: impl Fn(&Path) -> Worker,
    processes: usize,
    warm_up: Duration,
    length: Duration,
) -> Vec<Section> {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let mut workers: Vec<_> =
        (0..processes).map(|n| start(&folder.path().join(n.to_string()))).collect();
    let begin = clock::now() + 50_000_000;
    let warm = begin + nanos(warm_up);
    let end = warm + nanos(length);
    for worker in &mut workers {
        worker.go(begin, end);
    }
    let mut sections: Vec<_> =
        workers.into_iter().enumerate().flat_map(|(n, worker)| worker.finish(n)).collect();
    sections.retain(|section| section.entered >= warm && section.left <= end);
    sections.sort_by_key(|section| section.entered);
    sections
}

fn overlaps(sections: &[Section]) -> usize {
    sections.windows(2).filter(|pair| pair[1].entered < pair[0].left).count()
}

fn counts(sections: &[Section], groups: usize, of: impl Fn(&Section) -> usize) -> Vec<usize> {
    let mut counts = vec![0; groups];
    for section in sections {
        counts[of(section)] += 1;
    }
    counts
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
