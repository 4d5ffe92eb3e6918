//! `LockGuard::lost` resolves at every end of a hold.

#![allow(clippy::disallowed_methods)]

use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use lock_runtime::{
    ErrorKind, LockError, LockGuard, LockPool, LockRequest, Lost, Progress, distributed_lock,
};
use lock_tests::RedisServer;
use lock_tests::prelude::*;
use tokio::sync::{Notify, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

const KEY: &str = "k";
/// Longer than any test takes, on virtual time or on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Tasks that wait for the end of one hold.
struct LossListeners(Vec<JoinHandle<LockError>>);

impl LossListeners {
    /// Two tasks; both wait when this returns.
    async fn of(guard: &LockGuard) -> Self {
        Self::begin([guard.lost(), guard.lost()]).await
    }

    async fn begin(waits: impl IntoIterator<Item = Lost>) -> Self {
        let (begun, mut has_begun) = mpsc::unbounded_channel();
        let tasks = waits.into_iter().map(|mut lost| {
            let begun = begun.clone();
            tokio::spawn(async move {
                let mut first = true;
                poll_fn(|cx| {
                    let poll = Pin::new(&mut lost).poll(cx);
                    assert!(!first || poll.is_pending(), "nothing has happened");
                    if std::mem::take(&mut first) {
                        begun.send(()).unwrap();
                    }
                    poll
                })
                .await
            })
        });
        let tasks: Vec<_> = tasks.collect();
        for _ in &tasks {
            has_begun.recv().await.unwrap();
        }
        Self(tasks)
    }

    async fn are(self, what: &str, kind: ErrorKind) {
        for task in self.0 {
            let error =
                timeout(LONG, task).await.unwrap_or_else(|_| panic!("{what}: not reported"));
            let error = error.unwrap();
            assert_eq!((error.kind(), error.is_lost()), (kind, kind == ErrorKind::Lost), "{what}");
            let progress = match kind {
                ErrorKind::Released => Progress::Finished,
                _ => Progress::Unfinished,
            };
            assert_eq!(error.progress(), progress, "{what}: {error}");
            assert_eq!(error.template(), Some(KEY), "{what}");
        }
    }
}

async fn exits_of_a_guard(pool: &LockPool) {
    let acquire = || pool.lock(KEY).wait(LONG).acquire();
    let guard = acquire().await.unwrap();
    let listeners = LossListeners::of(&guard).await;
    guard.release().await.unwrap();
    listeners.are("a release", ErrorKind::Released).await;

    let guard = acquire().await.unwrap();
    let listeners = LossListeners::of(&guard).await;
    drop(guard.release());
    listeners.are("a release that is not polled", ErrorKind::Released).await;

    let guard = acquire().await.unwrap();
    let listeners = LossListeners::of(&guard).await;
    drop(guard);
    listeners.are("a drop", ErrorKind::Released).await;

    let guard = acquire().await.unwrap();
    let listeners = LossListeners::of(&guard).await;
    let late = guard.lost();
    let mut next = Box::pin(acquire());
    let pending = poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx).is_pending())).await;
    assert!(pending);
    drop(guard);
    listeners.are("a hand-over", ErrorKind::Released).await;
    let next = next.await.unwrap();
    assert_eq!(late.await.kind(), ErrorKind::Released, "begun after the end");

    let listeners = LossListeners::of(&next).await;
    pool.shutdown(Duration::ZERO).await;
    listeners.are("a shutdown", ErrorKind::PoolClosed).await;
    assert_eq!(next.lost().await.kind(), ErrorKind::PoolClosed);
    assert_eq!(next.release().await.unwrap_err().kind(), ErrorKind::PoolClosed);
}

#[tokio::test]
async fn every_end_of_a_guard_resolves_lost() {
    exits_of_a_guard(&memory().await).await;
}

#[tokio::test]
async fn every_end_of_a_guard_resolves_lost_on_redis() {
    let server = RedisServer::start();
    exits_of_a_guard(&LockPool::connect(&server.url()).await.unwrap()).await;
}

