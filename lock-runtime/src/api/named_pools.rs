//! Pools by name, for annotated functions.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use crate::api::call_sites;
use crate::api::pool::{LockPool, PoolBuilder};
#[cfg(feature = "testing")]
use crate::api::pool_override;
pub(crate) use crate::base::call_site::DEFAULT_POOL as DEFAULT;
use crate::base::call_site::LockLabel;
use crate::base::error::{ErrorKind, LockError};
use crate::base::process::OfProcess;
use crate::exec::panic_boundary;
use crate::lock::shutdown::ShutdownReport;

// There are few: comparisons cost less than a hash.
static POOLS: OfProcess<RwLock<BTreeMap<String, LockPool>>> = OfProcess::new();

fn pools() -> &'static RwLock<BTreeMap<String, LockPool>> {
    POOLS.get_or_init(RwLock::default)
}

/// Connects to the store at `url` and installs the pool as `"default"`, the pool of all annotated functions that name no
/// other. See [`LockPool::connect`] for the URLs.
///
/// Cancel safe. If the future is dropped, there is no pool, and connections that were begun are closed.
///
/// # Errors
/// [`ErrorKind::Config`] if there is a default pool already, or the URL is invalid. [`ErrorKind::Backend`] if the store is
/// unreachable or refuses.
pub async fn init(url: &str) -> Result<LockPool, LockError> {
    init_with(LockPool::builder(url)).await
}

/// Like [`init`], with the settings of `pool`. As cancel safe.
///
/// ```
/// # use std::time::Duration;
/// # use lock_runtime::{LockError, LockPool};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), LockError> {
/// lock_runtime::init_with(LockPool::builder("memory://").ttl(Duration::from_secs(10))).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Same as [`init`].
pub async fn init_with(pool: PoolBuilder) -> Result<LockPool, LockError> {
    refuse_in_test(DEFAULT)?;
    if installed(DEFAULT).as_ref().is_some_and(is_open) {
        return Err(taken(DEFAULT));
    }
    let pool = pool.connect().await.map_err(|error| error.in_pool(&DEFAULT.into()))?;
    install(DEFAULT, pool.clone())?;
    Ok(pool)
}

/// Like [`init_with`], with the settings of [`PoolBuilder::from_env`]: `LOCK_URL` and others. As cancel safe.
///
/// # Errors
/// Same as [`init`], and [`ErrorKind::Config`] if a variable is missing or invalid.
pub async fn init_from_env() -> Result<LockPool, LockError> {
    init_with(PoolBuilder::from_env(DEFAULT)?).await
}

/// Installs `pool` under `name`, for `#[distributed_lock(pool = "name", ..)]`.
///
/// # Errors
/// [`ErrorKind::Config`] if the name is empty or taken. A pool takes its name until it is shut down or its runtime ends;
/// `testing::with_pool` does for the calls within it.
pub fn install(name: &str, pool: LockPool) -> Result<(), LockError> {
    if name.is_empty() {
        return Err(LockError::new(ErrorKind::Config, "the name of the pool is empty").remedy(
            "write the name that functions name with `pool`; those without `pool` use the pool of `init`",
        ));
    }
    refuse_in_test(name)?;
    let core = pool.core().clone();
    let former = {
        let mut pools = pools().write().unwrap_or_else(PoisonError::into_inner);
        if pools.get(name).is_some_and(is_open) {
            return Err(taken(name));
        }
        core.set_name(name);
        pools.insert(name.to_owned(), pool)
    };
    // The recorder, the subscriber and the store of the program run outside of the lock.
    core.announce_store();
    call_sites::announce(&core);
    drop(former);
    Ok(())
}

/// The pool that is installed under `name`.
#[must_use]
pub fn pool(name: &str) -> Option<LockPool> {
    find(name).ok()
}

