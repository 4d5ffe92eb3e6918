//! A lease is renewed while it is held, and ends in time if it cannot be renewed.

#![allow(clippy::disallowed_methods)]

use std::collections::{BTreeSet, HashSet};
use std::error::Error;
use std::future::pending;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultPlan, FaultyBackend, Operation, open_backend};
use lock_runtime::{
    ErrorKind, LockError, LockGuard, LockPool, OnLost, PoolBuilder, Renew, distributed_lock,
};
use lock_tests::history::now_ns;
use lock_tests::monitor::{Caller, Ran};
use lock_tests::prelude::*;
use lock_tests::proxy::Direction;
use lock_tests::{FaultProxy, Monitor, RedisServer, Worker, eventually, eventually_async};
use tokio::time::{Instant, sleep, timeout};

fn nanos(span: Duration) -> u64 {
    span.as_nanos().try_into().unwrap()
}

/// The validity of a grant of `ttl`, as documented in the README.
fn validity(ttl: Duration) -> Duration {
    ttl - ttl / 100 - ms(2)
}

fn sha(script: &str) -> String {
    redis::Script::new(script).get_hash().to_owned()
}

mod kept {
    use super::*;

    /// Another process that tries `key` continuously. It has tried once when this returns.
    fn contender(server: &RedisServer, key: &str) -> Worker {
        let worker = Worker::start(env!("CARGO_BIN_EXE_contender"), &[&server.url(), key]);
        worker.wait_for_line(ms(10_000), |line| line == "busy");
        worker
    }

    fn tries(contender: &Worker) -> usize {
        contender.stdout().iter().filter(|line| *line == "busy").count()
    }

    /// Blocks for two of these ttls, and until the contender has tried often.
    fn block_for_two(ttl: Duration, contender: &Worker) {
        std::thread::sleep(2 * ttl);
        eventually(ms(60_000), "it tries often", || tries(contender) >= 50);
    }

    /// The contender tried often, and entered after the lock was free at `freed_ns`, but not before.
    fn assert_kept_out(contender: &Worker, freed_ns: u64) {
        assert!(tries(contender) >= 50);
        let got_in = contender.wait_for_line(ms(10_000), |line| line.starts_with("in "));
        assert!(got_in[3..].parse::<u64>().unwrap() > freed_ns, "two holders");
    }

    #[tokio::test]
    async fn a_body_of_four_ttls_keeps_other_processes_out() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let ttl = ms(1_500);
        let body = async {
            let contender = contender(&server, "k");
            sleep(4 * ttl).await;
            let often = async || tries(&contender) >= 50;
            eventually_async(ms(60_000), "it tries often", often).await;
            (contender, now_ns())
        };
        let (contender, freed_ns) = pool.lock("k").ttl(ttl).run(body).await.unwrap();
        assert_kept_out(&contender, freed_ns);
    }

    /// Blocks its thread, and returns whether the lock is held afterwards.
    #[distributed_lock(key = "k", ttl = ttl, pool = pool, guard = guard)]
    async fn block(
        pool: &LockPool,
        ttl: Duration,
        block: impl FnOnce(),
    ) -> Result<(bool, u64), LockError> {
        block();
        Ok((guard.is_held(), now_ns()))
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_blocked_current_thread_runtime_keeps_the_lock() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let ttl = ms(1_500);
        let mut other = None;
        let blocked = block(&pool, ttl, || {
            block_for_two(ttl, other.insert(contender(&server, "k")));
        });
        let (held, freed_ns) = blocked.await.unwrap();
        assert!(held);
        assert_kept_out(&other.unwrap(), freed_ns);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_runtime_with_all_its_threads_blocked_keeps_the_lock() {
        let server = Arc::new(RedisServer::start());
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let ttl = ms(1_500);
        // Passes only when all threads are blocked at the same time.
        let all = Arc::new(Barrier::new(2));
        let (everybody, threads) = (all.clone(), server.clone());
        let (other, contending) = std::sync::mpsc::channel();
        let holder = tokio::spawn(async move {
            let blocked = block(&pool, ttl, || {
                let contender = contender(&threads, "k");
                everybody.wait();
                block_for_two(ttl, &contender);
                other.send(contender).unwrap();
                everybody.wait();
            });
            blocked.await.unwrap()
        });
        let bystander = tokio::spawn(async move {
            all.wait();
            all.wait();
        });
        let (held, freed_ns) = holder.await.unwrap();
        bystander.await.unwrap();
        assert!(held);
        assert_kept_out(&contending.recv().unwrap(), freed_ns);
    }

    #[tokio::test]
    async fn a_store_that_is_silent_for_less_than_the_validity_costs_nothing() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let (ttl, silence) = (ms(6000), ms(2800));
        let body = async {
            // Over the first renewal, which is due after a third of the ttl.
            server.pause();
            sleep(silence).await;
            server.resume();
            // Past the end of the first lease.
            sleep(ttl - silence + ms(500)).await;
            server.cli(&["PTTL", "k"]).parse::<u64>().unwrap()
        };
        let left = pool.lock("k").ttl(ttl).run(body).await.unwrap();
        assert!(left > 0, "renewed");
    }
}

