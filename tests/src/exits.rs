//! Ways out of a body, and of the code around a guard, and what frees the lock then.

use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_runtime::{ErrorKind, LockError, LockPool, distributed_lock};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::eventually;
use crate::runtimes::{current_thread, multi_thread};

/// The limit of a release that is not awaited, on a busy machine. Far below the ttl of 30 s.
pub const SOON: Duration = Duration::from_secs(10);

/// The interface that locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// An annotated function.
    Attribute,
    /// `LockRequest::run`.
    Run,
    /// `LockRequest::acquire`.
    Guard,
}

/// How the body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// At its end.
    Return,
    /// By `return`.
    EarlyReturn,
    /// By `?`.
    QuestionMark,
    /// By a panic.
    Panic,
    /// By an action of its caller.
    Never,
}

/// The error of a body.
#[derive(Debug)]
pub enum BodyError {
    /// Of the lock.
    Lock(LockError),
    /// Of the body itself.
    Own,
}

impl From<LockError> for BodyError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

/// One key, and the observations of it.
pub struct Scene {
    /// How it is locked.
    pub api: Api,
    /// The pool.
    pub pool: LockPool,
    /// `exit:<id>`.
    pub key: String,
    /// Notified when the body begins.
    pub entered: Notify,
    id: u32,
    seen: Mutex<Vec<bool>>,
    taken: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl fmt::Debug for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scene").field("api", &self.api).field("key", &self.key).finish()
    }
}

