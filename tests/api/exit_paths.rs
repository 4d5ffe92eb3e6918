//! Every way out of a body, and of a guard, frees the lock.

use std::cell::RefCell;
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, distributed_lock};
use lock_tests::exits::{self, Api, BodyError, SOON, Scene, Way};
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{Monitor, RedisServer, eventually, in_own_process};

/// A task pays for its body once, and a thread's stack for few copies of it.
#[tokio::test]
async fn a_call_with_a_lock_is_hardly_larger_than_its_body() {
    const BODY: usize = 100_000;
    let pool = LockPool::connect("memory://").await.unwrap();
    let run = pool.lock("k").run(async {
        let bytes = [1_u8; BODY];
        tokio::task::yield_now().await;
        bytes.iter().map(|byte| usize::from(*byte)).sum::<usize>()
    });
    let size = size_of_val(&run);
    assert!((BODY..BODY + 1_000).contains(&size), "{size} bytes");
    assert_eq!(run.await.unwrap(), BODY);
}

/// rustc's help for an `.await` that does not compile is to remove it, which would hold no lock.
#[tokio::test]
async fn an_awaited_request_is_an_acquire() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let guard = pool.lock("k").await.unwrap();
    assert!(pool.lock("k").try_acquire().await.unwrap().is_none());
    drop(guard);
    drop(pool.lock("k").wait(Duration::from_secs(10)).await.unwrap());
}

/// The caller keeps the future of the call, but not the body nor the lock.
#[tokio::test]
async fn a_body_that_is_cancelled_is_dropped_as_the_result_is_ready() {
    let pool = LockPool::connect("memory://").await.unwrap();
    let body = Arc::new(());
    let captured = body.clone();
    let mut run = pin!(pool.lock("k").run(async move {
        let _captured = captured;
        pending::<()>().await;
    }));
    assert!(run.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let shutdown = pool.shutdown(Duration::ZERO);
    let (ended, report) = tokio::join!(run.as_mut(), shutdown);
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::PoolClosed);
    assert_eq!(Arc::strong_count(&body), 1);
    assert_eq!((report.released, report.abandoned), (1, 0));
}

/// Before the release, as an `async` block drops what it has captured.
#[tokio::test]
async fn a_body_that_has_completed_is_dropped_before_the_release() {
    struct Body<'a>(&'a LockPool);

    impl Future for Body<'_> {
        type Output = ();

        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
            Poll::Ready(())
        }
    }

    impl Drop for Body<'_> {
        fn drop(&mut self) {
            assert_eq!(self.0.snapshot().held.len(), 1, "the lock is released");
        }
    }

    let pool = LockPool::connect("memory://").await.unwrap();
    pool.lock("k").run(Body(&pool)).await.unwrap();
    assert!(pool.snapshot().held.is_empty());
}

fn on_redis(api: Api) -> (Arc<RedisServer>, Arc<Scene>) {
    let server = Arc::new(RedisServer::start());
    let looked_at = server.clone();
    let taken = move |key: &str| looked_at.cli(&["EXISTS", key]) == "1";
    let scene = Scene::new(api, &server.url(), 7, taken);
    (server, scene)
}

fn on_memory(api: Api) -> Arc<Scene> {
    static NAMES: AtomicUsize = AtomicUsize::new(0);
    let url = format!("memory://exit-{}", NAMES.fetch_add(1, Ordering::Relaxed));
    let other = current_thread().block_on(LockPool::connect(&url)).unwrap();
    let taken = move |key: &str| {
        // Memory answers at once, so that a drop can query it.
        let attempt = pin!(other.lock(key).try_acquire());
        match attempt.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(guard) => guard.unwrap().is_none(),
            Poll::Pending => panic!("memory:// does not wait"),
        }
    };
    Scene::new(api, &url, 7, taken)
}

/// Notes whether the lock is held when it drops.
struct NotesHold {
    pool: LockPool,
    held: Arc<AtomicUsize>,
    id: u64,
}

impl Drop for NotesHold {
    fn drop(&mut self) {
        self.held.fetch_add(self.pool.snapshot().held.len(), Ordering::Relaxed);
    }
}

#[distributed_lock(key = "drop:<id>", pool = pool)]
async fn uses_a_field(pool: &LockPool, id: u64, value: NotesHold) -> Result<u64, LockError> {
    Ok(value.id + id)
}

#[distributed_lock(key = "drop:<id>", pool = pool, guard = lock)]
async fn uses_a_field_and_a_guard(
    pool: &LockPool,
    id: u64,
    value: NotesHold,
) -> Result<u64, LockError> {
    Ok(value.id + id + u64::from(!lock.is_held()))
}

