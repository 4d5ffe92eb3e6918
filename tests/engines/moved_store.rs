//! A fleet moves its locks from Redis to PostgreSQL, process by process, as the chapter on choosing a store describes.

mod postgres {
    use std::time::Duration;

    use lock_tests::history::History;
    use lock_tests::prelude::*;
    use lock_tests::{PostgresServer, RedisServer, Worker, eventually};
    use tempfile::TempDir;

    const SIZE: usize = 3;

    /// For what three processes do beside others.
    const LIMIT: Duration = ms(60_000);

    struct Fleet {
        processes: Vec<Worker>,
        started: usize,
        histories: TempDir,
    }

    impl Fleet {
        fn start(urls: &[&str]) -> Self {
            let histories = tempfile::tempdir().unwrap();
            let mut fleet = Self { processes: Vec::new(), started: 0, histories };
            for _ in 0..SIZE {
                fleet.add(urls);
            }
            fleet
        }

        /// Adds a process with these stores, and waits until it has held locks.
        fn add(&mut self, urls: &[&str]) {
            let name = format!("p{}", self.started);
            self.started += 1;
            let mut args = vec![self.histories.path().to_str().unwrap(), &name];
            args.extend(urls);
            self.processes.push(Worker::start(env!("CARGO_BIN_EXE_several-stores"), &args));
            eventually(LIMIT, "the new process holds locks", || {
                let history = self.history();
                let its = history.grants().iter().filter(|grant| grant.process == name);
                its.filter(|grant| grant.key.starts_with("hot:")).count() >= 20
            });
        }

        /// Replaces all processes, one after another. One of them is frozen for longer than a lease meanwhile.
        fn roll(&mut self, urls: &[&str]) {
            for _ in 0..SIZE {
                self.processes[0].pause();
                self.add(urls);
                self.processes[0].resume();
                let oldest = self.processes.remove(0);
                oldest.close_stdin();
                let status = oldest.wait_for_exit(LIMIT);
                assert!(status.success(), "{status}: {:#?}", oldest.stderr());
            }
        }

        fn history(&self) -> History {
            History::read(self.histories.path()).unwrap()
        }
    }

    #[test]
    fn a_step_with_both_stores_keeps_one_holder_per_lock() {
        let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
        let (old, new) = (redis.url(), postgres.url());
        let mut fleet = Fleet::start(&[&old]);
        fleet.roll(&[&old, &new]);
        fleet.roll(&[&new]);
        let history = fleet.history();
        // Also that the fences of each store have grown.
        history.assert_safe();
        for store in ["hot:", "redis:", "postgres:"] {
            let count = history.grants().iter().filter(|it| it.key.starts_with(store)).count();
            println!("{store} {count} grants");
            assert!(count >= 60, "{store} {count}");
        }
    }

    #[test]
    fn without_that_step_locks_have_two_holders() {
        let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
        let mut fleet = Fleet::start(&[&redis.url()]);
        fleet.add(&[&postgres.url()]);
        eventually(LIMIT, "a lock has two holders", || {
            fleet.history().overlaps().iter().any(|it| it.first.key.starts_with("hot:"))
        });
    }
}
