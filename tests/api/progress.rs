//! `LockError::progress`: whether the body ran, for every kind of error.

#![allow(clippy::disallowed_methods)]

use std::future::{Future, pending, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use lock_runtime::backend::FailureKind;
use lock_runtime::testing::{Fault, FaultPlan, FaultyBackend, open_backend};
use lock_runtime::{ErrorKind, LockError, LockPool, OnLost, Progress, distributed_lock};
use lock_tests::prelude::*;
use tokio::sync::Notify;

const KEY: &str = "k";

/// A pool on virtual time with a store that fails on demand.
async fn pool() -> (LockPool, FaultPlan) {
    let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
    let pool = LockPool::with_backend(backend).on_current_runtime().connect().await.unwrap();
    (pool, faults)
}

#[track_caller]
fn is<T: std::fmt::Debug>(outcome: Result<T, LockError>, kind: ErrorKind, progress: Progress) {
    let error = outcome.unwrap_err();
    assert_eq!((error.kind(), error.progress()), (kind, progress), "{error}");
    assert_eq!(error.body_started(), progress != Progress::NotStarted);
    assert!(format!("{error:?}").contains(&format!("{progress:?}")), "{error:?}");
}

#[distributed_lock(key = "k", pool = pool, wait = "1s")]
async fn annotated(pool: LockPool, steps: Arc<Steps>) -> Result<(), LockError> {
    steps.walk().await;
    Ok(())
}

/// How far a body came.
#[derive(Debug, Default)]
struct Steps {
    taken: AtomicUsize,
    inside: Notify,
}

impl Steps {
    async fn walk(&self) {
        self.taken.fetch_add(1, Ordering::SeqCst);
        self.inside.notify_one();
        pending::<()>().await;
    }

    fn taken(&self) -> usize {
        self.taken.load(Ordering::SeqCst)
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_not_acquired_runs_nothing() {
    use ErrorKind::{Backend, Config, Conflict, InvalidKey, WouldDeadlock};
    use Progress::NotStarted;
    let ((pool, faults), steps) = (pool().await, Arc::<Steps>::default());
    let held = pool.lock(KEY).acquire().await.unwrap();
    is(annotated(pool.clone(), steps.clone()).await, Conflict, NotStarted);
    is(pool.lock(KEY).wait(ms(5)).run(steps.walk()).await, Conflict, NotStarted);
    held.release().await.unwrap();
    is(pool.lock("").run(steps.walk()).await, InvalidKey, NotStarted);
    is(pool.lock(KEY).ttl(ms(1)).run(steps.walk()).await, Config, NotStarted);
    let again = pool.lock(KEY).run(pool.lock(KEY).run(steps.walk()));
    is(again.await.unwrap(), WouldDeadlock, NotStarted);
    faults.always(Fault::Fail(FailureKind::Rejected));
    is(annotated(pool.clone(), steps.clone()).await, Backend, NotStarted);
    assert_eq!(steps.taken(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_waits_before_and_bodies_within() {
    for (steps, cut) in [Arc::<Steps>::default(), Arc::default()].into_iter().zip([true, false]) {
        let (pool, _) = pool().await;
        let run = {
            let (pool, steps) = (pool.clone(), steps.clone());
            async move {
                match cut {
                    true => annotated(pool, steps).await,
                    false => pool.lock(KEY).run(steps.walk()).await,
                }
            }
        };
        let run = tokio::spawn(run);
        steps.inside.notified().await;
        let waiting = tokio::spawn(annotated(pool.clone(), Arc::default()));
        tokio::task::yield_now().await;
        let guard = pool.lock("guard").acquire().await.unwrap();
        pool.shutdown(ms(10)).await;
        is(run.await.unwrap(), ErrorKind::PoolClosed, Progress::Unfinished);
        is(waiting.await.unwrap(), ErrorKind::PoolClosed, Progress::NotStarted);
        let late = annotated(pool.clone(), Arc::default()).await;
        is(late, ErrorKind::PoolClosed, Progress::NotStarted);
        is::<()>(Err(guard.lost().await), ErrorKind::PoolClosed, Progress::Unfinished);
        is(guard.verify().await, ErrorKind::PoolClosed, Progress::Unfinished);
        is(guard.release().await, ErrorKind::PoolClosed, Progress::Finished);
        assert_eq!(steps.taken(), 1);
    }
}

/// The lock was granted, and its validity had ended when the caller polled.
#[tokio::test(start_paused = true)]
async fn a_grant_that_runs_out_before_the_body_begins_runs_nothing() {
    for on_lost in [OnLost::Cancel, OnLost::Notify] {
        let ((pool, _), steps) = (pool().await, Steps::default());
        let held = pool.lock(KEY).acquire().await.unwrap();
        let request = pool.lock(KEY).ttl(ms(200)).renew(false).wait(ms(10_000)).on_lost(on_lost);
        let mut late = Box::pin(request.run(steps.walk()));
        assert!(poll_fn(|cx| Poll::Ready(late.as_mut().poll(cx).is_pending())).await);
        held.release().await.unwrap();
        tokio::time::sleep(ms(500)).await;
        is(late.await, ErrorKind::Lost, Progress::NotStarted);
        assert_eq!(steps.taken(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_loses_its_lock_is_unfinished_and_one_that_ends_is_a_result() {
    let ((pool, _), steps) = (pool().await, Steps::default());
    let request = || pool.lock(KEY).ttl(ms(200)).renew(false);
    is(request().run(steps.walk()).await, ErrorKind::Lost, Progress::Unfinished);
    assert_eq!(steps.taken(), 1);
    let request = request().on_lost(OnLost::Notify);
    request.run(tokio::time::sleep(ms(500))).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_work_of_a_guard_is_done_when_it_is_released() {
    let (pool, faults) = pool().await;
    let guard = pool.lock(KEY).ttl(ms(200)).renew(false).acquire().await.unwrap();
    is::<()>(Err(guard.lost().await), ErrorKind::Lost, Progress::Unfinished);
    is(guard.verify().await, ErrorKind::Lost, Progress::Unfinished);
    is(guard.release().await, ErrorKind::Lost, Progress::Finished);

    let guard = pool.lock(KEY).acquire().await.unwrap();
    faults.always(Fault::Fail(FailureKind::Rejected));
    is(guard.release().await, ErrorKind::Backend, Progress::Finished);
}
