//! Processes that lock overlapping sets of keys.

use std::time::{Duration, Instant};

use crate::Worker;
use crate::history::{Grant, History};
use crate::prelude::*;

const PROCESSES: u64 = 4;

/// Runs four processes of the program `transfers` on the store at `url` for `LOCK_OVERLAP_SECONDS`, by default two.
///
/// # Panics
///
/// When a request of one of them fails, when two of them hold a key at a time, or when none has waited for another one.
#[track_caller]
pub fn overlap_without_an_error(program: &str, url: &str) {
    let seconds = std::env::var("LOCK_OVERLAP_SECONDS").map_or(2, |text| text.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let start = |n: u64| {
        let (name, seed) = (format!("p{n}"), fastrand::u64(..).to_string());
        Worker::start(program, &[url, dir.path().to_str().unwrap(), &name, &seed])
    };
    let workers: Vec<_> = (0..PROCESSES).map(start).collect();
    for worker in &workers {
        worker.wait_for_line(DEADLINE, |line| line == "working");
    }
    let read = || History::read(dir.path()).unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    // On a busy machine it takes longer until they have met.
    while Instant::now() < end
        || (Instant::now() < end + DEADLINE && waits_for_others(&read()) <= 10)
    {
        std::thread::sleep(ms(100));
    }
    for worker in &workers {
        worker.close_stdin();
    }
    let mut transfers = 0;
    for worker in &workers {
        // The last ones do not meet new requests any more.
        let status = worker.wait_for_exit(3 * DEADLINE);
        assert!(status.success(), "{status}: {:#?}", worker.stderr());
        let done: u64 = worker.stdout()[1].parse().unwrap();
        assert!(done > 0, "a process had none");
        transfers += done;
    }
    let history = read();
    let waits = waits_for_others(&history);
    let [half, most, all] = waiting_times(&history);
    println!(
        "{seconds} s: {transfers} transfers, {waits} waits for others; waited {half:.0?} (p50), {most:.0?} (p99), {all:.0?} (max)"
    );
    history.assert_safe();
    assert!(waits > 10, "{waits} waits");
}

/// How many grants came to a request that another process was in front of.
fn waits_for_others(history: &History) -> usize {
    let mut grants: Vec<&Grant> = history.grants().iter().collect();
    grants.sort_by_key(|grant| (&grant.key, grant.granted_ns));
    let waited = |pair: &&[&Grant]| {
        let [before, after] = pair else { return false };
        before.key == after.key
            && before.process != after.process
            && before.release_ns.is_some_and(|released| released > after.invoked_ns)
    };
    grants.windows(2).filter(waited).count()
}

/// The 50th, 99th and 100th percentile.
fn waiting_times(history: &History) -> [Duration; 3] {
    let waits = history.grants().iter().map(|grant| grant.granted_ns - grant.invoked_ns);
    let mut waits: Vec<_> = waits.map(Duration::from_nanos).collect();
    waits.sort_unstable();
    [50, 99, 100].map(|percent| waits[(waits.len() - 1) * percent / 100])
}
