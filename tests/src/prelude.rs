//! Names that most test modules use: `use lock_tests::prelude::*`.
//!
//! A module that needs another value defines a constant of the same name; it hides the one from here.

use std::fmt::Debug;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use lock_runtime::testing::{FaultPlan, FaultyBackend, open_backend};
use lock_runtime::{Fence, LockGuard, LockPool, LockRequest, PoolBuilder, Wait};
use tokio::sync::Barrier;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use crate::monitor::{Caller, Ran};
use crate::runtimes::current_thread;
use crate::{RedisServer, eventually_async};

/// What a busy machine may add to an effect, and a connection that comes back. Less than the grant of a lease of 20 s
/// to the head of a wait queue, which is a second.
pub const NOISE: Duration = ms(700);

/// The limit of waits that end at once unless something hangs.
pub const DEADLINE: Duration = ms(30_000);

/// Milliseconds.
#[must_use]
pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A pool in memory with default settings.
pub async fn memory() -> LockPool {
    LockPool::connect("memory://").await.unwrap()
}

/// A pool that waits without a limit, with leases of `ttl`.
pub async fn patient(url: impl Into<String>, ttl: Duration) -> LockPool {
    LockPool::builder(url).ttl(ttl).wait(Wait::Forever).connect().await.unwrap()
}

/// As [`patient`], for a store without processor time of its own: it has as long for an answer.
pub async fn unhurried(url: impl Into<String>, ttl: Duration) -> LockPool {
    let builder = LockPool::builder(url).ttl(ttl).wait(Wait::Forever);
    builder.request_timeout(ms(15_000)).connect().await.unwrap()
}

/// A pool on the clock of the current runtime, with a backend at `url` that counts requests and fails on demand.
pub async fn on_virtual_time(
    url: &str,
    configure: impl FnOnce(PoolBuilder) -> PoolBuilder,
) -> (LockPool, FaultPlan) {
    let (backend, faults) = FaultyBackend::new(open_backend(url).await.unwrap());
    let builder = configure(LockPool::with_backend(backend)).on_current_runtime();
    (builder.connect().await.unwrap(), faults)
}

/// A task that acquires `key`, and the time when it had the guard.
#[must_use]
pub fn acquire_in_task(pool: &LockPool, key: &str) -> JoinHandle<(Instant, LockGuard)> {
    run_in_task(pool.lock(key))
}

/// [`acquire_in_task`] for any request.
#[must_use]
pub fn run_in_task(request: LockRequest) -> JoinHandle<(Instant, LockGuard)> {
    let acquiring = request.acquire();
    tokio::spawn(async move {
        let guard = acquiring.await.unwrap();
        (Instant::now(), guard)
    })
}

/// Aborts `task` at `at`, and returns when it has ended.
pub async fn abort_at<T>(at: Instant, task: JoinHandle<T>) {
    while Instant::now() < at {
        tokio::task::yield_now().await;
    }
    task.abort();
    drop(task.await);
}

/// Two pools lock `key` without a fence, `each` times both of them. Returns how often the lock changed between them.
pub async fn alternate(pools: [LockPool; 2], key: &'static str, each: usize) -> usize {
    let (turns, start) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Barrier::new(pools.len())));
    let mut tasks = JoinSet::new();
    for (n, pool) in pools.into_iter().enumerate() {
        let (turns, start) = (turns.clone(), start.clone());
        tasks.spawn(async move {
            for at in 0..each {
                if at == 1 {
                    // Otherwise one pool may be through before the other has sent its first request.
                    start.wait().await;
                }
                let guard = pool.lock(key).fencing(false).acquire().await.unwrap();
                turns.lock().unwrap().push(n);
                guard.release().await.unwrap();
            }
        });
    }
    within(2 * DEADLINE, "all turns", tasks.join_all()).await;
    let turns = turns.lock().unwrap();
    turns.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

/// Hands `key` from one pool to the other `count` times, each time to a waiter that is in the queue of the store. Returns how long
/// it takes from a release to the next grant: the median.
///
/// # Panics
///
/// When an acquire or a release fails, or none comes within [`DEADLINE`].
pub async fn hand_off_time(pools: [LockPool; 2], key: &str, count: usize) -> Duration {
    let mut guard = pools[0].lock(key).acquire().await.unwrap();
    let mut times = Vec::new();
    for n in 1..=count {
        let waiter = acquire_in_task(&pools[n % 2], key);
        eventually_async(DEADLINE, "the waiter is queued", async || {
            pools[0].inspect(key).await.unwrap().waiting == Some(1)
        })
        .await;
        let released = release(guard).await;
        let granted;
        (granted, guard) = joined("the next grant", waiter).await;
        times.push(granted.saturating_duration_since(released));
    }
    guard.release().await.unwrap();
    median(times)
}