mod ended {
    use super::*;

    /// The commands of one owner, in the order of the server.
    #[derive(Default)]
    struct Seen {
        renewed: Vec<u64>,
        released: Option<u64>,
        renewed_after_release: usize,
        other_after_release: Vec<Ran>,
    }

    /// The owners in a command: several requests may share a script.
    fn owners_of(ran: &Ran) -> BTreeSet<String> {
        // Alone, or followed by the channel of its pool.
        let owner = |arg: &'_ String| arg.split('@').next().unwrap_or_default().to_owned();
        let is_owner =
            |text: &String| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        ran.args[1..].iter().map(owner).filter(is_owner).collect()
    }

    fn seen_by_owner(lines: Vec<Ran>) -> Vec<Seen> {
        let script = |ran: &Ran, text: &str| {
            ran.name().starts_with("EVAL") && (ran.args[1] == sha(text) || ran.args[1] == text)
        };
        let mut owners = std::collections::HashMap::<String, Seen>::new();
        for ran in lines.into_iter().filter(|ran| ran.by != Caller::Script) {
            let is_renewal = script(
                &ran,
                include_str!("../../lock-runtime/src/backend/redis/protocol/renew.lua"),
            );
            let is_release = ran.args.iter().any(|arg| arg == "release")
                || script(
                    &ran,
                    include_str!("../../lock-runtime/src/backend/redis/protocol/release.lua"),
                );
            for owner in owners_of(&ran) {
                let seen = owners.entry(owner).or_default();
                if is_renewal {
                    seen.renewed.push(ran.time_us);
                    seen.renewed_after_release += usize::from(seen.released.is_some());
                } else if is_release {
                    seen.released.get_or_insert(ran.time_us);
                } else if seen.released.is_some() {
                    seen.other_after_release.push(ran.clone());
                }
            }
        }
        owners.into_values().collect()
    }

    /// Timers are too coarse for a race.
    async fn until(end_ns: u64) {
        while now_ns() < end_ns {
            tokio::task::yield_now().await;
        }
    }

    const RACES: u64 = 1000;

    /// Ends one hold at a random moment around a renewal, in one of three ways.
    async fn race(pool: LockPool, n: u64) {
        const RENEW: Duration = Duration::from_millis(6);
        let key = format!("race:{n}");
        let began = now_ns();
        let request = pool.lock(key.as_str()).ttl(ms(5000)).renew(RENEW);
        let ends = began + fastrand::u64(nanos(RENEW) * 8 / 10..nanos(RENEW) * 16 / 10);
        match n % 3 {
            0 => {
                let guard = request.acquire().await.unwrap();
                until(ends).await;
                guard.release().await.unwrap();
            }
            1 => {
                let task = tokio::spawn(request.run(async move {
                    until(ends).await;
                    // Unwinds like a panic, without its message.
                    resume_unwind(Box::new("as planned"));
                }));
                assert!(task.await.unwrap_err().is_panic());
            }
            _ => {
                let (entered, running) = tokio::sync::oneshot::channel();
                let task = tokio::spawn(request.run(async {
                    let _ = entered.send(());
                    pending::<()>().await;
                }));
                running.await.unwrap();
                until(ends).await;
                task.abort();
                assert!(task.await.unwrap_err().is_cancelled());
            }
        }
    }

