//! What the arguments of the attribute do when the program runs.

#![allow(clippy::disallowed_methods)]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{
    ErrorKind, Fence, LockError, LockPool, OnLost, ReleaseMode, Wait, distributed_lock,
};
use lock_tests::logs::Logs;
use lock_tests::prelude::*;
use lock_tests::sizes::{Sizes, sizes};
use lock_tests::{Monitor, RedisServer, eventually};

mod conflict {
    use super::*;

    #[distributed_lock(key = "job:<id>", pool = pool, wait = "0s")]
    async fn fails(pool: &LockPool, id: u64) -> Result<u64, LockError> {
        Ok(id)
    }

    #[distributed_lock(key = "job:<id>", pool = pool, wait = "0s", on_conflict = "skip")]
    async fn skips(pool: &LockPool, id: u64) -> Result<Option<u64>, LockError> {
        Ok(Some(id))
    }

    #[distributed_lock(key = "job:<id>", pool = pool, wait = "0s", on_conflict = "skip")]
    async fn skips_unit(pool: &LockPool, id: u64, runs: &AtomicUsize) -> Result<(), LockError> {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    #[distributed_lock(
        key = "job:<id>", pool = pool, wait = "0s", on_conflict = "skip", on_error = |_| Some(0)
    )]
    async fn skips_option(pool: &LockPool, id: u64) -> Option<u64> {
        Some(id)
    }

    #[distributed_lock(key = "job:<id>", pool = pool, wait = "0s", on_conflict = instead)]
    async fn falls_back(
        pool: &LockPool,
        id: u64,
        #[cfg(any())] absent: u32,
        #[cfg(test)] name: String,
        #[cfg(not(test))] name: &str,
    ) -> Result<String, LockError> {
        Ok(format!("{name} did {id}"))
    }

    async fn instead(pool: &LockPool, id: u64, name: String) -> Result<String, LockError> {
        let free = pool.lock(format!("job:{id}")).try_acquire().await?.is_some();
        Ok(format!("{name} did not, free: {free}"))
    }

    #[tokio::test]
    async fn a_conflict_is_an_error_a_skip_or_a_call_of_the_fallback() {
        let pool = memory().await;
        let runs = AtomicUsize::new(0);
        let held = pool.lock("job:1").acquire().await.unwrap();
        let error = fails(&pool, 1).await.unwrap_err();
        assert_eq!((error.kind(), error.template()), (ErrorKind::Conflict, Some("job:<id>")));
        assert_eq!(skips(&pool, 1).await.unwrap(), None);
        skips_unit(&pool, 1, &runs).await.unwrap();
        assert_eq!(runs.load(Ordering::SeqCst), 0, "skipped");
        assert_eq!(skips_option(&pool, 1).await, None);
        let said = falls_back(&pool, 1, "ben".into()).await.unwrap();
        assert_eq!(said, "ben did not, free: false");

        // Another key, and the same one when it is free.
        assert_eq!(fails(&pool, 2).await.unwrap(), 2);
        held.release().await.unwrap();
        assert_eq!(fails(&pool, 1).await.unwrap(), 1);
        assert_eq!(skips(&pool, 1).await.unwrap(), Some(1));
        skips_unit(&pool, 1, &runs).await.unwrap();
        assert_eq!(runs.load(Ordering::SeqCst), 1);
        assert_eq!(skips_option(&pool, 1).await, Some(1));
        assert_eq!(falls_back(&pool, 1, "ben".into()).await.unwrap(), "ben did 1");
    }

    #[async_trait::async_trait]
    trait Jobs {
        async fn run(&self, name: String) -> Result<String, LockError>;
    }

    #[async_trait::async_trait]
    impl Jobs for LockPool {
        #[distributed_lock(key = "job:<name>", pool = self, wait = "0s", on_conflict = named)]
        async fn run(&self, name: String) -> Result<String, LockError> {
            Ok(name)
        }
    }

    async fn named(pool: &LockPool, name: String) -> Result<String, LockError> {
        instead(pool, 1, name).await
    }

    #[tokio::test]
    async fn a_method_of_async_trait_falls_back() {
        let pool = memory().await;
        let held = pool.lock("job:1").acquire().await.unwrap();
        assert_eq!(pool.run("1".into()).await.unwrap(), "1 did not, free: false");
        held.release().await.unwrap();
        assert_eq!(pool.run("1".into()).await.unwrap(), "1");
    }

    #[tokio::test]
    async fn a_dead_store_is_no_conflict() {
        let (pool, faults) = on_virtual_time("memory://", |it| it).await;
        let runs = AtomicUsize::new(0);
        faults.always(Fault::Fail(FailureKind::Rejected));
        assert!(fails(&pool, 1).await.unwrap_err().is_backend());
        assert!(skips(&pool, 1).await.unwrap_err().is_backend());
        assert!(skips_unit(&pool, 1, &runs).await.unwrap_err().is_backend());
        assert_eq!(skips_option(&pool, 1).await, Some(0), "`on_error`");
        assert!(falls_back(&pool, 1, "ben".into()).await.unwrap_err().is_backend());
        assert_eq!(runs.load(Ordering::SeqCst), 0);
    }
}