/// Shuts down all installed pools at the same time; see [`LockPool::shutdown`]. Later calls of annotated functions get
/// [`ErrorKind::PoolClosed`], until another pool is installed.
///
/// Cancel safe: once polled, it completes in the background.
pub async fn shutdown(grace: Duration) -> ShutdownReport {
    let closing: Vec<_> = all()
        .into_iter()
        .map(|pool| {
            let driver = pool.core().driver().clone();
            let (reply, report) = tokio::sync::oneshot::channel();
            driver.spawn(async move {
                panic_boundary::answer(reply, pool.shutdown(grace).await);
            });
            report
        })
        .collect();
    let mut sum = ShutdownReport::default();
    for report in closing {
        let report = report.await.unwrap_or_default();
        sum.released += report.released;
        sum.abandoned += report.abandoned;
    }
    sum
}

/// The installed pools, or those of a test.
pub(crate) fn all() -> Vec<LockPool> {
    #[cfg(feature = "testing")]
    {
        let of_test = pool_override::all();
        if !of_test.is_empty() {
            return of_test;
        }
    }
    pools().read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
}

/// The pool of a call: given, or installed under a name.
#[derive(Clone, Debug)]
pub(crate) enum PoolRef {
    Named(Cow<'static, str>),
    Given(LockPool),
}

impl Default for PoolRef {
    fn default() -> Self {
        Self::Named(Cow::Borrowed(DEFAULT))
    }
}

impl PoolRef {
    /// The pool, for a call that is named by `label` in an error.
    pub(crate) fn find(&self, label: &LockLabel) -> Result<LockPool, LockError> {
        match self {
            Self::Given(pool) => Ok(pool.clone()),
            Self::Named(name) => find(name).map_err(|error| error.at(label.lock_name())),
        }
    }
}

/// The pool that calls under `name` use.
pub(crate) fn find(name: &str) -> Result<LockPool, LockError> {
    #[cfg(feature = "testing")]
    if let Some(pool) = pool_override::find(name)? {
        return Ok(pool);
    }
    installed(name).ok_or_else(|| missing(name))
}

fn installed(name: &str) -> Option<LockPool> {
    pools().read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
}

/// Whether the pool still grants locks. One on a runtime that has ended does not, even without a shutdown.
fn is_open(pool: &LockPool) -> bool {
    let core = pool.core();
    !core.tracker.is_closed() && !core.driver().is_gone()
}

/// Refuses a pool for the process where a test has its own under this name, which all calls would take.
fn refuse_in_test(name: &str) -> Result<(), LockError> {
    #[cfg(feature = "testing")]
    if pool_override::find(name)?.is_some() {
        return Err(LockError::new(
            ErrorKind::Config,
            "`testing::with_pool` has set a pool under this name, and a pool of the process would stay unused",
        )
        .in_pool(&name.into())
        .remedy("call `init` or `install` in `main`, outside of the code under test"));
    }
    let _ = name;
    Ok(())
}

#[cold]
fn taken(name: &str) -> LockError {
    LockError::new(ErrorKind::Config, "a pool is installed under this name already")
        .in_pool(&name.into())
        .remedy("call `init` once, in `main`; give further pools a name with `install`, or shut the first one down; a test has its own with `testing::with_pool`")
}

#[cold]
fn missing(name: &str) -> LockError {
    if POOLS.is_inherited() {
        return LockError::inherited().in_pool(&name.into());
    }
    let names: Vec<_> = {
        let pools = pools().read().unwrap_or_else(PoisonError::into_inner);
        pools.keys().cloned().collect()
    };
    let installed = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let most_typos = if name.chars().count() > 4 { 2 } else { 1 };
    let meant = names.iter().find(|known| strsim::osa_distance(known, name) <= most_typos);
    let mut remedy = if name == DEFAULT {
        "add `lock_runtime::init(\"redis://127.0.0.1:6379\").await?;` to `main`, or `\"memory://\"` for locks of one process; a test has its own with `testing::with_pool`".to_owned()
    } else {
        format!(
            "add `lock_runtime::install(\"{name}\", LockPool::connect(url).await?)?;` to `main`; a test has its own with `testing::with_pool`"
        )
    };
    if let Some(meant) = meant {
        remedy = format!("did you mean `{meant}`? otherwise {remedy}");
    }
    if !installed.is_empty() {
        remedy += &format!(" (installed: {installed})");
    }
    LockError::new(ErrorKind::PoolNotFound, "no lock pool is installed")
        .in_pool(&name.into())
        .remedy(remedy)
}
