//! The task, thread and runtime of a caller do not disturb a lock, although requests begin there.

use std::cell::RefCell;
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, LeaseRef, LeaseStatus, Notifier,
    ReleaseOutcome, ReleaseRequest, Warning,
};
use lock_runtime::{ErrorKind, LockPool};
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{RedisServer, eventually, eventually_some};
use tokio::sync::oneshot;
use tokio::task::coop::consume_budget;
use tokio::task::yield_now;

/// The limit of immediate effects on a busy machine. Far below the ttl of 30 s.
const SOON: Duration = Duration::from_secs(5);
const TTL: Duration = Duration::from_secs(30);

/// Long enough for a request of a store that answers at once.
const SHORT: Duration = Duration::from_millis(250);

/// In a task without budget nothing of tokio is ready until the task yields. The last task of a runtime never yields.
#[test]
fn a_release_at_the_end_of_a_tasks_budget_is_sent_all_the_same() {
    /// Tokio's budget of a task.
    const BUDGET: usize = 128;
    let server = RedisServer::start();
    for url in [server.url(), format!("{}?scripts=off", server.url())] {
        let pool = LockPool::builder(url).ttl(TTL);
        let pool = current_thread().block_on(pool.connect()).unwrap();
        for left in [0, 1, 2, 3, 4, BUDGET] {
            let runtime = current_thread();
            let acquire = |key| runtime.block_on(pool.lock(key).fencing(false).acquire()).unwrap();
            let (guard, other) = (acquire("k"), acquire("other"));
            let spend = async || {
                yield_now().await;
                for _ in 0..BUDGET - left {
                    consume_budget().await;
                }
            };
            runtime.block_on(async {
                spend().await;
                drop(guard);
                // The thread is blocked here.
                let is_free = || server.cli(&["EXISTS", "k"]) == "0";
                eventually(SOON, &format!("with {left} left the key goes"), is_free);
            });
            runtime.block_on(async {
                spend().await;
                drop(other);
            });
            let is_free = || server.cli(&["EXISTS", "other"]) == "0";
            eventually(SOON, &format!("with {left} left the other key goes"), is_free);
        }
    }
}

/// A store with a bug. It starts a task that waits for this message.
#[derive(Default)]
struct Panics(Mutex<Option<oneshot::Receiver<()>>>);

impl Backend for Panics {
    fn subscribe(&self, _: Notifier) {
        if let Some(message) = self.0.lock().unwrap().take() {
            tokio::spawn(message);
        }
    }

    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let one = |claim: &AcquireRequest| {
            assert!(!claim.keys[0].as_str().starts_with("bad"), "a bug in acquire");
            Ok(AcquireOutcome::acquired(None))
        };
        claims.iter().map(one).collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        leases.iter().map(|_| Ok(LeaseStatus::Held)).collect()
    }

    async fn release(&self, _: &[ReleaseRequest]) -> Vec<Result<ReleaseOutcome, BackendError>> {
        panic!("a bug in release")
    }

    async fn is_held(&self, _: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(LeaseStatus::Held)
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}

#[test]
fn a_panic_of_a_store_does_not_reach_the_caller() {
    let runtime = current_thread();
    let pool = LockPool::with_backend(Panics::default()).request_timeout(SHORT).wait(SHORT);
    let pool = runtime.block_on(pool.connect()).unwrap();
    let acquire = |key| runtime.block_on(pool.lock(key).fencing(false).acquire());
    let error = acquire("bad").unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("a bug in acquire"), "{error}");
    let guard = acquire("dropped").unwrap();
    drop(guard);
    let guard = acquire("released").unwrap();
    runtime.block_on(guard.release()).unwrap_err();
    // A second panic would end the process.
    let guard = acquire("unwound").unwrap();
    let body = catch_unwind(AssertUnwindSafe(|| {
        let _guard = guard;
        panic!("the body's own words")
    }));
    body.unwrap_err();
}

#[test]
fn a_task_of_a_store_does_not_end_with_the_runtime_that_connects() {
    let (message, receiver) = oneshot::channel();
    let store = Panics(Mutex::new(Some(receiver)));
    let pool = current_thread().block_on(LockPool::with_backend(store).connect()).unwrap();
    assert!(!message.is_closed());
    drop(pool);
}