#[distributed_lock(key = "drop:<id>", pool = pool)]
async fn uses_a_field_with_attributes(
    pool: &LockPool,
    id: u64,
    #[cfg(test)]
    #[allow(clippy::needless_pass_by_value)]
    value: NotesHold,
    #[cfg(not(test))] absent: NotesHold,
) -> Result<u64, LockError> {
    #[cfg(not(test))]
    drop(absent);
    Ok(value.id + id)
}

/// A block that uses one field of a value captures that field only.
#[test]
fn an_argument_drops_before_the_release_if_the_body_uses_a_field_of_it() {
    current_thread().block_on(async {
        let pool = LockPool::connect("memory://").await.unwrap();
        let held = Arc::new(AtomicUsize::new(0));
        let value = |id| NotesHold { pool: pool.clone(), held: held.clone(), id };
        assert_eq!(uses_a_field(&pool, 1, value(1)).await.unwrap(), 2);
        assert_eq!(held.load(Ordering::Relaxed), 1);
        assert_eq!(uses_a_field_and_a_guard(&pool, 1, value(1)).await.unwrap(), 2);
        assert_eq!(held.load(Ordering::Relaxed), 2);
        assert_eq!(uses_a_field_with_attributes(&pool, 1, value(1)).await.unwrap(), 2);
        assert_eq!(held.load(Ordering::Relaxed), 3);
    });
}

/// Polls once, while the server cannot have answered.
fn poll_before_the_answer(server: &RedisServer, future: Pin<&mut impl Future>) {
    server.pause();
    let polled = future.poll(&mut Context::from_waker(Waker::noop()));
    server.resume();
    assert!(polled.is_pending());
}

/// Each exit, by each way to lock, on these stores. `tests/engines` has the others.
macro_rules! exits {
    ($($exit:ident)*) => {
        mod redis {
            use super::*;
            $(exits!(@ $exit, |api| on_redis(api).1);)*
        }
        mod memory {
            use super::*;
            $(exits!(@ $exit, on_memory);)*
        }
    };
    (@ $exit:ident, $store:expr) => {
        mod $exit {
            use super::*;

            #[test]
            fn of_an_annotated_function() {
                exits::$exit(&($store)(Api::Attribute));
            }

            #[test]
            fn of_run() {
                exits::$exit(&($store)(Api::Run));
            }

            #[test]
            fn of_a_guard() {
                exits::$exit(&($store)(Api::Guard));
            }
        }
    };
}

exits! {
    a_return
    an_early_return
    a_question_mark
    a_panic
    a_timeout
    a_lost_select
    an_abort
    a_drop_of_a_current_thread_runtime
    a_drop_of_a_multi_thread_runtime
    a_shutdown_of_the_pool
}

#[test]
fn a_drop_before_the_first_poll_sends_nothing() {
    for api in [Api::Attribute, Api::Run, Api::Guard] {
        let scene = on_memory(api);
        drop(scene.call(Way::Return));
        assert!(!scene.is_taken());

        let (server, scene) = on_redis(api);
        let monitor = Monitor::start(&server);
        current_thread().block_on(async { drop(scene.call(Way::Return)) });
        // A later acquire is served first.
        current_thread().block_on(scene.pool.lock("next").fencing(false).run(async {})).unwrap();
        let sent = monitor.settled();
        let mentions = |arg: &str| {
            // Without the observation of the dropped argument.
            let sent = sent.iter().filter(|ran| ran.name() != "EXISTS");
            sent.filter(|ran| ran.args.iter().any(|it| it == arg)).count()
        };
        assert!(mentions("next") > 0);
        assert_eq!((mentions(&scene.key), mentions("lock_runtime:fence")), (0, 0), "{sent:#?}");
    }
}

/// The attribute and `run` share the future; a guard has none.
#[test]
fn a_local_that_panics_as_it_is_dropped() {
    struct Panics;

    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    let (_server, scene) = on_redis(Api::Run);
    let inside = scene.clone();
    let mut call = Box::pin(scene.pool.lock(&scene.key).run(async move {
        let _local = Panics;
        inside.entered.notify_one();
        pending::<()>().await;
    }));
    current_thread().block_on(async {
        tokio::select! {
            _ = &mut call => panic!("the body ended"),
            () = scene.entered.notified() => {}
        }
    });
    assert!(scene.is_taken());
    catch_unwind(AssertUnwindSafe(|| drop(call))).unwrap_err();
    eventually(SOON, "the key goes", || !scene.is_taken());
}

#[test]
fn a_shutdown_of_the_process() {
    in_own_process(
        concat!(module_path!(), "::a_shutdown_of_the_process"),
        shut_down_with_all_at_once,
    );
}

