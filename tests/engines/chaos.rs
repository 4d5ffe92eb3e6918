//! Processes that contend for a few locks while a test causes faults, and what their history has to show.

#![allow(clippy::disallowed_methods)]

use std::collections::HashSet;
use std::ops::Range;
use std::time::Instant;

use fastrand::Rng;
use lock_tests::history::{History, now_ns};
use lock_tests::prelude::*;
use lock_tests::{FaultProxy, Worker, eventually};
use tempfile::TempDir;

mod etcd {
    #[test]
    fn faults_never_make_two_valid_leases() {
        let server = lock_tests::EtcdServer::start();
        let url = |port| lock_tests::etcd::url_at(port, "/locks");
        super::survive_long_freezes(server.port(), url, || server.restart());
    }
}

mod zookeeper {
    #[test]
    fn faults_never_make_two_valid_leases() {
        let server = lock_tests::ZooKeeperServer::builder().setting("tickTime", 100).start();
        let url = |port| lock_tests::zookeeper::url_at(port, "/locks");
        super::survive_long_freezes(server.port(), url, || server.restart());
    }
}

/// Freezes of processes, some of them longer than their leases or sessions, cuts of all connections, and kills of the server at
/// `port`.
fn survive_long_freezes(port: u16, url: impl Fn(u16) -> String, restart: impl Fn()) {
    let proxy = FaultProxy::to_port(port);
    let mut crowd = Crowd::start(&url(proxy.port()));
    let (mut faults, end) = (0, Instant::now() + ms(1_000 * crowd.seconds));
    while crowd.goes_on(end, faults >= 8) {
        std::thread::sleep(ms(crowd.rng.u64(200..600)));
        faults += 1;
        // Every fourth one is a long freeze.
        match if faults % 4 == 0 { 15 } else { crowd.rng.u8(..15) } {
            0..4 => proxy.cut(),
            4 => restart(),
            15.. => crowd.freeze_all_but_one(),
            _ => crowd.freeze_one(20..700),
        }
    }
    crowd.ends_safely(faults, 4);
}

/// Four processes with leases of 300 ms, or of the shortest ttl of the store.
pub(crate) struct Crowd {
    /// How long the faults go on: `LOCK_CHAOS_SECONDS`.
    seconds: u64,
    /// By `LOCK_CHAOS_SEED`, which is printed.
    rng: Rng,
    workers: Vec<Worker>,
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
            let history = self.history();
            let granted = history.grants().iter().filter(|it| it.granted_ns > began);
            granted.map(|grant| grant.key.as_str()).collect::<HashSet<_>>().len() == 4
        });
        frozen.iter().for_each(Worker::resume);
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