mod error {
    use super::*;

    #[distributed_lock(key = "e", pool = pool, wait = "0s", on_error = |error| error.to_string())]
    async fn closure(pool: &LockPool) -> String {
        "ran".into()
    }

    #[allow(clippy::needless_pass_by_value)]
    fn status_of(error: LockError) -> u16 {
        if error.is_conflict() { 409 } else { 503 }
    }

    #[distributed_lock(key = "e", pool = pool, wait = "0s", on_error = status_of)]
    async fn path(pool: &LockPool) -> u16 {
        200
    }

    /// The body takes the argument, and so does the closure.
    #[distributed_lock(
        key = "e:<name>",
        pool = pool,
        wait = "0s",
        on_error = { let name = name.clone(); move |error: LockError| Err((name, error.kind())) }
    )]
    async fn block(pool: &LockPool, name: String) -> Result<usize, (String, ErrorKind)> {
        drop(name);
        Ok(1)
    }

    #[derive(Debug)]
    struct Mine(ErrorKind);

    impl From<LockError> for Mine {
        fn from(error: LockError) -> Self {
            Self(error.kind())
        }
    }

    #[distributed_lock(key = "e", pool = pool, wait = "0s")]
    async fn converted(pool: &LockPool) -> Result<(), Mine> {
        Ok(())
    }

    #[tokio::test]
    async fn an_error_becomes_the_functions_own() {
        let pool = memory().await;
        assert_eq!(closure(&pool).await, "ran");
        assert_eq!(path(&pool).await, 200);
        converted(&pool).await.unwrap();
        let held = pool.lock("e").acquire().await.unwrap();
        let text = closure(&pool).await;
        assert!(
            text.contains("the lock is held by another call or guard of this process"),
            "{text}"
        );
        assert_eq!(path(&pool).await, 409);
        assert_eq!(converted(&pool).await.unwrap_err().0, ErrorKind::Conflict);
        held.release().await.unwrap();
        let (dead, faults) = on_virtual_time("memory://", |it| it).await;
        faults.always(Fault::Fail(FailureKind::Rejected));
        assert_eq!(path(&dead).await, 503);
    }

    #[tokio::test]
    async fn a_block_gives_the_conversion_what_the_body_takes() {
        let pool = memory().await;
        assert_eq!(block(&pool, "a".into()).await, Ok(1));
        let held = pool.lock("e:a").acquire().await.unwrap();
        assert_eq!(block(&pool, "a".into()).await, Err(("a".into(), ErrorKind::Conflict)));
        held.release().await.unwrap();
    }
}

mod loss {
    use super::*;

