//! A call inside a body that holds its key passes through the outer lock, or is an error.

#![allow(clippy::disallowed_methods)]

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, OnLost, Progress, distributed_lock};
use lock_tests::prelude::*;
use tokio::sync::{Notify, oneshot};
use tokio::task::LocalSet;
use tokio::time::timeout;

const KEY: &str = "n:1";
/// Longer than any test takes, on virtual time or on a busy machine.
const LONG: Duration = Duration::from_secs(60);

type Inner<T = ()> = Pin<Box<dyn Future<Output = Result<T, LockError>> + Send>>;

/// The end of a body.
#[derive(Debug, Default)]
struct Trace {
    polls: AtomicUsize,
    dropped: AtomicBool,
}

impl Trace {
    fn polls(&self) -> usize {
        self.polls.load(Ordering::SeqCst)
    }

    fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::SeqCst)
    }
}

struct Dropped(Arc<Trace>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.dropped.store(true, Ordering::SeqCst);
    }
}

/// Never ends; counts its polls.
async fn body(trace: Arc<Trace>) {
    let dropped = Dropped(trace);
    poll_fn(|_| {
        dropped.0.polls.fetch_add(1, Ordering::SeqCst);
        Poll::<()>::Pending
    })
    .await;
}

/// A call that passes through the lock around it, and its body.
fn passing(pool: &LockPool, on_lost: OnLost) -> (Inner, Arc<Trace>) {
    let (trace, request) = (Arc::<Trace>::default(), pool.lock(KEY).reentrant(true));
    (Box::pin(request.on_lost(on_lost).run(body(trace.clone()))), trace)
}

/// Polls it once in the running task.
async fn begin<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    poll_fn(|cx| match Pin::new(&mut *future).poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

// The body returns its inner call, which is the case in question.
#[allow(clippy::async_yields_async)]
#[tokio::test]
async fn a_call_that_is_moved_out_of_the_body_is_not_polled_on_when_the_body_has_ended() {
    for on_lost in [OnLost::Cancel, OnLost::Notify] {
        let pool = memory().await;
        let (mut inner, trace) = passing(&pool, on_lost);
        let moved = async {
            assert!(begin(&mut inner).await.is_none());
            inner
        };
        let inner = pool.lock(KEY).run(moved).await.unwrap();
        let other = pool.lock(KEY).acquire().await.unwrap();
        let outcome = timeout(LONG, tokio::spawn(inner)).await.expect("it is stopped");
        let error = outcome.unwrap().unwrap_err();
        assert!(error.is_lost(), "{error}");
        assert_eq!(error.progress(), Progress::Unfinished);
        assert_eq!((trace.polls(), trace.is_dropped()), (1, true), "{on_lost:?}");
        other.verify().await.unwrap();
    }
}

#[tokio::test]
async fn a_call_that_is_moved_to_another_task_is_stopped_though_the_body_holds_the_lock() {
    for on_lost in [OnLost::Cancel, OnLost::Notify] {
        let pool = memory().await;
        let (mut inner, trace) = passing(&pool, on_lost);
        let outer = async {
            assert!(begin(&mut inner).await.is_none());
            timeout(LONG, tokio::spawn(inner)).await.expect("it is stopped").unwrap()
        };
        let error = pool.lock(KEY).run(outer).await.unwrap().unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("outside"), "{error}");
        assert_eq!((trace.polls(), trace.is_dropped()), (1, true), "{on_lost:?}");
    }
}

#[tokio::test]
async fn a_body_that_moves_to_another_task_takes_its_calls_along() {
    let pool = memory().await;
    let (inner, _) = passing(&pool, OnLost::Cancel);
    let here = Arc::new(Notify::new());
    let there = here.clone();
    let outer = async move {
        tokio::select! {
            ended = inner => panic!("{ended:?}"),
            () = there.notified() => "ended"
        }
    };
    let mut outer = Box::pin(pool.lock(KEY).run(outer));
    assert!(begin(&mut outer).await.is_none());
    let outer = tokio::spawn(outer);
    here.notify_one();
    assert_eq!(outer.await.unwrap().unwrap(), "ended");
}