#[tokio::test]
async fn a_release_or_check_notices_that_the_time_of_the_hold_is_over() {
    let (builder, short) = (LockPool::builder("memory://"), ms(300));
    // Its tasks cannot run while the thread is blocked.
    let pool = builder.on_current_runtime().connect().await.unwrap();
    let requests = || {
        [
            pool.lock("limited").max_hold(short),
            pool.lock("limited, without a fence").fencing(false).max_hold(short),
            pool.lock("not renewed").ttl(short).renew(false),
        ]
    };
    let until_ended = |guard: &LockGuard| {
        while guard.is_held() {
            std::thread::sleep(ms(1));
        }
    };
    let ended = async |request: LockRequest| {
        let guard = request.acquire().await.unwrap();
        until_ended(&guard);
        guard
    };
    for request in requests() {
        let error = ended(request).await.release().await.unwrap_err();
        assert!(error.is_lost(), "{error}");
        assert_eq!(error.progress(), Progress::Finished);
    }
    for request in requests() {
        let guard = ended(request).await;
        let checked = poll_once(pin!(guard.verify())).await;
        let error = checked.expect("nothing is sent").unwrap_err();
        assert!(error.is_lost(), "{error}");
        assert_eq!(error.progress(), Progress::Unfinished);
        assert!(guard.release().await.unwrap_err().is_lost());
    }
    for request in requests() {
        let guard = request.acquire().await.unwrap();
        let mut checking = pin!(guard.verify());
        assert!(poll_once(checking.as_mut()).await.is_none(), "the store is asked");
        until_ended(&guard);
        let error = checking.await.unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("is over"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_and_stays_reported() {
    let pool = on_virtual_time("memory://", |it| it).await.0;
    let guard = pool.lock(KEY).ttl(ms(200)).renew(false).acquire().await.unwrap();
    let listeners = LossListeners::of(&guard).await;
    listeners.are("the ttl is over", ErrorKind::Lost).await;
    let late = guard.lost();
    guard.release().await.unwrap_err();
    assert_eq!(late.await.kind(), ErrorKind::Lost);
}

#[distributed_lock(key = "k", pool = pool, guard = lock)]
async fn annotated(
    pool: LockPool,
    inside: mpsc::UnboundedSender<Lost>,
    end: impl Future<Output = ()>,
) -> Result<(), LockError> {
    inside.send(lock.lost()).unwrap();
    inside.send(lock.lost()).unwrap();
    end.await;
    Ok(())
}

#[tokio::test]
async fn every_end_of_a_body_resolves_lost() {
    let pool = memory().await;
    for end in ["return", "panic", "abort"] {
        let (inside, mut lost) = mpsc::unbounded_channel();
        let go = Arc::new(Notify::new());
        let notified = go.clone();
        let body = tokio::spawn(annotated(pool.clone(), inside, async move {
            notified.notified().await;
            match end {
                "return" => {}
                "panic" => panic!("the body's own words"),
                _ => pending().await,
            }
        }));
        let listeners =
            LossListeners::begin([lost.recv().await.unwrap(), lost.recv().await.unwrap()]).await;
        if end == "abort" {
            body.abort();
        } else {
            go.notify_one();
        }
        listeners.are(end, ErrorKind::Released).await;
        assert_eq!(body.await.is_ok(), end == "return");
    }
}

#[tokio::test]
async fn a_thousand_tasks_wait_for_one_guard_and_half_of_them_give_up() {
    let pool = memory().await;
    let guard = pool.lock(KEY).acquire().await.unwrap();
    let listeners = LossListeners::begin((0..1_000).map(|_| guard.lost())).await;
    for task in listeners.0.iter().step_by(2) {
        task.abort();
    }
    drop(guard);
    for (n, task) in listeners.0.into_iter().enumerate() {
        match timeout(LONG, task).await.expect("it ends") {
            Ok(error) => assert_eq!((error.kind(), n % 2), (ErrorKind::Released, 1)),
            Err(error) => assert!(error.is_cancelled() && n % 2 == 0),
        }
    }
}

/// A service with a task for each of its locks keeps no task of a lock that has ended.
#[tokio::test]
async fn no_task_is_left_behind() {
    let pool = memory().await;
    let mut watches = JoinSet::new();
    for n in 0..10_000 {
        let guard = pool.lock(format!("k:{n}")).acquire().await.unwrap();
        watches.spawn(guard.lost());
        if n % 2 == 0 {
            guard.release().await.unwrap();
        }
    }
    let ended = timeout(LONG, watches.join_all()).await.expect("all end");
    assert!(ended.iter().all(|error| error.kind() == ErrorKind::Released));
}
