//! Several processes on a few hot keys, under faults.

#![allow(clippy::disallowed_methods)]

use std::time::{Duration, Instant};

use fastrand::Rng;
use lock_tests::history::History;
use lock_tests::prelude::*;
use lock_tests::{RedisServer, Worker};

const SECONDS: u64 = 60;
const PROCESSES: usize = 4;

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Freezes of processes, some of them longer than the ttl of 300 ms, and cuts of all connections.
/// `LOCK_CHAOS_SECONDS` and `LOCK_CHAOS_SEED` set the length and the choices. The server keeps its data:
/// one that loses them grants the same lock twice, as the README says.
#[test]
fn frozen_processes_and_cut_connections_never_make_two_valid_leases() {
    let seconds = from_env("LOCK_CHAOS_SECONDS").unwrap_or(SECONDS);
    let seed = from_env("LOCK_CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("LOCK_CHAOS_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let server = RedisServer::start();
    let dir = tempfile::tempdir().unwrap();
    let workers: Vec<_> =
        (0..PROCESSES).map(|n| crowd(&server, dir.path(), n, rng.u64(..))).collect();
    for worker in &workers {
        worker.wait_for_line(ms(10_000), |line| line == "working");
    }

    let (mut freezes, mut cuts) = (0, 0);
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        std::thread::sleep(ms(rng.u64(300..800)));
        if rng.u8(..4) == 0 {
            server.kill_clients();
            cuts += 1;
            continue;
        }
        let worker = rng.choice(&workers).unwrap();
        let long = rng.bool();
        worker.pause();
        std::thread::sleep(ms(if long { rng.u64(400..900) } else { rng.u64(20..250) }));
        worker.resume();
        freezes += 1;
    }
    for worker in &workers {
        worker.close_stdin();
    }
    for worker in &workers {
        let status = worker.wait_for_exit(ms(30_000));
        assert!(status.success(), "{status}: {:#?}", worker.stderr());
    }

    let history = History::read(dir.path()).unwrap();
    let (grants, faults) = (history.grants().len(), freezes + cuts);
    let (overlaps, naive) = (history.overlaps().len(), history.naive_overlaps().len());
    let fence_faults = history.fence_faults().len();
    println!(
        "{seconds} s: {grants} grants, {faults} faults ({freezes} freezes, {cuts} cuts), \
         {overlaps} overlaps, {fence_faults} fence faults, {naive} naive overlaps"
    );
    history.assert_safe();
    assert!(history.grants().iter().all(|grant| grant.fence.is_some()));
    assert!(faults > seconds / 3, "too few faults: {faults}");
    assert!(grants as u64 > 20 * seconds, "too few grants: {grants}");
    // Without validity, some holders would have shared a lock: the faults had an effect.
    assert!(naive > 0, "the faults were harmless");
}

fn crowd(server: &RedisServer, dir: &std::path::Path, n: usize, seed: u64) -> Worker {
    let name = format!("p{n}");
    let program = env!("CARGO_BIN_EXE_crowd");
    Worker::start(program, &[&server.url(), dir.to_str().unwrap(), &name, &seed.to_string()])
}