#[tokio::test(start_paused = true)]
async fn a_call_begun_after_the_loss_does_not_run() {
    let pool = on_virtual_time("memory://", |it| it).await.0;
    let (inner, trace) = passing(&pool, OnLost::Notify);
    let outer = async {
        tokio::time::sleep(ms(500)).await;
        let strict = pool.lock(KEY).acquire().await.map(drop);
        let guard = pool.lock(KEY).reentrant(true).acquire().await.map(drop);
        (inner.await, strict, guard)
    };
    let request = pool.lock(KEY).ttl(ms(200)).renew(false).on_lost(OnLost::Notify);
    let (inner, strict, guard) = timeout(LONG, request.run(outer)).await.unwrap().unwrap();
    for outcome in [inner, strict, guard] {
        let error = outcome.unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("its ttl is over"), "{error}");
        assert_eq!(error.progress(), Progress::NotStarted);
    }
    assert_eq!(trace.polls(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_is_stopped_by_the_loss_of_the_lock_around_it_unless_it_is_only_notified() {
    let pool = on_virtual_time("memory://", |it| it).await.0;
    let outer = || pool.lock(KEY).ttl(ms(200)).renew(false).on_lost(OnLost::Notify);

    let (inner, trace) = passing(&pool, OnLost::Cancel);
    let began = tokio::time::Instant::now();
    // Only the loss wakes it.
    let ended = timeout(LONG, outer().run(inner)).await.expect("the inner body is notified");
    assert!(ended.unwrap().unwrap_err().is_lost());
    assert!(began.elapsed() < ms(210), "{:?}", began.elapsed());
    assert!(trace.is_dropped());

    let (mut inner, trace) = passing(&pool, OnLost::Notify);
    let goes_on = async {
        assert!(begin(&mut inner).await.is_none());
        tokio::time::sleep(ms(500)).await;
        assert!(begin(&mut inner).await.is_none());
    };
    outer().run(goes_on).await.unwrap();
    assert_eq!((trace.polls(), trace.is_dropped()), (2, false));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_stops_a_call_that_passed_through() {
    let pool = on_virtual_time("memory://", |it| it).await.0;
    let (inner, trace) = passing(&pool, OnLost::Cancel);
    let inside = Arc::new(Notify::new());
    let outer = {
        let inside = inside.clone();
        async move {
            inside.notify_one();
            inner.await
        }
    };
    let outer = tokio::spawn(pool.lock(KEY).on_lost(OnLost::Notify).run(outer));
    inside.notified().await;
    pool.shutdown(ms(100)).await;
    let ended = timeout(LONG, outer).await.expect("the inner body is notified").unwrap().unwrap();
    let error = ended.unwrap_err();
    assert_eq!((error.kind(), error.progress()), (ErrorKind::PoolClosed, Progress::Unfinished));
    assert!(trace.is_dropped());
}

/// Each task of a `LocalSet` is separate, although all are polled within the poll of one.
#[tokio::test]
async fn another_task_of_a_local_set_does_not_pass_through() {
    let pool = memory().await;
    let local = LocalSet::new();
    let (ask, asked) = oneshot::channel::<()>();
    let elsewhere = pool.clone();
    let unrelated = local.spawn_local(async move {
        asked.await.unwrap();
        let passing = elsewhere.lock(KEY).reentrant(true).try_acquire().await;
        let strict = elsewhere.lock(KEY).try_acquire().await;
        (passing.map(|guard| guard.is_some()), strict.map(|guard| guard.is_some()))
    });
    let outer = async {
        ask.send(()).unwrap();
        let inner = pool.lock(KEY).reentrant(true).run(async { 7 });
        // Polls the set within the poll of this body.
        let polled_in_set = local.run_until(async { (inner.await, unrelated.await.unwrap()) });
        polled_in_set.await
    };
    let (inner, (passing, strict)) = pool.lock(KEY).run(outer).await.unwrap();
    assert_eq!(inner.unwrap(), 7, "the body itself");
    assert!(!passing.unwrap(), "the lock is held by another task");
    assert!(!strict.unwrap(), "it is another task's, and no error of this one");
}

/// A future that the body polls belongs to the body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_body_polls_or_blocks_on_passes_through() {
    let pool = memory().await;
    let inner = || pool.lock(KEY).reentrant(true).run(async { tokio::task::yield_now().await });
    let outer = async {
        let (one, two) = tokio::join!(inner(), inner());
        one.and(two)?;
        tokio::select! {
            biased;
            () = pending() => {}
            done = inner() => done?,
        }
        timeout(LONG, inner()).await.unwrap()?;
        tokio::task::unconstrained(inner()).await?;
        let handle = tokio::runtime::Handle::current();
        tokio::task::block_in_place(|| handle.block_on(inner()))
    };
    // A task, and a future that no task runs.
    pool.lock(KEY).run(outer).await.unwrap().unwrap();
    let (pool, again) = (pool.clone(), memory().await);
    let task = tokio::spawn(async move {
        let inner = again.lock(KEY).reentrant(true).run(async { tokio::task::yield_now().await });
        again.lock(KEY).run(inner).await
    });
    task.await.unwrap().unwrap().unwrap();
    pool.lock(KEY).acquire().await.unwrap().release().await.unwrap();
}

#[distributed_lock(key = "n:<id>", pool = pool)]
async fn without_a_fence(
    pool: &LockPool,
    id: u64,
    inner: impl Future<Output = Result<(), LockError>>,
) -> Result<(), LockError> {
    inner.await
}

#[distributed_lock(key = "n:<id>", pool = pool, reentrant = true, guard = lock)]
async fn with_a_guard(pool: &LockPool, id: u64) -> Result<(), LockError> {
    assert!(lock.fence().is_some());
    Ok(())
}

#[tokio::test]
async fn a_guard_without_the_fence_that_it_promises_is_refused() {
    let pool = memory().await;
    let acquire = async || pool.lock(KEY).reentrant(true).acquire().await.map(drop);
    for inner in
        [Box::pin(with_a_guard(&pool, 1)) as Pin<Box<dyn Future<Output = _>>>, Box::pin(acquire())]
    {
        let error = without_a_fence(&pool, 1, inner).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("guard"), "{error}");
    }
    // Without a guard no fence is needed; nor with a guard that is requested without one.
    let bare = async {
        let view = pool.lock(KEY).reentrant(true).fencing(false).acquire().await?;
        assert!(view.is_held());
        pool.lock(KEY).reentrant(true).run(async {}).await
    };
    without_a_fence(&pool, 1, bare).await.unwrap();
    pool.lock(KEY).run(with_a_guard(&pool, 1)).await.unwrap().unwrap();
}

#[tokio::test]
async fn what_a_call_that_passes_through_cannot_keep_is_refused() {
    let pool = memory().await;
    let request = || pool.lock(KEY).reentrant(true);
    for (name, request) in [
        ("max_hold", request().max_hold(LONG)),
        ("min_hold", request().min_hold(ms(1))),
        ("renew", request().renew(false)),
        ("renew", request().renew(ms(500))),
    ] {
        // Found at the first call, whether or not a lock is around it.
        let error = request.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{name}");
        assert!(error.to_string().contains(&format!("`{name}`")), "{name}: {error}");
    }
    let kept = request().ttl(LONG).wait(LONG).renew(true).min_hold(Duration::ZERO);
    let guard: LockGuard = kept.acquire().await.unwrap();
    assert!(guard.valid_for() > LONG / 2);
}