fn shut_down_with_all_at_once() {
    let apis = [Api::Attribute, Api::Run, Api::Guard];
    let scenes: Vec<_> =
        apis.into_iter().flat_map(|api| [on_redis(api).1, on_memory(api)]).collect();
    let runtime = multi_thread();
    runtime.block_on(async {
        let mut calls = Vec::new();
        for (n, scene) in scenes.iter().enumerate() {
            lock_runtime::install(&format!("pool {n}"), scene.pool.clone()).unwrap();
            calls.push(scene.task_inside().await);
        }
        let report = lock_runtime::shutdown(Duration::from_millis(50)).await;
        assert_eq!((report.released, report.abandoned), (scenes.len(), 0));
        for (scene, call) in scenes.iter().zip(calls) {
            assert!(!scene.is_taken(), "{:?}", scene.api);
            if scene.api == Api::Guard {
                // The code around a guard is not cancelled.
                call.abort();
                continue;
            }
            let error = call.await.unwrap().unwrap_err();
            assert!(
                matches!(&error, BodyError::Lock(error) if error.kind() == ErrorKind::PoolClosed),
                "{error:?}"
            );
            scene.locals_ended_under_the_lock();
        }
    });
}

#[test]
fn a_guard_that_is_dropped_on_a_thread_without_a_runtime() {
    let (_server, scene) = on_redis(Api::Guard);
    let guard = current_thread().block_on(scene.pool.lock(&scene.key).acquire()).unwrap();
    assert!(scene.is_taken());
    thread::spawn(move || drop(guard)).join().unwrap();
    eventually(SOON, "the key goes", || !scene.is_taken());
}

/// A thread-local may be dropped at the end of its thread, when no runtime can be entered there.
#[test]
fn a_guard_that_is_dropped_with_the_locals_of_its_thread() {
    thread_local! {
        static FIRST: RefCell<Option<LockGuard>> = const { RefCell::new(None) };
        static LAST: RefCell<Option<LockGuard>> = const { RefCell::new(None) };
    }
    for scene in [on_redis(Api::Guard).1, on_memory(Api::Guard)] {
        for local in [&FIRST, &LAST] {
            let (pool, key) = (scene.pool.clone(), scene.key.clone());
            let keep = move || {
                // Created before the thread-locals of the runtime, or after them.
                FIRST.set(None);
                let guard = current_thread().block_on(pool.lock(&key).acquire()).unwrap();
                local.set(Some(guard));
            };
            thread::spawn(keep).join().unwrap();
            eventually(SOON, "the key goes", || !scene.is_taken());
        }
    }
}

/// The caller's thread sends the request; the driver handles the outcome.
#[test]
fn an_acquire_that_is_no_longer_polled_is_kept_or_undone() {
    let (server, scene) = on_redis(Api::Guard);
    let request = scene.pool.lock(&scene.key).ttl(Duration::from_secs(20));
    let request = request.renew(Duration::from_millis(500)).wait(Duration::from_secs(30));
    let mut acquire = Box::pin(request.acquire());
    poll_before_the_answer(&server, acquire.as_mut());
    eventually(SOON, "the lock is granted", || scene.is_taken());
    let left = || server.cli(&["PTTL", &scene.key]).parse::<i64>().unwrap();
    let mut last = left();
    // A caller that is slow still gets what it was granted.
    for _ in 0..2 {
        eventually(SOON, "the lease is renewed", || {
            let before = std::mem::replace(&mut last, left());
            last > before
        });
    }
    let guard = current_thread().block_on(acquire).unwrap();
    assert!(guard.is_held());
    drop(guard);
    eventually(SOON, "the key goes", || !scene.is_taken());

    let mut acquire = Box::pin(scene.pool.lock(&scene.key).acquire());
    poll_before_the_answer(&server, acquire.as_mut());
    eventually(SOON, "the lock is granted", || scene.is_taken());
    drop(acquire);
    eventually(SOON, "the key goes", || !scene.is_taken());
}

#[test]
fn a_release_that_is_not_awaited_goes_on() {
    let (_server, scene) = on_redis(Api::Guard);
    let guard = current_thread().block_on(scene.pool.lock(&scene.key).acquire()).unwrap();
    // Not even polled, the future owns the guard.
    drop(guard.release());
    eventually(SOON, "the key goes", || !scene.is_taken());
    let guard = current_thread().block_on(scene.pool.lock(&scene.key).acquire()).unwrap();
    let mut release = Box::pin(guard.release());
    let _ = release.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    drop(release);
    eventually(SOON, "the key goes", || !scene.is_taken());
}