    /// Records that it was dropped.
    struct Dropped<'a>(&'a AtomicBool);

    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[distributed_lock(key = "l", pool = pool, ttl = "200ms", renew = false, guard = lock)]
    async fn cancelled(pool: &LockPool, dropped: &AtomicBool) -> Result<bool, LockError> {
        let _dropped = Dropped(dropped);
        tokio::time::sleep(ms(500)).await;
        Ok(lock.is_held())
    }

    #[distributed_lock(
        key = "l", pool = pool, ttl = "200ms", renew = false, on_lost = "notify", guard = lock
    )]
    async fn notified(pool: &LockPool) -> Result<(ErrorKind, bool), LockError> {
        let lost = lock.lost().await.kind();
        tokio::time::sleep(ms(500)).await;
        Ok((lost, lock.is_held()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_loss_cancels_the_body_or_notifies_it() {
        let (pool, _) = on_virtual_time("memory://", |it| it).await;
        let dropped = AtomicBool::new(false);
        assert!(cancelled(&pool, &dropped).await.unwrap_err().is_lost());
        assert!(dropped.load(Ordering::SeqCst));
        assert_eq!(notified(&pool).await.unwrap(), (ErrorKind::Lost, false));

        let request = || pool.lock("l").ttl(ms(200)).renew(false);
        let body = || tokio::time::sleep(ms(500));
        assert!(request().run(body()).await.unwrap_err().is_lost());
        request().on_lost(OnLost::Notify).run(body()).await.unwrap();
    }
}

mod release {
    use super::*;

    #[distributed_lock(key = "r", pool = pool)]
    async fn awaited(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = "r", pool = pool, release = "background")]
    async fn in_background(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_waits_for_the_release_or_does_not() {
        let (pool, faults) = on_virtual_time("memory://", |it| it).await;
        let began = tokio::time::Instant::now();
        faults.plan(Operation::Release, Fault::DelayReply(ms(700)));
        awaited(&pool).await.unwrap();
        assert!(began.elapsed() >= ms(700));

        for call in 0..2 {
            let began = tokio::time::Instant::now();
            faults.plan(Operation::Release, Fault::DelayRequest(ms(700)));
            if call == 0 {
                in_background(&pool).await.unwrap();
            } else {
                let request = pool.lock("r").release(ReleaseMode::Background);
                request.run(async {}).await.unwrap();
            }
            assert_eq!(began.elapsed(), Duration::ZERO);
            // The release is sent all the same, and a later call waits for it.
            awaited(&pool).await.unwrap();
            assert!(began.elapsed() >= ms(700));
        }
    }
}

mod when {
    use super::*;

    #[distributed_lock(key = "w:<id>", pool = pool, when = *live && id > 3)]
    async fn guarded(pool: &LockPool, id: u64, live: &bool) -> Result<bool, LockError> {
        let request = pool.lock(format!("w:{id}")).reentrant(true).fencing(false);
        let free = request.try_acquire().await;
        Ok(free.is_ok_and(|guard| guard.is_some_and(|guard| guard.valid_for() > ms(29_000))))
    }

    #[distributed_lock(key = "w:<id>", pool = pool, when = false)]
    async fn never(pool: &LockPool, id: &str) -> Result<(), LockError> {
        Ok(())
    }

    #[tokio::test]
    async fn a_false_condition_runs_the_body_and_sends_no_request() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let monitor = Monitor::start(&server);
        never(&pool, "1").await.unwrap();
        // Its key would be refused.
        never(&pool, "").await.unwrap();
        assert_eq!(monitor.settled(), []);
        server.kill();
        never(&pool, "1").await.unwrap();
    }

    #[tokio::test]
    async fn a_condition_is_evaluated_for_each_call() {
        let (pool, faults) = on_virtual_time("memory://", |it| it).await;
        for (id, live, locks) in [(3, true, false), (4, false, false), (4, true, true)] {
            let before = faults.count(Operation::Acquire);
            guarded(&pool, id, &live).await.unwrap();
            // The body's own try passes through the outer lock, or sends a request.
            assert_eq!(faults.count(Operation::Acquire) - before, 1, "{id} {live}");
            let locked = pool.lock(format!("w:{id}")).run(guarded(&pool, id, &live)).await;
            let refused = locked.unwrap().is_err_and(|it| it.kind() == ErrorKind::WouldDeadlock);
            assert_eq!(refused, locks, "{id} {live}");
        }
    }
}

mod guard {
    use super::*;

    #[distributed_lock(key = "g:<id>", pool = pool, guard = lock)]
    async fn fence(pool: &LockPool, id: u64) -> Result<Fence, LockError> {
        lock.verify().await?;
        assert!(lock.is_held() && lock.key().as_str() == format!("g:{id}"));
        Ok(lock.fence().unwrap())
    }

    async fn grows(pool: &LockPool) {
        let mut last = fence(pool, 1).await.unwrap();
        for round in 0..20 {
            let next = fence(pool, round % 3).await.unwrap();
            assert!(next > last, "{next} after {last}");
            last = next;
        }
        let guard = pool.lock("g:1").acquire().await.unwrap();
        assert!(guard.fence().unwrap() > last);
        guard.release().await.unwrap();
    }

    #[tokio::test]
    async fn the_guard_shows_a_growing_fence() {
        grows(&memory().await).await;
        let server = RedisServer::start();
        grows(&LockPool::connect(&server.url()).await.unwrap()).await;
    }

    /// An unused fence costs nothing.
    #[tokio::test]
    async fn no_fence_is_minted_without_a_guard() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        let guard = pool.lock("g:1").fencing(false).acquire().await.unwrap();
        assert_eq!(guard.fence(), None);
        guard.release().await.unwrap();
        nested::inner(&pool, 1).await.unwrap();
        assert_eq!(server.cli(&["DBSIZE"]), "0");
        fence(&pool, 1).await.unwrap();
        assert_eq!(server.cli(&["KEYS", "*"]), "lock_runtime:fence");
    }
}

