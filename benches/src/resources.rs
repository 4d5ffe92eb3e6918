//! Resource usage of a process, as reported by the kernel.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

/// Seconds of processor time of all threads of a process, to the nanosecond.
pub(crate) fn cpu_seconds(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanos = |path: std::path::PathBuf| -> Option<u64> {
        fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
    };
    threads.filter_map(|thread| nanos(thread.path().join("schedstat"))).sum::<u64>() as f64 / 1e9
}

/// The share of a core that a process uses within `window` from now on, in percent.
pub(crate) fn percent_of_core(pid: u32, window: Duration) -> f64 {
    let before = cpu_seconds(pid);
    sleep(window);
    (cpu_seconds(pid) - before) / window.as_secs_f64() * 100.0
}

/// Seconds of processor time of all children of this process that have ended, and of theirs.
pub(crate) fn cpu_seconds_of_children() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program may contain spaces. The first field after it is the third of the line.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split_whitespace();
    let ticks = fields.skip(13).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Resident memory in megabytes.
pub(crate) fn resident_mb(pid: u32) -> f64 {
    let pages = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: f64 =
        pages.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(f64::NAN);
    pages * rustix::param::page_size() as f64 / 1e6
}