/// Waits until each of `guards` has been renewed twice. The first one of these renewals may be older than this call.
///
/// # Panics
///
/// When one of them is lost, or is not renewed within [`DEADLINE`].
pub async fn until_renewed(guards: &[LockGuard]) {
    fn end(guard: &LockGuard) -> Instant {
        Instant::now() + guard.valid_for()
    }
    for _ in 0..2 {
        // What lies between the two readings of a clock is no renewal.
        let limits: Vec<_> = guards.iter().map(|guard| end(guard) + ms(100)).collect();
        eventually_async(DEADLINE, "the leases are renewed", async || {
            assert!(guards.iter().all(LockGuard::is_held), "a lease was not renewed");
            guards.iter().zip(&limits).all(|(guard, limit)| end(guard) > *limit)
        })
        .await;
    }
}

/// Releases `guard`, and returns the time before.
pub async fn release(guard: LockGuard) -> Instant {
    let now = Instant::now();
    guard.release().await.unwrap();
    now
}

/// The next grant with a fence is a script. For 50 ms after one it can be a transaction.
pub async fn until_the_next_fence_is_a_script() {
    tokio::time::sleep(ms(60)).await;
}

/// Acquires and releases `key`, and returns the fencing token.
pub async fn cycle(pool: &LockPool, key: &str) -> Option<Fence> {
    let guard = pool.lock(key).acquire().await.unwrap();
    let fence = guard.fence();
    guard.release().await.unwrap();
    fence
}

/// The output of `future`.
///
/// # Panics
///
/// With `what`, when `limit` has passed.
pub async fn within<F: Future>(limit: Duration, what: impl Debug, future: F) -> F::Output {
    match timeout(limit, future).await {
        Ok(output) => output,
        Err(_) => panic!("not within {limit:?}: {what:?}"),
    }
}

/// The output of `task`.
///
/// # Panics
///
/// With `what`, when [`DEADLINE`] has passed, and when the task has panicked.
pub async fn joined<T>(what: impl Debug, task: JoinHandle<T>) -> T {
    within(DEADLINE, what, task).await.unwrap()
}

/// Runs `test` on all of `cases` at the same time, each on a thread and a runtime of its own.
///
/// # Panics
///
/// When one of them panics.
pub fn on_each<T: Send>(cases: impl IntoIterator<Item = T>, test: impl AsyncFn(T) + Sync) {
    thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || current_thread().block_on(test(case)));
        }
    });
}

/// Polls `future` once; its output if it is ready.
pub async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    match std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// The middle one of `spans`.
#[must_use]
pub fn median(mut spans: Vec<Duration>) -> Duration {
    spans.sort();
    spans[spans.len() / 2]
}

/// Waits until `count` processes are in the wait queue of `key`.
pub async fn until_queued(server: &RedisServer, key: &str, count: usize) {
    let queue = format!("{key}:lock_runtime:line");
    let count = count.to_string();
    eventually_async(DEADLINE, "the waiters are in the wait queue", async || {
        server.cli(&["ZCARD", &queue]) == count
    })
    .await;
}

/// Whether `value`, of a lock in Redis, has the contended mark: it stands behind the token.
#[must_use]
pub fn has_contended_mark(value: &str) -> bool {
    value.as_bytes().get(49) == Some(&b'+')
}

/// `value` with the contended mark.
#[must_use]
pub fn with_contended_mark(value: &str) -> String {
    format!("{}+{}", &value[..49], value.get(50..).unwrap_or_default())
}

/// Waits until the server has neither locks nor wait queues, long before a wait queue expires by itself.
pub async fn until_nothing_is_left(server: &RedisServer) {
    eventually_async(ms(6_000), "nothing is left in the store", async || {
        let left = server.cli(&["KEYS", "*"]);
        left.lines().all(|key| key.is_empty() || key == "lock_runtime:fence")
    })
    .await;
}

/// The commands of clients, without those of scripts.
#[must_use]
pub fn by_clients(commands: Vec<Ran>) -> Vec<Ran> {
    commands.into_iter().filter(|ran| ran.by != Caller::Script).collect()
}
