//! Processes that contend for a few locks while a test causes faults, and what their history has to show.

use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tempfile::TempDir;

use crate::Worker;
use crate::eventually::eventually;
use crate::history::{History, now_ns};
use crate::prelude::*;

const PROCESSES: usize = 4;
/// Of the program `crowd`.
const KEYS: usize = 4;

/// Four processes with leases of 300 ms, or of the shortest ttl of the store.
#[derive(Debug)]
pub struct Crowd {
    /// How long the faults go on: `LOCK_CHAOS_SECONDS`.
    seconds: u64,
    /// By `LOCK_CHAOS_SEED`, which is printed.
    rng: Rng,
    workers: Vec<Worker>,
    dir: TempDir,
}

impl Crowd {
    /// Starts the processes, of the program `crowd`, and waits until all of them work.
    ///
    /// # Panics
    ///
    /// When one of them does not begin.
    #[track_caller]
    pub fn start(program: &str, url: &str) -> Self {
        let seconds = std::env::var("LOCK_CHAOS_SECONDS").map_or(60, |text| text.parse().unwrap());
        let seed = std::env::var("LOCK_CHAOS_SEED")
            .map_or_else(|_| fastrand::u64(..), |text| text.parse().unwrap());
        println!("LOCK_CHAOS_SEED={seed}");
        let (mut rng, dir) = (Rng::with_seed(seed), tempfile::tempdir().unwrap());
        let start = |n: usize| {
            let (name, seed) = (format!("p{n}"), rng.u64(..).to_string());
            Worker::start(program, &[url, dir.path().to_str().unwrap(), &name, &seed])
        };
        let workers: Vec<_> = (0..PROCESSES).map(start).collect();
        for worker in &workers {
            worker.wait_for_line(DEADLINE, |line| line == "working");
        }
        Self { seconds, rng, workers, dir }
    }

    /// Freezes, some of them longer than the ttl, cuts of all connections, and kills of the server. Of 16 faults at
    /// least 3 are a cut, one is a kill, and `long` are long freezes.
    ///
    /// # Panics
    ///
    /// When two leases of a lock were valid at a time, or the faults had no effect.
    #[track_caller]
    pub fn survives_faults(mut self, long: u8, kill_clients: impl Fn(), kill_server: impl Fn()) {
        let (mut faults, end) = (0, self.end());
        let least = self.seconds / 3 + 1;
        while self.goes_on(end, faults >= least.max(5)) {
            std::thread::sleep(ms(self.rng.u64(300..800)));
            faults += 1;
            // The fifth one is a kill, in a short run too.
            match if faults == 5 { 3 } else { self.rng.u8(..16) } {
                0..3 => kill_clients(),
                3 => kill_server(),
                choice if choice >= 16 - long => self.freeze_one(400..900),
                _ => self.freeze_one(20..250),
            }
        }
        self.ends_safely(faults, least);
    }

    /// Freezes, some of them longer than the leases or sessions, cuts of all connections, and kills of the server.
    ///
    /// # Panics
    ///
    /// When two leases of a lock were valid at a time, or the faults had no effect.
    #[track_caller]
    pub fn survives_long_freezes(mut self, kill_clients: impl Fn(), kill_server: impl Fn()) {
        let (mut faults, end) = (0, self.end());
        while self.goes_on(end, faults >= 8) {
            std::thread::sleep(ms(self.rng.u64(200..600)));
            faults += 1;
            // Every fourth one is a long freeze, and the fifth one a kill.
            let choice = match faults {
                5 => 4,
                fourth if fourth % 4 == 0 => 15,
                _ => self.rng.u8(..15),
            };
            match choice {
                0..4 => kill_clients(),
                4 => kill_server(),
                15.. => self.freeze_all_but_one(),
                _ => self.freeze_one(20..700),
            }
        }
        self.ends_safely(faults, 4);
    }

    fn end(&self) -> Instant {
        Instant::now() + Duration::from_secs(self.seconds)
    }

    fn history(&self) -> History {
        History::read(self.dir.path()).unwrap()
    }

    /// Freezes one process for some of these milliseconds.
    fn freeze_one(&mut self, for_ms: Range<u64>) {
        let worker = self.rng.choice(&self.workers).unwrap();
        worker.pause();
        std::thread::sleep(ms(self.rng.u64(for_ms)));
        worker.resume();
    }

    /// Until what they hold has gone to the last one, as their leases have ended.
    fn freeze_all_but_one(&self) {
        let frozen = &self.workers[1..];
        frozen.iter().for_each(Worker::pause);
        let began = now_ns();
        eventually(DEADLINE, "the last one has each of the locks", || {
            // Each look reads all that has happened.
            std::thread::sleep(ms(50));
            let history = self.history();
            let granted = history.grants().iter().filter(|it| it.granted_ns > began);
            granted.map(|grant| grant.key.as_str()).collect::<HashSet<_>>().len() == KEYS
        });
        frozen.iter().for_each(Worker::resume);
    }

    /// Until `end`, and after it until the faults are `enough` and have had an effect, and the grants are enough: on a busy
    /// machine there are few in a time, and their holders may all have been quick.
    fn goes_on(&self, end: Instant, enough: bool) -> bool {
        let now = Instant::now();
        let is_complete = || {
            let history = self.history();
            let grants = history.grants().len() as u64;
            !history.naive_overlaps().is_empty() && grants > self.least_grants()
        };
        now < end || (now < end + DEADLINE && !(enough && is_complete()))
    }

    fn least_grants(&self) -> u64 {
        5 * self.seconds
    }

    /// Ends the processes. No two leases of a lock were valid at a time, and every lease had a fence.
    #[track_caller]
    fn ends_safely(self, faults: u64, least_faults: u64) {
        for worker in &self.workers {
            worker.close_stdin();
        }
        for worker in &self.workers {
            let status = worker.wait_for_exit(DEADLINE);
            assert!(status.success(), "{status}: {:#?}", worker.stderr());
        }
        let history = self.history();
        let (grants, naive) = (history.grants().len(), history.naive_overlaps().len());
        println!("{} s: {grants} grants, {faults} faults, {naive} naive overlaps", self.seconds);
        history.assert_safe();
        assert!(history.grants().iter().all(|grant| grant.fence.is_some()));
        assert!(faults >= least_faults, "too few faults: {faults}");
        assert!(grants as u64 > self.least_grants(), "too few grants: {grants}");
        // Without validity, some holders would have shared a lock: the faults had an effect.
        assert!(naive > 0, "the faults were harmless");
    }
}
