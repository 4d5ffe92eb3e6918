//! Every way out of a body, and of a guard, frees the lock.

use std::cell::RefCell;
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use lock_runtime::{ErrorKind, LockError, LockGuard, LockPool, distributed_lock};
use lock_tests::history::now_ns;
use lock_tests::runtimes::{current_thread, multi_thread};
use lock_tests::{Monitor, RedisServer, eventually, in_own_process};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// The limit of a release that is not awaited, on a busy machine. Far below the ttl of 30 s.
const SOON: Duration = Duration::from_secs(10);

/// The interface that locks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Api {
    Attribute,
    Run,
    Guard,
}

/// How the body ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Return,
    EarlyReturn,
    QuestionMark,
    Panic,
    /// By an action of its caller.
    Never,
}

#[derive(Debug)]
enum FailureKind {
    Lock(LockError),
    Own,
}

impl From<LockError> for FailureKind {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

enum Store {
    Redis(Box<RedisServer>),
    /// Another pool on it.
    Memory(LockPool),
}

/// One key, and the observations of it.
struct Scene {
    api: Api,
    store: Store,
    pool: LockPool,
    key: String,
    entered: Notify,
    seen: Mutex<Vec<bool>>,
}

impl Scene {
    fn on_redis(api: Api) -> Arc<Self> {
        let server = RedisServer::start();
        let url = server.url();
        Self::new(api, Store::Redis(Box::new(server)), &url)
    }

    fn on_memory(api: Api) -> Arc<Self> {
        static NAMES: AtomicUsize = AtomicUsize::new(0);
        let url = format!("memory://exit-{}", NAMES.fetch_add(1, Ordering::Relaxed));
        let other = current_thread().block_on(LockPool::connect(&url)).unwrap();
        Self::new(api, Store::Memory(other), &url)
    }

    fn new(api: Api, store: Store, url: &str) -> Arc<Self> {
        let pool = current_thread().block_on(LockPool::connect(url)).unwrap();
        let (entered, seen) = (Notify::new(), Mutex::default());
        Arc::new(Self { api, store, pool, key: "exit:7".into(), entered, seen })
    }

    /// Polls once, while the server cannot have answered.
    fn poll_before_the_answer(&self, future: Pin<&mut impl Future>) {
        let Store::Redis(server) = &self.store else { panic!("memory:// answers at once") };
        server.pause();
        let polled = future.poll(&mut Context::from_waker(Waker::noop()));
        server.resume();
        assert!(polled.is_pending());
    }

    fn is_taken(&self) -> bool {
        match &self.store {
            Store::Redis(server) => server.cli(&["EXISTS", &self.key]) == "1",
            Store::Memory(other) => {
                // Memory answers at once, so that a drop can query it.
                let attempt = pin!(other.lock(&self.key).try_acquire());
                match attempt.poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(guard) => guard.unwrap().is_none(),
                    Poll::Pending => panic!("memory:// does not wait"),
                }
            }
        }
    }

    fn witness(self: &Arc<Self>) -> Witness {
        Witness(self.clone())
    }

    /// A call with a body that ends that `way`.
    fn call(self: &Arc<Self>, way: Way) -> Call {
        let (scene, argument) = (self.clone(), self.witness());
        match self.api {
            Api::Attribute => Box::pin(annotated(scene, 7, way, argument)),
            Api::Run => Box::pin(ran(scene, way, argument)),
            Api::Guard => Box::pin(guarded(scene, way, argument)),
        }
    }

    /// A call that is in its body and stays there.
    async fn call_inside(self: &Arc<Self>) -> Call {
        let mut call = self.call(Way::Never);
        tokio::select! {
            ended = &mut call => panic!("the body ended: {ended:?}"),
            () = self.entered.notified() => {}
        }
        assert!(self.is_taken());
        call
    }

    /// A task that is in its body and stays there.
    async fn task_inside(self: &Arc<Self>) -> JoinHandle<Result<u32, FailureKind>> {
        let mut task = tokio::spawn(self.call(Way::Never));
        tokio::select! {
            ended = &mut task => panic!("the body ended: {ended:?}"),
            () = self.entered.notified() => {}
        }
        assert!(self.is_taken());
        task
    }