    /// Redisson #7272, #1626; RedLock.net #64: a renewal after the release brought the key back.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nothing_is_renewed_after_a_release_a_panic_or_an_abort_in_a_thousand_races() {
        let (mut renewed, mut ended, mut close) = (0, 0, 0);
        // Until each side has won often enough, and both were close together.
        for _ in 0..10 {
            let (now_renewed, now_close) = races().await;
            renewed += now_renewed;
            ended += RACES as usize - now_renewed;
            close += now_close;
            if renewed > 100 && ended > 100 && close > 20 {
                return;
            }
        }
        panic!("{renewed} renewed, {ended} not, {close} close calls");
    }

    /// How many were renewed, and how many were released within 1 ms of a renewal.
    async fn races() -> (usize, usize) {
        let server = RedisServer::start();
        // The server learns the scripts. A pool that is shut down sends no late request for the first owner.
        let first = LockPool::connect(&server.url()).await.unwrap();
        race(first.clone(), 3 * RACES).await;
        first.shutdown(ms(5000)).await;
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let monitor = Monitor::start(&server);
        let mut races = tokio::task::JoinSet::new();
        for n in 0..RACES {
            if races.len() == 4 {
                races.join_next().await.unwrap().unwrap();
            }
            races.spawn(race(pool.clone(), n));
        }
        races.join_all().await;
        // No command of any owner for longer than several renewal intervals: none follows.
        let report = pool.shutdown(ms(5000)).await;
        assert_eq!(report.abandoned, 0);
        let settled = monitor.settled().len();
        sleep(ms(100)).await;
        let lines = monitor.settled();
        assert_eq!(lines.len(), settled, "{:#?}", &lines[settled..]);

        let owners = seen_by_owner(lines);
        assert_eq!(owners.len() as u64, RACES);
        let renewed = owners.iter().filter(|seen| !seen.renewed.is_empty()).count();
        let close = |seen: &&Seen| {
            let last = seen.renewed.last().copied().unwrap_or_default();
            seen.released.is_some_and(|released| released.saturating_sub(last) < 1000)
        };
        let close = owners.iter().filter(close).count();
        println!("{RACES} races: {renewed} renewed, {close} released within 1 ms of a renewal");
        for seen in &owners {
            assert!(seen.released.is_some());
            assert_eq!(seen.renewed_after_release, 0);
            assert_eq!(seen.other_after_release, []);
        }
        assert_eq!(server.cli(&["KEYS", "race:*"]), "", "nothing is left");
        (renewed, close)
    }
}

mod taken {
    use super::*;

    /// Changes the key from outside, and waits for ever.
    #[distributed_lock(key = "k", ttl = "5s", renew = "200ms", pool = pool)]
    async fn robbed(
        pool: &LockPool,
        server: &RedisServer,
        by: &[&[&str]],
    ) -> Result<(), LockError> {
        for command in by {
            server.cli(command);
        }
        pending().await
    }

    async fn check(by: &[&[&str]], left: &[&str], expected: &str) {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let ended = timeout(ms(20_000), robbed(&pool, &server, by)).await;
        let error = ended.expect("the body is stopped").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert!(error.to_string().contains("does not hold it"), "{error}");

        // A guard is notified too, and its release changes nothing.
        server.cli(&["FLUSHALL"]);
        let guard = pool.lock("k").ttl(ms(5000)).renew(ms(200)).acquire().await.unwrap();
        for command in by {
            server.cli(command);
        }
        let lost = timeout(ms(20_000), guard.lost()).await.expect("the loss is reported");
        assert_eq!(lost.kind(), ErrorKind::Lost);
        assert!(!guard.is_held());
        assert_eq!(guard.valid_for(), Duration::ZERO);
        assert!(guard.verify().await.unwrap_err().is_lost());
        assert!(guard.release().await.unwrap_err().is_lost());
        let report = pool.shutdown(ms(5000)).await;
        assert_eq!(report.abandoned, 0);
        assert_eq!(server.cli(left), expected, "as the other left it");
    }

