//! Processes that contend for a few locks while a test causes faults, and what their history has to show.

#![allow(clippy::disallowed_methods)]

use std::ops::Range;
use std::time::Instant;

use fastrand::Rng;
use lock_tests::Worker;
use lock_tests::history::History;
use lock_tests::prelude::*;
use tempfile::TempDir;

/// Four processes with leases of 300 ms, or of the shortest ttl of the store.
pub(crate) struct Crowd {
    /// How long the faults go on: `LOCK_CHAOS_SECONDS`.
    pub(crate) seconds: u64,
    /// By `LOCK_CHAOS_SEED`, which is printed.
    pub(crate) rng: Rng,
    pub(crate) workers: Vec<Worker>,
    dir: TempDir,
}

impl Crowd {
    /// Starts the processes, and waits until all of them work.
    pub(crate) fn start(url: &str) -> Self {
        let seconds = std::env::var("LOCK_CHAOS_SECONDS").map_or(60, |text| text.parse().unwrap());
        let seed = std::env::var("LOCK_CHAOS_SEED")
            .map_or_else(|_| fastrand::u64(..), |text| text.parse().unwrap());
        println!("LOCK_CHAOS_SEED={seed}");
        let (mut rng, dir) = (Rng::with_seed(seed), tempfile::tempdir().unwrap());
        let start = |n: usize| {
            let (program, name) = (env!("CARGO_BIN_EXE_crowd"), format!("p{n}"));
            let seed = rng.u64(..).to_string();
            Worker::start(program, &[url, dir.path().to_str().unwrap(), &name, &seed])
        };
        let workers: Vec<_> = (0..4).map(start).collect();
        for worker in &workers {
            worker.wait_for_line(DEADLINE, |line| line == "working");
        }
        Self { seconds, rng, workers, dir }
    }

    pub(crate) fn history(&self) -> History {
        History::read(self.dir.path()).unwrap()
    }

    /// Freezes one process for some of these milliseconds.
    pub(crate) fn freeze_one(&mut self, for_ms: Range<u64>) {
        let worker = self.rng.choice(&self.workers).unwrap();
        worker.pause();
        std::thread::sleep(ms(self.rng.u64(for_ms)));
        worker.resume();
    }

    /// Freezes, some of them longer than the ttl, cuts of all connections, and kills of the server. Of 16 faults at
    /// least 3 are a cut, one is a kill, and `long` are long freezes.
    pub(crate) fn survives_faults(
        mut self,
        long: u8,
        kill_clients: impl Fn(),
        kill_server: impl Fn(),
    ) {
        let (mut faults, end) = (0, Instant::now() + ms(1_000 * self.seconds));
        while self.goes_on(end, faults > self.seconds / 3) {
            std::thread::sleep(ms(self.rng.u64(300..800)));
            faults += 1;
            match self.rng.u8(..16) {
                0..3 => kill_clients(),
                3 => kill_server(),
                choice if choice >= 16 - long => self.freeze_one(400..900),
                _ => self.freeze_one(20..250),
            }
        }
        let least = self.seconds / 3 + 1;
        self.ends_safely(faults, least);
    }

    /// Until `end`, and behind it until the faults are `enough` and have had an effect: on a busy machine the holders of an
    /// interval may all have been quick.
    pub(crate) fn goes_on(&self, end: Instant, enough: bool) -> bool {
        let now = Instant::now();
        let had_effect = || !self.history().naive_overlaps().is_empty();
        now < end || (now < end + DEADLINE && !(enough && had_effect()))
    }

    /// Ends the processes. No two leases of a lock were valid at a time, and every lease had a fence.
    pub(crate) fn ends_safely(self, faults: u64, least_faults: u64) {
        for worker in &self.workers {
            worker.close_stdin();
        }
        for worker in &self.workers {
            let status = worker.wait_for_exit(DEADLINE);
            assert!(status.success(), "{status}: {:#?}", worker.stderr());
        }
        let (history, seconds) = (self.history(), self.seconds);
        let (grants, naive) = (history.grants().len(), history.naive_overlaps().len());
        println!("{seconds} s: {grants} grants, {faults} faults, {naive} naive overlaps");
        history.assert_safe();
        assert!(history.grants().iter().all(|grant| grant.fence.is_some()));
        assert!(faults >= least_faults, "too few faults: {faults}");
        assert!(grants as u64 > 5 * seconds, "too few grants: {grants}");
        // Without validity, some holders would have shared a lock: the faults had an effect.
        assert!(naive > 0, "the faults were harmless");
    }
}