mod nested {
    use super::*;

    #[distributed_lock(key = "n:<id>", pool = pool)]
    pub(super) async fn inner(pool: &LockPool, id: u64) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = "n:<id>", pool = pool)]
    async fn outer(pool: &LockPool, id: u64, inner_id: u64) -> Result<(), LockError> {
        inner(pool, inner_id).await
    }

    #[distributed_lock(key = "n:<id>", pool = pool, reentrant = true, guard = lock)]
    async fn again(pool: &LockPool, id: u64) -> Result<Fence, LockError> {
        lock.fence().ok_or_else(|| panic!("the outer one has a fence"))
    }

    #[distributed_lock(key = "n:<id>", pool = pool, guard = lock)]
    async fn around(pool: &LockPool, id: u64) -> Result<(), LockError> {
        for _ in 0..2 {
            assert_eq!(Some(again(pool, id).await?), lock.fence());
        }
        lock.verify().await?;
        let other = pool.clone();
        let elsewhere = tokio::spawn(async move {
            other.lock(format!("n:{id}")).wait(Duration::ZERO).acquire().await.map(drop)
        });
        assert!(elsewhere.await.unwrap().unwrap_err().is_conflict(), "still held");
        Ok(())
    }

    #[distributed_lock(key = "deep:<depth>", pool = pool)]
    async fn deeper(pool: &LockPool, depth: u32) -> Result<u32, LockError> {
        if depth == 0 {
            return Ok(0);
        }
        Ok(1 + Box::pin(deeper(pool, depth - 1)).await?)
    }

    #[distributed_lock(key = "same", pool = pool, reentrant = true)]
    async fn same(pool: &LockPool, depth: u32) -> Result<u32, LockError> {
        if depth == 0 {
            return Ok(0);
        }
        Ok(1 + Box::pin(same(pool, depth - 1)).await?)
    }

    #[tokio::test]
    async fn the_same_key_again_is_an_error_at_once() {
        let pool = memory().await;
        let nested = tokio::time::timeout(Duration::from_secs(1), outer(&pool, 1, 1));
        let error = nested.await.expect("at once, not after the wait of 3 s").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
        // Also where the outer lock was taken by `run`, and where only one of several keys is the same.
        let error = pool.lock("n:1").run(inner(&pool, 1)).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
        let two = pool.lock_all(["n:1", "n:2"]).acquire();
        let error = pool.lock("n:1").run(two).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
        // Afterwards all is free.
        inner(&pool, 1).await.unwrap();
    }

    #[tokio::test]
    async fn another_key_or_pool_is_a_lock_of_its_own() {
        let (pool, other) = (memory().await, memory().await);
        outer(&pool, 1, 2).await.unwrap();
        pool.lock("n:1").run(inner(&other, 1)).await.unwrap().unwrap();
        assert_eq!(deeper(&pool, 5).await.unwrap(), 5);
    }

    #[tokio::test]
    async fn reentrant_passes_through_and_the_outer_lock_survives() {
        let pool = memory().await;
        around(&pool, 1).await.unwrap();
        assert_eq!(same(&pool, 5).await.unwrap(), 5);
        // Without an outer lock it is an ordinary lock.
        let held = pool.lock("n:1").acquire().await.unwrap();
        let request = pool.lock("n:1").reentrant(true).wait(Duration::ZERO).acquire();
        assert!(request.await.unwrap_err().is_conflict(), "a guard is not seen");
        held.release().await.unwrap();
        again(&pool, 1).await.unwrap();
    }

    #[tokio::test]
    async fn a_key_that_the_outer_lock_lacks_is_not_passed_through() {
        let pool = memory().await;
        let two = pool.lock_all(["n:1", "n:2"]).reentrant(true).acquire();
        let error = pool.lock("n:1").run(two).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldDeadlock);
        let one = pool.lock("n:2").reentrant(true).acquire();
        let guard = pool.lock_all(["n:1", "n:2"]).run(one).await.unwrap().unwrap();
        assert_eq!(guard.keys().len(), 2, "a view of the outer lock");
    }
}

