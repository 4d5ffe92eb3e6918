//! An acquire that is dropped leaves nothing behind.

#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lock_runtime::testing::{Fault, FaultyBackend, Operation, open_backend};
use lock_runtime::{ErrorKind, LockGuard, LockPool};
use lock_tests::dropped_acquires::{
    self, DroppedCall, KEY, PROMPT, RENEW, Rivals, TTL, of_several_keys_behind,
};
use lock_tests::poll::drop_at_every_poll;
use lock_tests::prelude::*;
use lock_tests::proxy::{Action, named};
use lock_tests::{FaultProxy, Monitor, RedisServer, eventually_async};
use tokio::sync::Mutex;

struct Scene {
    server: Arc<RedisServer>,
    rivals: Rivals,
}

impl Scene {
    async fn new() -> Self {
        let server = Arc::new(RedisServer::start());
        let rivals = Rivals::new(&server.url(), holder_in(&server)).await;
        Self { server, rivals }
    }
}

/// The holder of a key. A late request of a dropped acquire may add the contended mark.
fn holder_in(server: &Arc<RedisServer>) -> impl Fn(&str) -> Option<String> + Send + Sync + 'static {
    let server = server.clone();
    move |key| {
        let value = server.cli(&["GET", key]);
        (value != "(nil)").then(|| with_contended_mark(&value))
    }
}

macro_rules! dropped_at_every_poll {
    ($($situation:ident)*) => { $(
        mod $situation {
            use super::*;

            async fn of(call: DroppedCall) {
                let scene = Scene::new().await;
                let monitor = Monitor::start(&scene.server);
                dropped_acquires::$situation(&scene.rivals, call).await;
                nothing_is_renewed(&monitor).await;
            }

            #[tokio::test]
            async fn acquire() {
                of(DroppedCall::Acquire).await;
            }

            #[tokio::test]
            async fn try_acquire() {
                of(DroppedCall::TryAcquire).await;
            }

            #[tokio::test]
            async fn run() {
                of(DroppedCall::Run).await;
            }

            #[tokio::test]
            async fn annotated_function() {
                of(DroppedCall::Attribute).await;
            }
        }
    )* };
}

dropped_at_every_poll! { while_the_key_is_free while_another_pool_holds_it behind_a_local_task }

/// Watches for longer than a renewal interval of a leftover lease.
async fn nothing_is_renewed(monitor: &Monitor<'_>) {
    tokio::time::sleep(RENEW * 3 / 2).await;
    let ttl = TTL.as_millis().to_string();
    let renewals = monitor.settled().into_iter().filter(|ran| ran.is("PEXPIRE", &ttl));
    assert_eq!(renewals.collect::<Vec<_>>(), []);
}

#[tokio::test]
async fn several_keys_with_the_middle_one_held_elsewhere() {
    let scene = Scene::new().await;
    several_keys_behind(&scene, &scene.rivals.theirs).await;
}

#[tokio::test]
async fn several_keys_with_the_middle_one_held_here() {
    let scene = Scene::new().await;
    several_keys_behind(&scene, &scene.rivals.ours).await;
}

async fn several_keys_behind(scene: &Scene, holder: &LockPool) {
    let monitor = Monitor::start(&scene.server);
    of_several_keys_behind(&scene.rivals, holder).await;
    nothing_is_renewed(&monitor).await;
}