/// All values are dropped together, in any order, and a drop may use the other values.
#[test]
fn the_end_of_a_runtime_ends_the_pools_on_it_while_one_holds_and_others_wait() {
    let server = RedisServer::start();
    for (n, new_runtime) in [current_thread, multi_thread].into_iter().enumerate() {
        for url in [format!("memory://callers-{n}"), server.url()] {
            let runtime = new_runtime();
            let connect = || {
                let pool = LockPool::builder(&*url).on_current_runtime();
                runtime.block_on(async { pool.connect().await.unwrap() })
            };
            let key = format!("k{n}");
            let (holder, waiters) = (connect(), [connect(), connect(), connect()]);
            let (inside, is_inside) = oneshot::channel();
            let held = key.clone();
            runtime.spawn(async move {
                let _guard = holder.lock(held).acquire().await.unwrap();
                inside.send(()).unwrap();
                pending::<()>().await;
            });
            runtime.block_on(is_inside).unwrap();
            let left = waiters[0].clone();
            for pool in waiters {
                let request = pool.lock(key.clone()).wait(TTL);
                runtime.spawn(async move { drop(request.acquire().await) });
            }
            // The requests are answered, and all tasks wait.
            runtime.block_on(async {
                for _ in 0..1_000 {
                    yield_now().await;
                }
                left.health().await.unwrap();
            });
            let end = thread::spawn(move || drop(runtime));
            eventually(SOON, "the runtime ends", || end.is_finished());
            end.join().unwrap();
            for wait in [Duration::ZERO, TTL] {
                let request = left.lock("later").wait(wait);
                let error = current_thread().block_on(request.acquire()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PoolClosed, "{url}: {error}");
            }
        }
    }
}

/// A refused request has given its permit back when its caller learns of it, so that the next try asks the store.
#[tokio::test(flavor = "multi_thread")]
async fn a_try_right_behind_a_refused_one_asks_the_store() {
    /// Begins a try as soon as it is woken, on the thread that wakes it.
    struct TriesAgain(LockPool, &'static str, Mutex<Option<bool>>);

    impl Wake for TriesAgain {
        fn wake(self: Arc<Self>) {
            let mut next = pin!(self.0.lock(self.1).wait(Duration::ZERO).acquire());
            let answer = next.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            *self.2.lock().unwrap() = Some(answer.is_pending());
        }
    }

    let server = RedisServer::start();
    let pool = LockPool::builder(server.url()).ttl(TTL).request_timeout(SOON);
    let pool = pool.connect().await.unwrap();
    let other = LockPool::builder(server.url()).ttl(TTL).connect().await.unwrap();
    for (key, fencing) in [("k", true), ("l", false)] {
        let guard = other.lock(key).acquire().await.unwrap();
        let tries = Arc::new(TriesAgain(pool.clone(), key, Mutex::new(None)));
        let request = pool.lock(key).fencing(fencing).wait(Duration::ZERO);
        let mut refused = pin!(request.acquire());
        let waker = Waker::from(tries.clone());
        assert!(refused.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let asked = eventually_some(SOON, "the refusal", || *tries.2.lock().unwrap());
        assert!(refused.await.unwrap_err().is_conflict());
        assert!(asked, "refused without a request");
        guard.release().await.unwrap();
    }
}

#[test]
fn a_destructor_at_the_end_of_a_thread_may_lock() {
    /// Neither tokio nor the standard library block on a future so late.
    fn ready<T>(future: impl Future<Output = T>) -> T {
        let (mut future, mut cx) = (pin!(future), Context::from_waker(Waker::noop()));
        eventually_some(SOON, "the answer", || match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    }
    struct LocksOnDrop(Option<LockPool>);
    impl Drop for LocksOnDrop {
        fn drop(&mut self) {
            let Some(pool) = self.0.take() else { return };
            ready(pool.lock("order:1").run(async {})).unwrap();
            let guard = ready(pool.lock("order:1").acquire()).unwrap();
            ready(guard.release()).unwrap();
        }
    }
    thread_local! {
        static AT_END: RefCell<LocksOnDrop> = const { RefCell::new(LocksOnDrop(None)) };
    }
    let runtime = multi_thread();
    let pool = runtime.block_on(LockPool::connect("memory://")).unwrap();
    let locks = pool.clone();
    // A panic in such a destructor aborts the process.
    thread::spawn(move || {
        // Destructors run in reverse order of the first accesses.
        AT_END.with(|_| {});
        let held = runtime.block_on(locks.lock("order:2").acquire()).unwrap();
        drop(held);
        AT_END.with_borrow_mut(|at_end| at_end.0 = Some(locks));
    })
    .join()
    .unwrap();
    assert!(current_thread().block_on(pool.lock("order:1").try_acquire()).unwrap().is_some());
}