mod several {
    use super::*;

    #[distributed_lock(
        keys = ["acct:<from>", "acct:<to>"], pool = pool, wait = "20s", ttl = "30s", guard = lock
    )]
    async fn transfer(pool: &LockPool, from: u64, to: u64) -> Result<usize, LockError> {
        tokio::task::yield_now().await;
        Ok(lock.keys().len())
    }

    async fn crossing(pools: [LockPool; 2]) {
        let began = std::time::Instant::now();
        let mut tasks = tokio::task::JoinSet::new();
        for (n, pool) in pools.iter().cycle().take(4).cloned().enumerate() {
            let (from, to) = if n < 2 { (1, 2) } else { (2, 1) };
            tasks.spawn(async move {
                for _ in 0..50 {
                    assert_eq!(transfer(&pool, from, to).await.unwrap(), 2);
                }
            });
        }
        // Some milliseconds each. A pause between two tries of each would be more than ten seconds.
        let done = tokio::time::timeout(Duration::from_secs(6), tasks.join_all());
        done.await.expect("they do not wait for each other");
        println!("200 transfers in opposite orders in {:?}", began.elapsed());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn opposite_orders_never_deadlock() {
        let pool = memory().await;
        crossing([pool.clone(), pool]).await;
        let server = RedisServer::start();
        let connect = async || LockPool::connect(&server.url()).await.unwrap();
        crossing([connect().await, connect().await]).await;
    }

    #[tokio::test]
    async fn all_or_nothing_and_each_key_once() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        assert_eq!(transfer(&pool, 1, 1).await.unwrap(), 1);
        server.cli(&["SET", "acct:2", "another", "PX", "60000"]);
        let request = pool.lock_all(["acct:2", "acct:1", "acct:2"]).wait(ms(500));
        assert!(request.acquire().await.unwrap_err().is_conflict());
        // Where the wait ends during a request, the undo goes on. The ttl is longer.
        eventually(ms(10_000), "nothing is kept", || server.cli(&["EXISTS", "acct:1"]) == "0");
        server.cli(&["DEL", "acct:2"]);
        let guard = pool.lock_all(["acct:2", "acct:1", "acct:2"]).acquire().await.unwrap();
        assert_eq!(guard.keys().len(), 2);
        assert_eq!(server.cli(&["EXISTS", "acct:1", "acct:2"]), "2");
        guard.release().await.unwrap();
        assert_eq!(server.cli(&["EXISTS", "acct:1", "acct:2"]), "0");
    }
}

