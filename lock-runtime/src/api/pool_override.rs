//! Pools by name for one test, in place of the installed ones.

use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::runtime::{self, Handle};

use crate::api::pool::LockPool;
use crate::base::error::{ErrorKind, LockError};
use crate::base::mutex::{Mutex, MutexGuard};

/// Runs `body` with `pool` under `name`, in place of the pool that is installed under that name. Each test of annotated
/// functions thus has its own pool, even while others run in the same process.
///
/// It applies to the calling task, and to all other tasks of its tokio runtime that are not in their own `with_pool`. This
/// includes tasks that the body spawns, and requests of an axum server that it starts. actix-web serves on runtimes of its
/// own, and takes the pool with `LockMiddleware::pool`. [`shutdown`](crate::shutdown) within the body shuts down only the
/// pools of the body. Several calls may be nested, for the same name or for several. The pool is not shut down at the end.
///
/// ```
/// use lock_runtime::testing::with_pool;
/// use lock_runtime::{LockError, LockPool, distributed_lock};
///
/// #[distributed_lock(key = "order:<id>", wait = "0s")]
/// async fn settle(id: u64) -> Result<(), LockError> {
///     Ok(())
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), LockError> {
/// // In `#[tokio::test(start_paused = true)]`:
/// let pool = LockPool::builder("memory://").on_current_runtime().connect().await?;
/// with_pool("default", pool.clone(), async {
///     let _other = pool.lock("order:42").acquire().await?;
///     assert!(settle(42).await.unwrap_err().is_conflict());
///     settle(43).await
/// })
/// .await
/// # }
/// ```
///
/// On a runtime with two such calls at the same time, a task in neither of them gets [`ErrorKind::Config`].
///
/// Dropping the future drops `body`.
pub async fn with_pool<F: Future>(name: &str, pool: LockPool, body: F) -> F::Output {
    pool.core().set_name(name);
    pool.core().announce_store();
    let entry = Entry {
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        name: name.to_owned(),
        pool,
        runtime: current_runtime(),
    };
    let mut scope = OF_TASK.try_with(Clone::clone).unwrap_or_default();
    // The innermost call is last. Calls around it do not count on the runtime meanwhile.
    let outer = scope.iter().rev().find(|(one, _, _)| one == name).map(|(_, _, id)| *id);
    scope.push((name.to_owned(), entry.pool.clone(), entry.id));
    let _active = Active::new(entry, outer);
    OF_TASK.scope(scope, body).await
}

/// By name, with the number of the entry in [`OF_RUNTIMES`].
type Scope = Vec<(String, LockPool, u64)>;

tokio::task_local! {
    /// The pools of this task.
    static OF_TASK: Scope;
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// The number of entries in [`OF_RUNTIMES`]. Outside of tests a look-up costs one load.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static OF_RUNTIMES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Entry {
    id: u64,
    name: String,
    pool: LockPool,
    runtime: Option<runtime::Id>,
}

fn of_runtimes() -> MutexGuard<'static, Vec<Entry>> {
    OF_RUNTIMES.lock()
}

fn current_runtime() -> Option<runtime::Id> {
    Handle::try_current().ok().map(|runtime| runtime.id())
}

/// An entry in [`OF_RUNTIMES`], until it is dropped. The entry that it hides returns then.
struct Active {
    id: u64,
    hidden: Option<Entry>,
}

impl Active {
    fn new(entry: Entry, outer: Option<u64>) -> Self {
        let mut entries = of_runtimes();
        let hidden = entries.iter().position(|one| Some(one.id) == outer);
        let hidden = hidden.map(|at| entries.swap_remove(at));
        let id = entry.id;
        entries.push(entry);
        COUNT.store(entries.len(), Ordering::Release);
        Self { id, hidden }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let mut entries = of_runtimes();
        let own = entries.iter().position(|one| one.id == self.id);
        let own = own.map(|at| entries.swap_remove(at));
        entries.extend(self.hidden.take());
        COUNT.store(entries.len(), Ordering::Release);
        drop(entries);
        // A pool may be dropped with it.
        drop(own);
    }
}

/// The pools of the current task, if a test has set some.
pub(crate) fn all() -> Vec<LockPool> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Vec::new();
    }
    // A name hides the same name of an outer test.
    let shown = |scope: &Scope| {
        let inner = |at: usize, name: &str| scope[at + 1..].iter().any(|(other, ..)| other == name);
        let entries = scope.iter().enumerate();
        let shown = entries.filter(|(at, (name, ..))| !inner(*at, name));
        shown.map(|(_, (_, pool, _))| pool.clone()).collect::<Vec<_>>()
    };
    let of_task = OF_TASK.try_with(shown);
    of_task.unwrap_or_else(|_| {
        let runtime = current_runtime();
        let entries = of_runtimes();
        let of_runtime = entries.iter().filter(|it| runtime.is_some() && it.runtime == runtime);
        of_runtime.map(|entry| entry.pool.clone()).collect()
    })
}

/// The pool of the current task under `name`, if a test has set one.
///
/// # Errors
/// [`ErrorKind::Config`] if the runtime of the task has several.
pub(crate) fn find(name: &str) -> Result<Option<LockPool>, LockError> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(None);
    }
    let of_task = OF_TASK.try_with(|scope| {
        scope.iter().rev().find(|(one, _, _)| one == name).map(|(_, pool, _)| pool.clone())
    });
    if let Ok(Some(pool)) = of_task {
        return Ok(Some(pool));
    }
    let Some(runtime) = current_runtime() else { return Ok(None) };
    let entries = of_runtimes();
    let mut fitting =
        entries.iter().filter(|entry| entry.name == name && entry.runtime == Some(runtime));
    let first = fitting.next();
    if fitting.next().is_some() {
        return Err(LockError::new(
            ErrorKind::Config,
            "several `with_pool` are active on this runtime, and this task is in none of them",
        )
        .in_pool(&name.into())
        .remedy("give the task its pool with a `with_pool` of its own, or give the tests runtimes of their own (`#[tokio::test]`)"));
    }
    Ok(first.map(|entry| entry.pool.clone()))
}