    #[track_caller]
    fn is_free_at_once(&self) {
        assert!(!self.is_taken(), "{:?}: the caller knows the result, the key is there", self.api);
        self.locals_ended_under_the_lock();
    }

    #[track_caller]
    fn is_free_soon(&self) {
        eventually(SOON, "the key goes", || !self.is_taken());
        self.locals_ended_under_the_lock();
    }

    #[track_caller]
    fn locals_ended_under_the_lock(&self) {
        let seen = self.seen.lock().unwrap();
        assert_eq!(*seen, [true, true], "{:?}: the key was there for argument and local", self.api);
    }
}

type Call = Pin<Box<dyn Future<Output = Result<u32, FailureKind>> + Send>>;

/// Looks at the key as it is dropped.
struct Witness(Arc<Scene>);

impl Drop for Witness {
    fn drop(&mut self) {
        let taken = self.0.is_taken();
        self.0.seen.lock().unwrap().push(taken);
    }
}

macro_rules! leave {
    ($scene:ident, $way:ident) => {
        $scene.entered.notify_one();
        tokio::task::yield_now().await;
        match $way {
            Way::Return => {}
            Way::EarlyReturn => return Ok(1),
            Way::QuestionMark => Err(FailureKind::Own)?,
            Way::Panic => panic!("the body's own words"),
            Way::Never => pending().await,
        }
    };
}

#[distributed_lock(key = "exit:<id>", ttl = "30s", pool = &scene.pool)]
async fn annotated(
    scene: Arc<Scene>,
    id: u32,
    way: Way,
    argument: Witness,
) -> Result<u32, FailureKind> {
    let _local = scene.witness();
    let _used = &argument;
    leave!(scene, way);
    Ok(0)
}

async fn ran(scene: Arc<Scene>, way: Way, argument: Witness) -> Result<u32, FailureKind> {
    let lock = scene.pool.lock(&scene.key);
    let body = async move {
        let _local = scene.witness();
        let _used = &argument;
        leave!(scene, way);
        Ok(0)
    };
    lock.run(body).await?
}

async fn guarded(scene: Arc<Scene>, way: Way, argument: Witness) -> Result<u32, FailureKind> {
    let guard = scene.pool.lock(&scene.key).acquire().await?;
    let locals = (argument, scene.witness());
    leave!(scene, way);
    drop(locals);
    guard.release().await?;
    Ok(0)
}