impl Scene {
    /// A scene with the key `exit:<id>` of the store at `url`. `taken` looks at the store.
    ///
    /// # Panics
    ///
    /// When the store is not connected.
    pub fn new(
        api: Api,
        url: &str,
        id: u32,
        taken: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Arc<Self> {
        let pool = current_thread().block_on(LockPool::connect(url)).unwrap();
        let (entered, seen) = (Notify::new(), Mutex::default());
        let (key, taken) = (format!("exit:{id}"), Box::new(taken));
        Arc::new(Self { api, pool, key, entered, id, seen, taken })
    }

    /// Whether the store keeps the key for an owner.
    pub fn is_taken(&self) -> bool {
        (self.taken)(&self.key)
    }

    /// A call with a body that ends that `way`.
    pub fn call(self: &Arc<Self>, way: Way) -> Call {
        let (scene, argument) = (self.clone(), Witness(self.clone()));
        match self.api {
            Api::Attribute => Box::pin(annotated(scene, self.id, way, argument)),
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
    ///
    /// # Panics
    ///
    /// When the body ends, or the store does not keep the key.
    pub async fn task_inside(self: &Arc<Self>) -> JoinHandle<Result<u32, BodyError>> {
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

    /// No caller can await the release of a dropped guard.
    #[track_caller]
    fn is_free_as_promised(&self) {
        match self.api {
            Api::Attribute | Api::Run => self.is_free_at_once(),
            Api::Guard => self.is_free_soon(),
        }
    }

    /// # Panics
    ///
    /// When the key was free as the argument or a local of the body was dropped.
    #[track_caller]
    pub fn locals_ended_under_the_lock(&self) {
        let seen = self.seen.lock().unwrap();
        assert_eq!(*seen, [true, true], "{:?}: the key was there for argument and local", self.api);
    }
}

/// A call that locks, runs its body, and frees.
pub type Call = Pin<Box<dyn Future<Output = Result<u32, BodyError>> + Send>>;

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
            Way::QuestionMark => Err(BodyError::Own)?,
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
) -> Result<u32, BodyError> {
    let _local = Witness(scene.clone());
    let _used = &argument;
    leave!(scene, way);
    Ok(0)
}

async fn ran(scene: Arc<Scene>, way: Way, argument: Witness) -> Result<u32, BodyError> {
    let lock = scene.pool.lock(&scene.key);
    let body = async move {
        let _local = Witness(scene.clone());
        let _used = &argument;
        leave!(scene, way);
        Ok(0)
    };
    lock.run(body).await?
}

async fn guarded(scene: Arc<Scene>, way: Way, argument: Witness) -> Result<u32, BodyError> {
    let guard = scene.pool.lock(&scene.key).acquire().await?;
    let locals = (argument, Witness(scene.clone()));
    leave!(scene, way);
    drop(locals);
    guard.release().await?;
    Ok(0)
}

/// A way out of the body of a scene, and the check of what it leaves.
pub type Exit = fn(&Arc<Scene>);

/// Every exit, by its name.
pub const EXITS: [(&str, Exit); 10] = [
    ("a return", a_return),
    ("an early return", an_early_return),
    ("a question mark", a_question_mark),
    ("a panic", a_panic),
    ("a timeout", a_timeout),
    ("a lost select", a_lost_select),
    ("an abort", an_abort),
    ("a drop of a current-thread runtime", a_drop_of_a_current_thread_runtime),
    ("a drop of a multi-thread runtime", a_drop_of_a_multi_thread_runtime),
    ("a shutdown of the pool", a_shutdown_of_the_pool),
];

/// # Panics
///
/// When the key is not free, as in all functions below.
pub fn a_return(scene: &Arc<Scene>) {
    let output = current_thread().block_on(async {
        let output = scene.call(Way::Return).await;
        scene.is_free_at_once();
        output
    });
    assert_eq!(output.unwrap(), 0);
}

/// By `return`.
pub fn an_early_return(scene: &Arc<Scene>) {
    let output = current_thread().block_on(async {
        let output = scene.call(Way::EarlyReturn).await;
        scene.is_free_as_promised();
        output
    });
    assert_eq!(output.unwrap(), 1);
}

/// By `?`.
pub fn a_question_mark(scene: &Arc<Scene>) {
    let output = current_thread().block_on(async {
        let output = scene.call(Way::QuestionMark).await;
        scene.is_free_as_promised();
        output
    });
    assert!(matches!(output, Err(BodyError::Own)), "{output:?}");
}

/// In a task.
pub fn a_panic(scene: &Arc<Scene>) {
    let ended = current_thread().block_on(async { tokio::spawn(scene.call(Way::Panic)).await });
    let payload = ended.unwrap_err().into_panic();
    assert_eq!(payload.downcast_ref(), Some(&"the body's own words"));
    scene.is_free_soon();
}

/// Around the call.
pub fn a_timeout(scene: &Arc<Scene>) {
    current_thread().block_on(async {
        let call = scene.call_inside().await;
        timeout(Duration::from_millis(5), call).await.unwrap_err();
        scene.is_free_soon();
    });
}

/// Against the beginning of the body.
pub fn a_lost_select(scene: &Arc<Scene>) {
    current_thread().block_on(async {
        tokio::select! {
            ended = scene.call(Way::Never) => panic!("the body ended: {ended:?}"),
            () = scene.entered.notified() => {}
        }
        scene.is_free_soon();
    });
}

/// Of the task.
pub fn an_abort(scene: &Arc<Scene>) {
    multi_thread().block_on(async {
        let task = scene.task_inside().await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        scene.is_free_soon();
    });
}

/// With the task.
pub fn a_drop_of_a_current_thread_runtime(scene: &Arc<Scene>) {
    drop_runtime(current_thread(), scene);
}

/// With the task.
pub fn a_drop_of_a_multi_thread_runtime(scene: &Arc<Scene>) {
    drop_runtime(multi_thread(), scene);
}

fn drop_runtime(runtime: Runtime, scene: &Arc<Scene>) {
    let _task = runtime.block_on(scene.task_inside());
    drop(runtime);
    scene.is_free_soon();
}

/// The body is cancelled. The code around a guard is not, but its lock is released.
pub fn a_shutdown_of_the_pool(scene: &Arc<Scene>) {
    multi_thread().block_on(async {
        let task = scene.task_inside().await;
        let report = scene.pool.shutdown(Duration::from_millis(50)).await;
        assert_eq!((report.released, report.abandoned), (1, 0));
        assert!(!scene.is_taken(), "{:?}", scene.api);
        if scene.api == Api::Guard {
            return task.abort();
        }
        let error = task.await.unwrap().unwrap_err();
        assert!(
            matches!(&error, BodyError::Lock(error) if error.kind() == ErrorKind::PoolClosed),
            "{error:?}"
        );
        scene.locals_ended_under_the_lock();
    });
}