mod pools {
    use super::*;

    struct Service {
        locks: LockPool,
    }

    impl Service {
        #[distributed_lock(key = "p", pool = self.locks, wait = "0s")]
        async fn by_expression(&self) -> Result<(), LockError> {
            Ok(())
        }
    }

    #[distributed_lock(key = "p", pool = "policies", wait = "0s")]
    async fn by_name() -> Result<(), LockError> {
        Ok(())
    }

    #[tokio::test]
    async fn a_pool_goes_by_name_or_by_expression() {
        let (named, own) = (memory().await, memory().await);
        assert_eq!(by_name().await.unwrap_err().kind(), ErrorKind::PoolNotFound);
        lock_runtime::install("policies", named.clone()).unwrap();
        let service = Service { locks: own.clone() };
        let held = named.lock("p").acquire().await.unwrap();
        assert!(by_name().await.unwrap_err().is_conflict());
        service.by_expression().await.unwrap();
        held.release().await.unwrap();
        by_name().await.unwrap();
        let held = own.lock("p").acquire().await.unwrap();
        assert!(service.by_expression().await.unwrap_err().is_conflict());
        held.release().await.unwrap();
    }
}

mod holds {
    use super::*;

    #[distributed_lock(key = "h", pool = pool, min_hold = "1m", wait = "0s")]
    async fn once_a_minute(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = "h", pool = pool, max_hold = "1m", ttl = "5s")]
    async fn a_minute_at_most(pool: &LockPool, takes: Duration) -> Result<(), LockError> {
        tokio::time::sleep(takes).await;
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn min_hold_keeps_the_lock_when_the_body_is_done() {
        let (pool, _) = on_virtual_time("memory://", |it| it).await;
        once_a_minute(&pool).await.unwrap();
        tokio::time::sleep(ms(59_900)).await;
        assert!(once_a_minute(&pool).await.unwrap_err().is_conflict());
        tokio::time::sleep(ms(200)).await;
        once_a_minute(&pool).await.unwrap();
        // Also when it is shorter than the ttl, and by the guard.
        tokio::time::sleep(ms(61_000)).await;
        let guard = pool.lock("h").ttl(ms(500)).min_hold(ms(200)).acquire().await.unwrap();
        guard.release().await.unwrap();
        let next = pool.lock("h").wait(ms(150)).acquire().await;
        assert!(next.unwrap_err().is_conflict());
        pool.lock("h").wait(ms(100)).acquire().await.unwrap().release().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn max_hold_ends_what_would_be_renewed_for_ever() {
        let (pool, faults) = on_virtual_time("memory://", |it| it).await;
        a_minute_at_most(&pool, ms(58_000)).await.unwrap();
        assert!(faults.count(Operation::Renew) > 30, "every third of the ttl");
        let error = a_minute_at_most(&pool, ms(61_000)).await.unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("max_hold"), "{error}");
        pool.lock("h").wait(ms(100)).acquire().await.unwrap().release().await.unwrap();
    }

    #[tokio::test]
    async fn min_hold_keeps_the_key_in_redis() {
        let server = RedisServer::start();
        let pool = LockPool::connect(&server.url()).await.unwrap();
        once_a_minute(&pool).await.unwrap();
        let left: u64 = server.cli(&["PTTL", "h"]).parse().unwrap();
        assert!((50_000..=60_000).contains(&left), "{left}");
        assert!(once_a_minute(&pool).await.unwrap_err().is_conflict());
    }
}

