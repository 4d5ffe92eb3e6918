//! Pools by name, for annotated functions.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use crate::api::pool::LockPool;
use crate::base::error::{ErrorKind, LockError};
use crate::base::process::OfProcess;
use crate::exec::driver::Driver;
use crate::exec::panic_boundary;
use crate::lock::shutdown::ShutdownReport;

pub(crate) const DEFAULT: &str = "default";

static POOLS: OfProcess<RwLock<HashMap<String, LockPool>>> = OfProcess::new();

fn pools() -> &'static RwLock<HashMap<String, LockPool>> {
    POOLS.get_or_init(RwLock::default)
}

/// Connects to the store at `url` and installs the pool as `"default"`, the pool of all annotated functions that name no
/// other. See [`LockPool::connect`] for the URLs.
///
/// # Errors
/// [`ErrorKind::Config`] if there is a default pool already, or the URL is invalid. [`ErrorKind::Backend`] if the store is
/// unreachable or refuses.
pub async fn init(url: &str) -> Result<LockPool, LockError> {
    refuse_second(DEFAULT)?;
    let pool = LockPool::connect(url).await.map_err(|error| error.in_pool(&DEFAULT.into()))?;
    install(DEFAULT, pool.clone())?;
    Ok(pool)
}

/// As [`init`], with the URL from the environment variable `LOCK_URL`.
///
/// # Errors
/// As [`init`], and [`ErrorKind::Config`] if the variable is not set.
pub async fn init_from_env() -> Result<LockPool, LockError> {
    let url = std::env::var("LOCK_URL").map_err(|_| {
        LockError::new(ErrorKind::Config, "the environment variable LOCK_URL is not set")
            .remedy("set it to the store's URL, for example `redis://127.0.0.1:6379`, or to `memory://` for one process")
    })?;
    init(&url).await
}

/// Installs `pool` under `name`, for `#[distributed_lock(pool = "name", ..)]`.
///
/// # Errors
/// [`ErrorKind::Config`] if the name is taken by a pool that has not been shut down.
pub fn install(name: &str, pool: LockPool) -> Result<(), LockError> {
    let mut pools = pools().write().unwrap_or_else(PoisonError::into_inner);
    if pools.get(name).is_some_and(|present| !present.core().tracker.is_closed()) {
        return Err(taken(name));
    }
    pool.core().set_name(name);
    pools.insert(name.to_owned(), pool);
    Ok(())
}

/// The pool that is installed under `name`.
#[must_use]
pub fn pool(name: &str) -> Option<LockPool> {
    pools().read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
}

/// Shuts down all installed pools at once; see [`LockPool::shutdown`]. Later calls of annotated functions get
/// [`ErrorKind::PoolClosed`], until another pool is installed.
pub async fn shutdown(grace: Duration) -> ShutdownReport {
    let pools: Vec<_> =
        pools().read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
    let closing: Vec<_> = pools
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

/// Waits for SIGTERM or SIGINT (Ctrl-C elsewhere), then shuts down all installed pools.
///
/// Await it beside the program's work, or pass it to a server's graceful shutdown. From the first poll on, the signals no
/// longer end the process by themselves.
///
/// # Errors
/// [`ErrorKind::Config`] if the signal handlers cannot be installed.
pub async fn shutdown_on_signal(grace: Duration) -> Result<ShutdownReport, LockError> {
    let driver = Driver::background()?;
    let listening = {
        let _context = driver.enter();
        listen()
    };
    let signal = listening.map_err(|error| {
        LockError::new(ErrorKind::Config, format!("signals cannot be listened to: {error}"))
    })?;
    driver.run(signal).await?;
    Ok(shutdown(grace).await)
}

/// Registers for the signals; the future resolves at the first of them.
#[cfg(unix)]
fn listen() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn listen() -> std::io::Result<impl Future<Output = ()> + Send + 'static> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}

/// The pool of a call.
pub(crate) fn find(name: &str) -> Result<LockPool, LockError> {
    pool(name).ok_or_else(|| missing(name))
}

fn refuse_second(name: &str) -> Result<(), LockError> {
    match pool(name) {
        Some(present) if !present.core().tracker.is_closed() => Err(taken(name)),
        _ => Ok(()),
    }
}

#[cold]
fn taken(name: &str) -> LockError {
    LockError::new(ErrorKind::Config, "a pool is installed under this name already")
        .in_pool(&name.into())
        .remedy("call `init` once, in `main`; give further pools a name with `install`, or shut the first one down")
}

#[cold]
fn missing(name: &str) -> LockError {
    if POOLS.is_inherited() {
        return LockError::inherited().in_pool(&name.into());
    }
    let remedy = if name == DEFAULT {
        "add `lock_runtime::init(\"redis://127.0.0.1:6379\").await?;` to `main`, or `\"memory://\"` for locks of one process".to_owned()
    } else {
        format!(
            "add `lock_runtime::install(\"{name}\", LockPool::connect(url).await?)?;` to `main`"
        )
    };
    LockError::new(ErrorKind::PoolNotFound, "no lock pool is installed")
        .in_pool(&name.into())
        .remedy(remedy)
}
