//! The cost of holding very many locks.

use std::time::Duration;

use lock_tests::RedisServer;

use crate::Plan;
use crate::report::{Bar, Report};
use crate::resources::{percent_of_core, resident_mb};
use crate::worker::Worker;

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("held", "locks with a ttl of 30 s, held by one process");
    let window = Duration::from_secs(if plan.quick { 20 } else { 60 });
    let bars = [
        (10_000, Bar::AtMost(0.1), Bar::AtMost(5.0), Bar::AtMost(30.0)),
        (100_000, Bar::AtMost(1.0), Bar::None, Bar::None),
    ];
    for (locks, cpu_bar, trips_bar, memory_bar) in bars {
        let server = RedisServer::start();
        let holder = Worker::holder(&server.url(), locks, false);
        // Until the first renewals are done.
        std::thread::sleep(Duration::from_secs(11));
        let before = reads(&server);
        let cpu = percent_of_core(holder.pid(), window);
        let reads = (reads(&server) - before) / window.as_secs_f64();
        let memory = resident_mb(holder.pid());
        let lost = holder.lost();
        report.figure(&format!("{locks} locks: processor time"), "% of core", &[cpu], cpu_bar);
        // Each check of the bench is also a read; the server reads a large batch in several steps.
        report.figure(&format!("{locks} locks: reads by the server"), "/s", &[reads], trips_bar);
        report.figure(&format!("{locks} locks: resident memory"), "MB", &[memory], memory_bar);
        report.figure(&format!("{locks} locks: lost"), "", &[lost as f64], Bar::AtMost(0.0));
    }
    let server = RedisServer::start();
    let holder = Worker::holder(&server.url(), 10_000, true);
    std::thread::sleep(Duration::from_secs(if plan.quick { 40 } else { 180 }));
    let lost = holder.lost() as f64;
    report.figure(
        "10,000 locks, a thread blocked half of the time: lost",
        "",
        &[lost],
        Bar::AtMost(0.0),
    );
}

fn reads(server: &RedisServer) -> f64 {
    let stats = server.cli(&["INFO", "stats"]);
    let line = stats.lines().find_map(|line| line.trim().strip_prefix("total_reads_processed:"));
    line.and_then(|count| count.parse().ok()).unwrap_or(f64::NAN)
}