    macro_rules! taken_by {
        ($($name:ident: $by:expr, left $left:expr => $expected:expr;)*) => {
            $(
                #[tokio::test]
                async fn $name() {
                    check(&$by, &$left, $expected).await;
                }
            )*
        };
    }

    taken_by! {
        a_deleted_key_ends_the_body: [&["DEL", "k"]], left ["EXISTS", "k"] => "0";
        a_flushed_database_ends_the_body: [&["FLUSHALL"]], left ["EXISTS", "k"] => "0";
        an_overwritten_key_ends_the_body_and_stays:
            [&["SET", "k", "theirs", "PX", "60000"]], left ["GET", "k"] => "theirs";
        a_key_that_was_overwritten_for_good_stays: [&["SET", "k", "theirs"]], left ["TTL", "k"] => "-1";
        a_key_of_another_type_ends_the_body_and_stays:
            [&["DEL", "k"], &["HSET", "k", "a", "1"]], left ["HGET", "k", "a"] => "1";
    }

    #[tokio::test]
    async fn verify_sends_a_request() {
        let server = RedisServer::start();
        let pool =
            LockPool::builder(server.url()).request_timeout(ms(1_500)).connect().await.unwrap();
        let guard = pool.lock("k").ttl(ms(60_000)).acquire().await.unwrap();
        guard.verify().await.unwrap();
        server.pause();
        assert!(guard.verify().await.unwrap_err().is_backend());
        assert!(guard.is_held(), "no answer is no loss");
        server.resume();
        let is_back = async || guard.verify().await.is_ok();
        eventually_async(ms(20_000), "the connection is back", is_back).await;
        server.cli(&["SET", "k", "theirs"]);
        // The next renewal is far away. A push of the server may have reported the change, though.
        assert!(guard.verify().await.unwrap_err().is_lost());
        assert!(!guard.is_held());
        assert!(guard.lost().await.is_lost());
        assert!(guard.release().await.unwrap_err().is_lost());
        assert_eq!(server.cli(&["GET", "k"]), "theirs");
    }
}

mod unreachable_store {
    use super::*;

    /// Observations of a body: the end of its validity, and the time of its drop.
    #[derive(Default)]
    struct Watched {
        deadline_ns: AtomicU64,
        dropped_ns: AtomicU64,
    }

    impl Drop for Watching<'_> {
        fn drop(&mut self) {
            self.0.dropped_ns.store(now_ns(), Ordering::SeqCst);
        }
    }

    struct Watching<'a>(&'a Watched);

    #[distributed_lock(key = "body", ttl = "5s", pool = pool, guard = guard)]
    async fn watch(pool: &LockPool, watched: &Watched) -> Result<(), LockError> {
        let _watching = Watching(watched);
        loop {
            let now = now_ns();
            let valid = nanos(guard.valid_for());
            watched.deadline_ns.store(now + valid, Ordering::SeqCst);
            sleep(ms(2)).await;
        }
    }

    #[tokio::test]
    async fn the_body_ends_before_validity_does_and_needs_no_answer() {
        for _ in 0..3 {
            // A stall of the machine for the half second of notice makes one of them late.
            if ends_in_time().await {
                return;
            }
        }
        panic!("three bodies ended too late");
    }

    /// Whether the body ends before its validity does. It never ends long before.
    async fn ends_in_time() -> bool {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let guard = pool.lock("guard").ttl(ms(5000)).acquire().await.unwrap();
        let watched = Arc::new(Watched::default());
        let body = tokio::spawn({
            let (pool, watched) = (pool.clone(), watched.clone());
            async move { watch(&pool, &watched).await }
        });
        // After a renewal, so that the test covers more than the grant.
        let began = now_ns();
        eventually_async(ms(20_000), "a renewal", async || {
            watched.deadline_ns.load(Ordering::SeqCst) > began + nanos(ms(6000))
        })
        .await;
        server.pause();

        let mut deadline_ns = 0;
        eventually_async(ms(20_000), "the validity ends", async || {
            let now = now_ns();
            let valid = nanos(guard.valid_for());
            if valid > 0 {
                deadline_ns = now + valid;
            }
            valid == 0
        })
        .await;
        let left = deadline_ns.saturating_sub(now_ns());
        sleep(Duration::from_nanos(left)).await;
        assert!(!guard.is_held());

        assert_eq!(body.await.unwrap().unwrap_err().kind(), ErrorKind::Lost);
        let deadline_ns = watched.deadline_ns.load(Ordering::SeqCst);
        let dropped_ns = watched.dropped_ns.load(Ordering::SeqCst);
        let early = Duration::from_nanos(deadline_ns.saturating_sub(dropped_ns));
        println!("{early:?} before the end of the validity");
        assert!(early < ms(510), "{early:?} before the end of the validity");

        // The server returns and serves again.
        server.resume();
        drop(guard);
        eventually(ms(10_000), "both are released or expired", || {
            server.cli(&["EXISTS", "guard", "body"]) == "0"
        });
        !early.is_zero()
    }

    /// The renewal task is on the blocked thread, so no task can end the validity.
    #[tokio::test]
    async fn validity_ends_by_the_clock_alone() {
        let memory = LockPool::builder("memory://").on_current_runtime();
        let pool = memory.connect().await.unwrap();
        let guard = pool.lock("k").ttl(ms(500)).acquire().await.unwrap();
        let left = guard.valid_for();
        assert!(left <= validity(ms(500)));
        std::thread::sleep(left);
        assert!(!guard.is_held());
        assert_eq!(guard.valid_for(), Duration::ZERO);
        assert!(guard.lost().await.is_lost());
    }
}