#[tokio::test]
async fn overlapping_sets_of_keys_in_any_order_do_not_block_each_other() {
    let scene = Scene::new().await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..60 {
        let pool = if n % 2 == 0 { scene.rivals.ours.clone() } else { scene.rivals.theirs.clone() };
        let keys = [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "b"]][n % 3];
        tasks.spawn(async move {
            let held = pool.lock_all(keys).wait(ms(30_000)).run(tokio::task::yield_now());
            if n % 5 == 0 {
                drop(tokio::time::timeout(ms(fastrand::u64(..20)), held).await);
            } else {
                held.await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    for key in ["a", "b", "c"] {
        scene.rivals.all_can_acquire(key).await;
    }
}

/// A proxied pool, and its scene.
async fn through_a_proxy(request_timeout: Duration) -> (Scene, FaultProxy) {
    let mut scene = Scene::new().await;
    let proxy = FaultProxy::start(&scene.server);
    let builder = LockPool::builder(proxy.url()).request_timeout(request_timeout);
    scene.rivals.ours = builder.connect().await.unwrap();
    // The server knows the scripts from here on.
    scene.rivals.all_can_acquire(KEY).await;
    (scene, proxy)
}

async fn with_a_fault(action: Action) {
    let (scene, proxy) = through_a_proxy(ms(200)).await;
    let monitor = Monitor::start(&scene.server);
    let make = || {
        // Met by this acquire, or by the next one if this one is dropped too early.
        let _ = proxy.on_next(named("EVALSHA"), action);
        DroppedCall::Acquire.of(&scene.rivals.ours)
    };
    drop_at_every_poll(make, async |_| {
        scene.rivals.all_can_acquire(KEY).await;
        proxy.release_held();
        eventually_async(PROMPT, "a late request's key is freed", async || {
            scene.rivals.holder(KEY).is_none()
        })
        .await;
        scene.rivals.all_can_acquire(KEY).await;
    })
    .await;
    nothing_is_renewed(&monitor).await;
}

#[tokio::test]
async fn with_the_reply_lost() {
    with_a_fault(Action::DropReply).await;
}

#[tokio::test]
async fn with_the_reply_late() {
    with_a_fault(Action::HoldReply).await;
}

#[tokio::test]
async fn with_the_request_late() {
    with_a_fault(Action::HoldRequest).await;
}

#[tokio::test]
async fn with_the_connection_cut_before_the_reply() {
    with_a_fault(Action::CutBeforeReply).await;
}

/// The request of a dropped acquire arrives when only the clean-up still knows it.
#[tokio::test]
async fn a_request_that_arrives_after_its_acquire_was_dropped_is_taken_back() {
    // The acquire is dropped before it sends another request.
    let (scene, proxy) = through_a_proxy(ms(1_000)).await;
    let monitor = Monitor::start(&scene.server);
    until_the_next_fence_is_a_script().await;
    let trap = proxy.on_next(named("EVALSHA"), Action::HoldRequest);
    let acquire = tokio::spawn({
        let request = scene.rivals.ours.lock(KEY).ttl(TTL);
        async move { request.acquire().await.map(drop) }
    });
    eventually_async(PROMPT, "the request is under way", async || trap.sprung()).await;
    acquire.abort();
    acquire.await.unwrap_err();
    scene.rivals.all_can_acquire(KEY).await;
    let granted = |ran: &lock_tests::monitor::Ran| ran.is("SET", KEY) && ran.is("SET", "20000");
    assert!(!monitor.settled().iter().any(granted), "it has not arrived yet");
    proxy.release_held();
    monitor.wait_for(PROMPT, granted);
    eventually_async(PROMPT, "it is taken back", async || scene.rivals.holder(KEY).is_none()).await;
    scene.rivals.all_can_acquire(KEY).await;
}

/// Virtual time, a faulty store, and a drop at each moment from before the request to after the grant.
#[tokio::test(start_paused = true)]
async fn a_drop_at_any_moment_of_any_fault() {
    let faults_to_meet = [
        Fault::None,
        Fault::LoseRequest,
        Fault::LoseReply,
        Fault::DelayReply(ms(40)),
        Fault::DelayReply(ms(1_500)),
        Fault::DelayRequest(ms(40)),
        Fault::DelayRequest(ms(1_500)),
        Fault::Fail(lock_runtime::backend::FailureKind::MaybeApplied),
        Fault::Fail(lock_runtime::backend::FailureKind::NotApplied),
    ];
    let single = faults_to_meet.map(|fault| vec![fault]);
    // The first request arrives after the second one was granted and released.
    let late_and_granted = vec![Fault::DelayRequest(ms(1_500)), Fault::DelayReply(ms(40))];
    for (n, faults) in single.into_iter().chain([late_and_granted]).enumerate() {
        // Around the answers, around the retries, and around a request timeout of a second.
        let moments = [
            0, 1, 10, 39, 40, 41, 60, 100, 200, 999, 1_000, 1_001, 1_030, 1_499, 1_500, 1_501,
            2_100,
        ];
        for moment in moments {
            for yields in 0..6 {
                let name = format!("memory://moment-{n}-{moment}-{yields}");
                drop_after(&name, &faults, ms(moment), yields).await;
            }
        }
    }
}

async fn drop_after(store: &str, faults: &[Fault], moment: Duration, yields: usize) {
    let context = format!("{faults:?}, dropped after {moment:?} and {yields} yields");
    let (backend, plan) = FaultyBackend::new(open_backend(store).await.unwrap());
    let ours = LockPool::with_backend(backend).on_current_runtime().connect().await.unwrap();
    let theirs = LockPool::builder(store).on_current_runtime().connect().await.unwrap();
    for &fault in faults {
        plan.plan(Operation::Acquire, fault);
    }
    let acquire = tokio::spawn({
        let request = ours.lock(KEY).ttl(TTL).renew(RENEW).wait(ms(2_500));
        async move { request.acquire().await }
    });
    if !moment.is_zero() {
        tokio::time::sleep(moment).await;
    }
    for _ in 0..yields {
        tokio::task::yield_now().await;
    }
    acquire.abort();
    // If it has returned already, its guard is dropped too.
    drop(acquire.await);
    let next = ours.lock(KEY).wait(ms(3_000)).acquire().await;
    next.unwrap_or_else(|error| panic!("{context}: {error}")).release().await.unwrap();
    let renewed_before = plan.count(Operation::Renew);
    // Late requests have arrived by now, and a leftover lease would be renewed.
    tokio::time::sleep(ms(4_000)).await;
    for pool in [&theirs, &ours] {
        let guard = pool.lock(KEY).try_acquire().await.unwrap();
        let guard = guard.unwrap_or_else(|| panic!("{context}: the lock is held"));
        guard.release().await.unwrap();
    }
    assert_eq!(plan.count(Operation::Renew), renewed_before, "{context}: renewed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_random_aborts() {
    let scene = Arc::new(Scene::new().await);
    let (inside, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut aborted = 0;
    for round in 0.. {
        // A busy machine decides how many of a round are aborted.
        let done_so_far = done.load(Ordering::SeqCst);
        if round >= 50 && done_so_far > 50 && aborted > 50 {
            break;
        }
        assert!(round < 1_000, "{done_so_far} bodies ran to their end, {aborted} were aborted");
        let mut tasks = Vec::new();
        for n in 0..20 {
            let pool = if n % 4 == 0 { &scene.rivals.theirs } else { &scene.rivals.ours };
            let request = pool.lock(KEY).wait(ms(60_000));
            let (inside, done) = (inside.clone(), done.clone());
            tasks.push(tokio::spawn(request.run(async move {
                struct Leaves(Arc<AtomicBool>);
                impl Drop for Leaves {
                    fn drop(&mut self) {
                        self.0.store(false, Ordering::SeqCst);
                    }
                }
                assert!(!inside.swap(true, Ordering::SeqCst), "two at once");
                let _leaves = Leaves(inside);
                tokio::time::sleep(Duration::from_micros(fastrand::u64(..300))).await;
                done.fetch_add(1, Ordering::SeqCst);
            })));
        }
        for task in tasks {
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..1_500))).await;
            task.abort();
            match task.await {
                Ok(outcome) => outcome.unwrap(),
                Err(end) => aborted += usize::from(end.is_cancelled()),
            }
        }
    }
    scene.rivals.all_can_acquire(KEY).await;
}

#[tokio::test]
async fn a_full_wait_queue_rejects_the_next_waiter_at_once() {
    let pool = LockPool::builder("memory://").max_waiters(2).connect().await.unwrap();
    let held = pool.lock(KEY).acquire().await.unwrap();
    let wait = || pool.lock(KEY).wait(ms(60_000)).acquire();
    let mut first = Box::pin(wait());
    let mut second = Box::pin(wait());
    for waiting in [&mut first, &mut second] {
        assert!(poll_once(waiting.as_mut()).await.is_none());
    }
    let began = Instant::now();
    for _ in 0..100 {
        let error = wait().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::QueueFull);
        assert_eq!(error.template(), Some(KEY));
    }
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    // Other keys have wait queues of their own.
    pool.lock("order:8").acquire().await.unwrap().release().await.unwrap();
    // After one has left, another may enter.
    drop(first);
    let mut third = Box::pin(wait());
    assert!(poll_once(third.as_mut()).await.is_none());
    assert_eq!(wait().await.unwrap_err().kind(), ErrorKind::QueueFull);
    held.release().await.unwrap();
    second.await.unwrap().release().await.unwrap();
    third.await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn local_waiters_are_served_in_fifo_order() {
    let scene = Scene::new().await;
    let held: LockGuard = scene.rivals.ours.lock(KEY).acquire().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for n in 0..30 {
        let (request, order) = (scene.rivals.ours.lock(KEY).wait(ms(60_000)), order.clone());
        tasks.push(tokio::spawn(request.run(async move { order.lock().await.push(n) })));
        // The only other task of this runtime enters the wait queue.
        tokio::task::yield_now().await;
    }
    for gone in [0, 7, 8, 29] {
        tasks[gone].abort();
    }
    held.release().await.unwrap();
    for task in tasks {
        let _ = task.await;
    }
    let expected: Vec<_> = (0..30).filter(|n| ![0, 7, 8, 29].contains(n)).collect();
    assert_eq!(*order.lock().await, expected);
}

#[tokio::test]
async fn a_grant_to_a_waiter_that_is_being_dropped_goes_to_the_next() {
    let scene = Scene::new().await;
    for _ in 0..100 {
        let held = scene.rivals.ours.lock(KEY).acquire().await.unwrap();
        let mut waiting = Box::pin(scene.rivals.ours.lock(KEY).ttl(TTL).wait(ms(60_000)).acquire());
        assert!(poll_once(waiting.as_mut()).await.is_none());
        let behind = scene.rivals.ours.lock(KEY).wait(PROMPT).acquire();
        let mut behind = Box::pin(behind);
        assert!(poll_once(behind.as_mut()).await.is_none());
        held.release().await.unwrap();
        // Notified, but not polled since.
        drop(waiting);
        behind.await.unwrap().release().await.unwrap();
    }
    scene.rivals.all_can_acquire(KEY).await;
}