/// Each exit, by each way to lock, on each store.
macro_rules! exits {
    ($($exit:ident)*) => {
        mod redis {
            use super::*;
            $(exits!(@ $exit on_redis);)*
        }
        mod memory {
            use super::*;
            $(exits!(@ $exit on_memory);)*
        }
    };
    (@ $exit:ident $store:ident) => {
        mod $exit {
            use super::*;

            #[test]
            fn of_an_annotated_function() {
                super::super::$exit(&Scene::$store(Api::Attribute));
            }

            #[test]
            fn of_run() {
                super::super::$exit(&Scene::$store(Api::Run));
            }

            #[test]
            fn of_a_guard() {
                super::super::$exit(&Scene::$store(Api::Guard));
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
    a_drop_before_the_first_poll
    a_drop_of_a_current_thread_runtime
    a_drop_of_a_multi_thread_runtime
}

fn a_return(scene: &Arc<Scene>) {
    let output = current_thread().block_on(async {
        let output = scene.call(Way::Return).await;
        scene.is_free_at_once();
        output
    });
    assert_eq!(output.unwrap(), 0);
}

fn an_early_return(scene: &Arc<Scene>) {
    let output = current_thread().block_on(async {
        let output = scene.call(Way::EarlyReturn).await;
        is_free_as_promised(scene);
        output
    });
    assert_eq!(output.unwrap(), 1);
}

fn a_question_mark(scene: &Arc<Scene>) {
    let output = current_thread().block_on(async {
        let output = scene.call(Way::QuestionMark).await;
        is_free_as_promised(scene);
        output
    });
    assert!(matches!(output, Err(FailureKind::Own)), "{output:?}");
}

/// No caller can await the release of a dropped guard.
fn is_free_as_promised(scene: &Arc<Scene>) {
    match scene.api {
        Api::Attribute | Api::Run => scene.is_free_at_once(),
        Api::Guard => scene.is_free_soon(),
    }
}

fn a_panic(scene: &Arc<Scene>) {
    let ended = current_thread().block_on(async { tokio::spawn(scene.call(Way::Panic)).await });
    let payload = ended.unwrap_err().into_panic();
    assert_eq!(payload.downcast_ref(), Some(&"the body's own words"));
    scene.is_free_soon();
}

fn a_timeout(scene: &Arc<Scene>) {
    current_thread().block_on(async {
        let call = scene.call_inside().await;
        timeout(Duration::from_millis(5), call).await.unwrap_err();
        scene.is_free_soon();
    });
}

fn a_lost_select(scene: &Arc<Scene>) {
    current_thread().block_on(async {
        tokio::select! {
            ended = scene.call(Way::Never) => panic!("the body ended: {ended:?}"),
            () = scene.entered.notified() => {}
        }
        scene.is_free_soon();
    });
}

fn an_abort(scene: &Arc<Scene>) {
    multi_thread().block_on(async {
        let task = scene.task_inside().await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        scene.is_free_soon();
    });
}

fn a_drop_before_the_first_poll(scene: &Arc<Scene>) {
    let Store::Redis(server) = &scene.store else {
        drop(scene.call(Way::Return));
        return assert!(!scene.is_taken());
    };
    let monitor = Monitor::start(server);
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

fn a_drop_of_a_current_thread_runtime(scene: &Arc<Scene>) {
    drop_runtime(current_thread(), scene);
}

fn a_drop_of_a_multi_thread_runtime(scene: &Arc<Scene>) {
    drop_runtime(multi_thread(), scene);
}

fn drop_runtime(runtime: Runtime, scene: &Arc<Scene>) {
    let _task = runtime.block_on(scene.task_inside());
    drop(runtime);
    scene.is_free_soon();
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

    let scene = Scene::on_redis(Api::Run);
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
        apis.into_iter().flat_map(|api| [Scene::on_redis(api), Scene::on_memory(api)]).collect();
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
                matches!(&error, FailureKind::Lock(error) if error.kind() == ErrorKind::PoolClosed),
                "{error:?}"
            );
            scene.locals_ended_under_the_lock();
        }
    });
}

#[test]
fn a_guard_that_is_dropped_on_a_thread_without_a_runtime() {
    let scene = Scene::on_redis(Api::Guard);
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
    for scene in [Scene::on_redis(Api::Guard), Scene::on_memory(Api::Guard)] {
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
    const TTL: Duration = Duration::from_millis(1_500);
    let scene = Scene::on_redis(Api::Guard);
    let request = scene.pool.lock(&scene.key).ttl(TTL).wait(Duration::from_secs(30));
    let mut acquire = Box::pin(request.acquire());
    scene.poll_before_the_answer(acquire.as_mut());
    eventually(SOON, "the lock is granted", || scene.is_taken());
    let granted = now_ns();
    eventually(SOON, "two ttls go by", || {
        assert!(scene.is_taken(), "a caller that is slow still gets what it was granted");
        u128::from(now_ns() - granted) > 2 * TTL.as_nanos()
    });
    let guard = current_thread().block_on(acquire).unwrap();
    assert!(guard.is_held());
    drop(guard);
    eventually(SOON, "the key goes", || !scene.is_taken());

    let mut acquire = Box::pin(scene.pool.lock(&scene.key).acquire());
    scene.poll_before_the_answer(acquire.as_mut());
    eventually(SOON, "the lock is granted", || scene.is_taken());
    drop(acquire);
    eventually(SOON, "the key goes", || !scene.is_taken());
}

#[test]
fn a_release_that_is_not_awaited_goes_on() {
    let scene = Scene::on_redis(Api::Guard);
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