/// On virtual time: exact, and fast.
mod virtual_time {
    use super::*;

    const TTL: Duration = ms(10_000);
    /// The body is cancelled a tenth of the ttl before the validity ends, 500 ms at most.
    const NOTICE: Duration = ms(500);
    /// Renewals due within this span are sent together.
    const TICK: Duration = ms(2);

    /// Runs until the lock is lost; returns the time and the reason.
    async fn held_until_lost(pool: &LockPool, held: impl AsyncFnOnce()) -> (Duration, LockError) {
        let dropped = Mutex::new(None);
        let began = Instant::now();
        let body = async {
            let _at_end = AtEnd(|| *dropped.lock().unwrap() = Some(began.elapsed()));
            held().await;
            pending::<()>().await;
        };
        let error = pool.lock("k").run(body).await.unwrap_err();
        (dropped.into_inner().unwrap().unwrap(), error)
    }

    struct AtEnd<F: FnMut()>(F);

    impl<F: FnMut()> Drop for AtEnd<F> {
        fn drop(&mut self) {
            (self.0)();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_that_pass_do_not_end_a_lease() {
        for fault in [
            Fault::Fail(FailureKind::NotApplied),
            Fault::Fail(FailureKind::MaybeApplied),
            Fault::Fail(FailureKind::Rejected),
            Fault::LoseRequest,
            Fault::LoseReply,
            Fault::DelayRequest(ms(900)),
            Fault::DelayReply(ms(900)),
            Fault::DelayReply(TTL),
        ] {
            let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
            // Two failures, then a success, and so on.
            let body = async {
                for _ in 0..10 {
                    faults.plan(Operation::Renew, fault);
                    faults.plan(Operation::Renew, fault);
                    faults.plan(Operation::Renew, Fault::None);
                    sleep(TTL).await;
                }
            };
            let guard = pool.lock("other").acquire().await.unwrap();
            pool.lock("k").run(body).await.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
            assert!(guard.is_held(), "{fault:?}");
            assert!(faults.count(Operation::Renew) > 30, "{fault:?}");
        }
    }

    /// Each answer is later than the request timeout, and in time for the lease.
    #[tokio::test(start_paused = true)]
    async fn late_answers_to_renewals_keep_a_lease() {
        let configure = |it: PoolBuilder| it.ttl(TTL).request_timeout(ms(1_000));
        let (pool, faults) = on_virtual_time("memory://", configure).await;
        let guard = pool.lock("k").acquire().await.unwrap();
        faults.always(Fault::DelayReply(TTL / 4));
        for _ in 0..10 {
            sleep(TTL).await;
            assert!(guard.is_held());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_cannot_be_renewed_is_lost_just_before_validity_ends() {
        for fault in [
            Fault::Fail(FailureKind::NotApplied),
            Fault::Fail(FailureKind::MaybeApplied),
            Fault::Fail(FailureKind::Rejected),
            Fault::LoseRequest,
            Fault::LoseReply,
            Fault::DelayReply(TTL),
        ] {
            let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
            let (held, error) = held_until_lost(&pool, async || faults.always(fault)).await;
            assert_eq!(error.kind(), ErrorKind::Lost, "{fault:?}");
            if let Fault::Fail(_) = fault {
                let why = error.source().map(ToString::to_string);
                assert_eq!(why.as_deref(), Some("a planned failure"), "{fault:?}");
            }
            assert!(held < validity(TTL), "{fault:?}: {held:?}");
            assert!(held >= validity(TTL) - NOTICE - TICK, "{fault:?}: {held:?}");
            let tries = faults.count(Operation::Renew);
            assert!((3..100).contains(&tries), "{fault:?}: {tries} tries");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn validity_counts_from_the_sending_of_a_renewal() {
        let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        faults.plan(Operation::Renew, Fault::DelayReply(ms(900)));
        let began = Instant::now();
        let guard = pool.lock("k").renew(ms(4000)).acquire().await.unwrap();
        let before = guard.valid_for() + began.elapsed();
        assert_eq!(before, validity(TTL));
        eventually_async(TTL, "the renewal", async || guard.valid_for() + began.elapsed() > before)
            .await;
        // Renewals are rounded to a grid, and so are early by up to a quarter of the interval.
        assert!(began.elapsed() >= ms(900 + 3000));
        let renewed = guard.valid_for() + began.elapsed() - before;
        assert!(renewed <= ms(4000) && renewed >= ms(3000) - TICK, "{renewed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_renewals_do_not_delay_other_renewals() {
        let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
        let pool = LockPool::with_backend(backend).ttl(TTL).request_timeout(ms(3000));
        let pool = pool.on_current_runtime().connect().await.unwrap();
        let slow = pool.lock("slow").renew(ms(2400)).acquire().await.unwrap();
        let mut others = Vec::new();
        for n in 0..100 {
            others.push(pool.lock(format!("other:{n}")).acquire().await.unwrap());
            sleep(TICK).await;
        }
        // The first renewal is that of `slow`, and hangs.
        faults.plan(Operation::Renew, Fault::LoseReply);
        eventually_async(TTL, "the slow one begins", async || faults.count(Operation::Renew) == 1)
            .await;
        sleep(ms(2000)).await;
        assert!(slow.valid_for() < TTL * 7 / 10, "still without an answer");
        for other in &others {
            assert!(other.valid_for() > TTL * 3 / 4, "{:?} {:?}", other.key(), other.valid_for());
        }
        sleep(2 * TTL).await;
        assert!(slow.is_held() && others.iter().all(|other| other.is_held()));
    }

    #[tokio::test(start_paused = true)]
    async fn leases_that_are_due_together_share_a_round_trip() {
        let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        let mut guards = Vec::new();
        for n in 0..1000 {
            guards.push(pool.lock(format!("k:{n}")).acquire().await.unwrap());
        }
        sleep(TTL / 2).await;
        // Spread over a sixth of the interval, on a grid of a sixteenth or less.
        let round_trips = faults.count(Operation::Renew);
        assert!((1..=8).contains(&round_trips), "{round_trips}");
        assert!(guards.iter().all(|guard| guard.valid_for() > TTL / 2));
    }

    #[tokio::test(start_paused = true)]
    async fn without_renewal_the_ttl_is_a_hard_limit() {
        #[distributed_lock(key = "k", renew = false, pool = pool)]
        async fn job(pool: &LockPool) -> Result<(), LockError> {
            pending().await
        }

        let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        let began = Instant::now();
        let error = job(&pool).await.unwrap_err();
        let held = began.elapsed();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert!(error.to_string().contains("its ttl is over"), "{error}");
        assert!(held < validity(TTL) && held >= validity(TTL) - NOTICE - TICK, "{held:?}");
        assert_eq!(faults.count(Operation::Renew), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn max_hold_ends_what_could_be_renewed() {
        #[distributed_lock(key = "k", max_hold = max_hold, pool = pool)]
        async fn job(pool: &LockPool, max_hold: Duration) -> Result<(), LockError> {
            pending().await
        }

        // Shorter and longer than the ttl. The notice is a tenth of the shorter of the two.
        for (max_hold, notice) in [(ms(1000), ms(100)), (ms(35_000), NOTICE)] {
            let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
            let began = Instant::now();
            let error = job(&pool, max_hold).await.unwrap_err();
            let held = began.elapsed();
            assert_eq!(error.kind(), ErrorKind::Lost);
            assert!(error.to_string().contains("max_hold"), "{error}");
            assert!(held < max_hold && held >= max_hold - notice - TICK, "{held:?}");
            let free = pool.lock("k").try_acquire().await.unwrap();
            assert!(free.is_some(), "released at once");
            assert_eq!(faults.count(Operation::Renew) > 0, max_hold > TTL);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_only_notified_goes_on() {
        #[distributed_lock(key = "k", on_lost = "notify", pool = pool, guard = guard)]
        async fn job(pool: &LockPool, faults: &FaultPlan) -> Result<(Duration, bool), LockError> {
            let began = Instant::now();
            faults.always(Fault::Fail(FailureKind::NotApplied));
            assert!(guard.lost().await.is_lost());
            let cancelled = began.elapsed();
            sleep(3 * TTL).await;
            Ok((cancelled, guard.is_held()))
        }

        let (pool, faults) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        let (cancelled, held) = job(&pool, &faults).await.unwrap();
        assert!(
            cancelled < validity(TTL) && cancelled >= validity(TTL) - NOTICE - TICK,
            "{cancelled:?}"
        );
        assert!(!held);

        faults.always(Fault::None);
        let request = pool.lock("k2").renew(false).on_lost(OnLost::Notify);
        let ended = request.run(async { sleep(3 * TTL).await });
        ended.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn min_hold_keeps_the_lock_for_the_rest_of_it() {
        #[distributed_lock(key = "k", min_hold = "25s", pool = pool)]
        async fn job(pool: &LockPool) -> Result<(), LockError> {
            Ok(())
        }

        let (pool, _) = on_virtual_time("memory://", |it| it.ttl(TTL)).await;
        let began = Instant::now();
        job(&pool).await.unwrap();
        assert_eq!(began.elapsed(), Duration::ZERO, "the caller does not wait");
        let wait = ms(60_000);
        let guard = pool.lock("k").wait(wait).acquire().await.unwrap();
        let free = began.elapsed();
        assert!(free >= ms(25_000) && free < ms(25_100), "{free:?}");
        drop(guard);

        // A body that takes longer is not held up.
        let body = sleep(ms(30_000));
        pool.lock("long").min_hold(ms(25_000)).run(body).await.unwrap();
        assert!(pool.lock("long").try_acquire().await.unwrap().is_some());

        // Also at the other exits.
        let aborted = tokio::spawn(pool.lock("cut").min_hold(ms(25_000)).run(pending::<()>()));
        sleep(ms(1000)).await;
        aborted.abort();
        assert!(aborted.await.unwrap_err().is_cancelled());
        let began = Instant::now();
        let guard = pool.lock("cut").wait(wait).acquire().await.unwrap();
        assert!(began.elapsed() >= ms(24_000) && began.elapsed() < ms(24_100));
        drop(guard);
    }
}

/// The server runs one script at a time, so a long one delays all clients.
#[tokio::test]
async fn renewals_of_many_leases_are_scripts_of_bounded_length() {
    let server = RedisServer::start();
    // The server notes all keys of a script that reads, if reads are tracked.
    renewals_are_bounded(&server, &server.url(), 16).await;
    server.cli(&[
        "ACL",
        "SETUSER",
        "untracked",
        "on",
        ">pw",
        "~*",
        "&*",
        "+@all",
        "-client|tracking",
    ]);
    let untracked = server.url().replace("://", "://untracked:pw@");
    renewals_are_bounded(&server, &untracked, 256).await;
}

/// The keys of one lease are in one script, and those of several in scripts of `most_keys`.
async fn renewals_are_bounded(server: &RedisServer, url: &str, most_keys: usize) {
    const LOCKS: usize = 1_000;
    const OF_ONE_LEASE: usize = 100;
    let pool = LockPool::builder(url).ttl(ms(9_000)).connect().await.unwrap();
    let monitor = Monitor::start(server);
    let mut guards = Vec::new();
    for n in 0..LOCKS {
        guards.push(pool.lock(format!("k:{n}")).acquire().await.unwrap());
    }
    let of_one = (0..OF_ONE_LEASE).map(|n| format!("of-one:{n}"));
    guards.push(pool.lock_all(of_one).acquire().await.unwrap());
    let renewal = sha(include_str!("../../lock-runtime/src/backend/redis/protocol/renew.lua"));
    let renewals = || -> Vec<Vec<String>> {
        let ran = monitor.lines().into_iter().filter(|ran| ran.by != Caller::Script);
        let scripts = ran.filter(|ran| ran.name() == "EVALSHA" && ran.args[1] == renewal);
        scripts
            .map(|ran| {
                let count: usize = ran.args[2].parse().unwrap();
                ran.args[3..3 + count].to_vec()
            })
            .collect()
    };
    eventually_async(ms(60_000), "each lease is renewed", async || {
        let keys: HashSet<_> = renewals().into_iter().flatten().collect();
        keys.len() >= LOCKS + OF_ONE_LEASE
    })
    .await;
    let (of_one, of_several): (Vec<_>, Vec<_>) =
        renewals().into_iter().partition(|keys| keys[0].starts_with("of-one:"));
    let lengths: Vec<_> = of_several.iter().map(Vec::len).collect();
    assert!(lengths.iter().all(|keys| (1..=most_keys).contains(keys)), "{lengths:?}");
    assert!(of_one.iter().all(|keys| keys.len() == OF_ONE_LEASE), "{of_one:?}");
    assert!(lengths.len() < LOCKS / 4, "leases share scripts: {}", lengths.len());
    assert!(guards.iter().all(LockGuard::is_held));
    for guard in guards {
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn min_hold_outlives_the_process_that_requested_it() {
    let server = RedisServer::start();
    let pool = LockPool::connect(&server.url()).await.unwrap();
    let held_since = now_ns();
    let guard = pool.lock("k").ttl(ms(1000)).min_hold(ms(3000)).acquire().await.unwrap();
    guard.release().await.unwrap();
    let left: i64 = server.cli(&["PTTL", "k"]).parse().unwrap();
    assert!((1..=3000).contains(&left), "{left} ms");
    assert_eq!(pool.shutdown(ms(1000)).await.released, 0, "nothing is held any more");
    let other = LockPool::connect(&server.url()).await.unwrap();
    let guard = other.lock("k").wait(ms(10_000)).acquire().await.unwrap();
    // The server rounds to a millisecond.
    assert!(now_ns() - held_since >= nanos(ms(2990)));
    guard.release().await.unwrap();
}

/// A round trip is longer than half of what is left of the lease, which is the time limit before a second try.
#[tokio::test]
async fn a_renewal_counts_that_is_answered_beside_the_second_try() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(&server);
    let builder = LockPool::builder(proxy.url()).request_timeout(ms(5_000));
    let pool = builder.connect().await.unwrap();
    // A first renewal sends the text of its script, which is a round trip more.
    let renewed = server.calls("pexpire");
    let first = pool.lock("first").fencing(false).renew(Renew::Every(ms(50)));
    let first = first.acquire().await.unwrap();
    eventually_async(DEADLINE, "it is renewed", async || server.calls("pexpire") > renewed).await;
    first.release().await.unwrap();
    let guard = pool.lock("order:42").ttl(ms(3_000)).acquire().await.unwrap();
    proxy.delay(Direction::ToClient, ms(900));
    let lost = timeout(ms(6_000), guard.lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    proxy.delay(Direction::ToClient, Duration::ZERO);
    guard.release().await.unwrap();
}