mod waits {
    use super::*;

    #[distributed_lock(key = "t", pool = pool, wait = "0s")]
    async fn tries(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(key = "t", pool = pool, wait = "forever")]
    async fn waits(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[distributed_lock(
        key = "t", pool = pool, wait = "forever", retry_delay = "100ms", retry_count = 3
    )]
    async fn counts(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_or_for_ever() {
        let (pool, faults) = on_virtual_time("memory://", |it| it).await;
        let held = pool.lock("t").acquire().await.unwrap();
        let began = tokio::time::Instant::now();
        assert!(tries(&pool).await.unwrap_err().is_conflict());
        assert_eq!(began.elapsed(), Duration::ZERO);
        let releasing = async {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            held.release().await.unwrap();
        };
        let (waited, ()) = tokio::join!(waits(&pool), releasing);
        waited.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(3600));
        assert_eq!(
            faults.count(Operation::Acquire),
            1,
            "the lock is handed off, and no other request is sent"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn retry_count_limits_the_attempts() {
        let (backend, faults) = FaultyBackend::new(open_backend("memory://retries").await.unwrap());
        let pool = LockPool::with_backend(backend).on_current_runtime().connect().await.unwrap();
        // Another process.
        let other = LockPool::with_backend(open_backend("memory://retries").await.unwrap());
        let other = other.on_current_runtime().connect().await.unwrap();
        let held = other.lock("t").acquire().await.unwrap();
        let began = tokio::time::Instant::now();
        let error = counts(&pool).await.unwrap_err();
        assert!(error.is_conflict());
        let text = error.to_string();
        assert!(text.contains("in 4 attempts") && text.contains("raise `retry_count`"), "{text}");
        assert_eq!(faults.count(Operation::Acquire), 1 + 3);
        // Each pause is between a quarter of `retry_delay` and all of it.
        let took = began.elapsed();
        assert!((ms(75)..=ms(310)).contains(&took), "{took:?}");
        for (count, attempts) in [(0, 1), (1, 2), (5, 6)] {
            let before = faults.count(Operation::Acquire);
            let request = pool.lock("t").wait(Wait::Forever).retry_count(count);
            assert!(request.acquire().await.unwrap_err().is_conflict());
            assert_eq!(faults.count(Operation::Acquire) - before, attempts);
        }
        held.release().await.unwrap();
    }

    /// Which sends no request to count.
    #[tokio::test(start_paused = true)]
    async fn no_retries_is_one_try_behind_a_task_of_the_same_pool_too() {
        let (pool, faults) = on_virtual_time("memory://", |it| it).await;
        let held = pool.lock_all(["t", "u"]).acquire().await.unwrap();
        let (began, sent) = (tokio::time::Instant::now(), faults.count(Operation::Acquire));
        for keys in [&["t"][..], &["t", "u"]] {
            let error =
                pool.lock_all(keys.iter().copied()).retry_count(0).acquire().await.unwrap_err();
            let text = error.to_string();
            assert!(error.is_conflict() && text.contains("in 1 attempt (lock"), "{text}");
        }
        assert_eq!((began.elapsed(), faults.count(Operation::Acquire)), (Duration::ZERO, sent));
        held.release().await.unwrap();
    }
}

mod shapes {
    use super::*;
    use std::fmt::Display;

    #[distributed_lock(key = "generic:<id>", pool = pool, guard = lock)]
    async fn generic<T: Display, const N: usize>(
        pool: &LockPool,
        id: T,
        more: [u8; N],
    ) -> Result<(String, usize), LockError> {
        Ok((lock.key().to_string(), more.len()))
    }

    #[async_trait::async_trait]
    trait Worker: Send + Sync {
        async fn work(&self, id: u64) -> Result<String, LockError>;
    }

    struct Local {
        locks: LockPool,
        tenant: String,
    }

    #[async_trait::async_trait]
    impl Worker for Local {
        #[distributed_lock(key = "t:<self.tenant>:<id>", pool = self.locks, guard = lock)]
        async fn work(&self, id: u64) -> Result<String, LockError> {
            assert!(lock.key().as_str().ends_with(&id.to_string()));
            Ok(lock.key().to_string())
        }
    }

    #[distributed_lock(key = "named", pool = pool, name = "settle-order")]
    async fn labelled(pool: &LockPool) -> Result<(), LockError> {
        Ok(())
    }

    #[tokio::test]
    async fn generic_functions_and_boxed_trait_methods_are_locked() {
        let pool = memory().await;
        let (key, len) = generic(&pool, "a", [1, 2, 3]).await.unwrap();
        assert_eq!((key.as_str(), len), ("generic:a", 3));
        assert_eq!(generic(&pool, 7_u8, []).await.unwrap().0, "generic:7");
        let worker: Box<dyn Worker> = Box::new(Local { locks: pool.clone(), tenant: "x".into() });
        assert_eq!(worker.work(7).await.unwrap(), "t:x:7");
        let held = pool.lock("t:x:7").acquire().await.unwrap();
        let blocked = tokio::time::timeout(ms(100), worker.work(7)).await;
        assert!(blocked.is_err(), "waits for the lock");
        held.release().await.unwrap();
    }

    #[tokio::test]
    async fn events_carry_the_name() {
        let logs = Logs::global();
        let pool = memory().await;
        labelled(&pool).await.unwrap();
        generic(&pool, 1, []).await.unwrap();
        for event in ["acquired", "released"] {
            for name in ["settle-order", concat!(module_path!(), "::generic")] {
                let names_it = |line: &String| line.contains(&format!("name={name} "));
                let is_traced = || logs.lines_with(event).iter().any(names_it);
                eventually(ms(10_000), &format!("{event} {name} is traced"), is_traced);
            }
        }
    }
}

/// A builder and a request have no arguments of an attribute.
#[tokio::test]
async fn the_errors_of_a_builder_and_a_request_have_no_syntax_of_the_attribute() {
    let (nothing, long) = (Duration::ZERO, Duration::MAX);
    let builder = || LockPool::builder("memory://");
    let mut texts = Vec::new();
    for builder in [
        builder().ttl(nothing),
        builder().ttl(long),
        builder().drift_factor(1.0),
        builder().retry_delay(nothing),
        builder().linger(long),
        builder().first_renewal(nothing),
        builder().local_handoff_limit(long),
    ] {
        texts.push(builder.connect().await.unwrap_err().to_string());
    }
    let pool = memory().await;
    let request = || pool.lock("k");
    for request in [
        request().ttl(nothing),
        request().renew(nothing),
        request().renew(long),
        request().retry_delay(nothing),
        request().min_hold(long),
        request().max_hold(nothing),
        request().ttl(ms(50)).renew(false).max_hold(ms(60)),
        request().lock_delay(long),
        request().linger(long),
        request().linger(ms(50)).renew(false),
        request().reentrant(true).lock_delay(ms(50)),
    ] {
        let error = request.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        texts.push(error.to_string());
    }
    for text in texts {
        assert!(!text.contains("= \""), "{text}");
    }
}

/// By a constant, and by the arguments that a guard or a fallback keeps.
#[test]
fn the_wrapped_future_is_little_larger() {
    for Sizes { what, plain, locked, kept_again } in sizes() {
        println!("{what}: {plain} bytes, wrapped {locked}");
        assert!(locked <= plain + kept_again + 256, "{what}: {locked} for {plain}");
    }
}
