//! Changes of the locks in a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::api::pool::LockPool;
use crate::backend::KeyPattern;
use crate::lock::core::PoolCore;

/// After a watch that has ended.
const PAUSE: Duration = Duration::from_secs(1);

/// Reports that locks in the store may have changed, from [`LockPool::changes`]. Dropping it ends the watch, and so does the
/// shutdown of the pool.
pub struct LockChanges {
    core: Arc<PoolCore>,
    seen: watch::Receiver<WatchState>,
    /// `None` in a process that was forked from the pool's.
    task: Option<AbortHandle>,
}

/// Each change of this value is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatchState {
    /// The store does not report changes, or not yet, or not now.
    Silent,
    Reporting,
}

impl LockPool {
    /// Watches the store for changes of locks with keys that match `pattern`, in this process and in others, as for
    /// [`list`](Self::list). It is for programs that show locks: read them, show them, wait for
    /// [`changed`](LockChanges::changed) or a timeout, and repeat.
    ///
    /// Redis and etcd report changes. Redis reports those of all keys that begin like the pattern, on a separate
    /// connection. The other stores do not, nor does a quorum. In a Redis Cluster, and behind a proxy that checks slots, a
    /// waiter that comes or goes is not reported. There the name of a wait queue begins with a hash tag, not with the key.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # use std::time::Duration;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// let pool = LockPool::connect("memory://").await?;
    /// let mut changes = pool.changes("order:*");
    /// for _ in 0..2 {
    ///     println!("{:?}", pool.list("order:*", 100).await?.keys);
    ///     // Also in a store that does not report changes.
    ///     let _ = tokio::time::timeout(Duration::from_millis(50), changes.changed()).await;
    /// }
    /// assert!(!changes.is_reporting());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The first request is sent in the background. A watch that ends with its connection or its store begins again.
    pub fn changes(&self, pattern: &str) -> LockChanges {
        let core = self.core().clone();
        let (reported, seen) = watch::channel(WatchState::Silent);
        let task = (!core.is_inherited()).then(|| {
            let pattern = KeyPattern::new(&*core.config.key_prefix, pattern);
            let of_task = core.clone();
            core.driver().spawn_abortable(async move {
                tokio::select! {
                    () = report(&of_task, &pattern, &reported) => {}
                    () = of_task.tracker.closed() => {}
                }
            })
        });
        LockChanges { core, seen, task }
    }
}

/// Watches again and again, until the store does not report changes at all.
async fn report(core: &PoolCore, pattern: &KeyPattern, reported: &watch::Sender<WatchState>) {
    let changed = || {
        reported.send_replace(WatchState::Reporting);
    };
    while core.backend().watch(pattern, &changed).await.is_err() {
        if *reported.borrow() == WatchState::Reporting {
            // Changes may have been missed from now on.
            reported.send_replace(WatchState::Silent);
        }
        core.clock().sleep_until(core.clock().now() + PAUSE).await;
    }
}

impl LockChanges {
    /// Waits until locks that match may have changed since the last call, and once when the watch has begun or ended. With
    /// a store that does not report changes, it never returns.
    ///
    /// Cancel safe.
    pub async fn changed(&mut self) {
        if self.seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether the store currently reports changes. If not, read the locks at intervals.
    #[must_use]
    pub fn is_reporting(&self) -> bool {
        // The task drops the sender when the watch is over.
        self.seen.has_changed().is_ok() && *self.seen.borrow() == WatchState::Reporting
    }
}

impl Drop for LockChanges {
    fn drop(&mut self) {
        // The runtime belongs to the parent process.
        if let Some(task) = self.task.as_ref().filter(|_| !self.core.is_inherited()) {
            task.abort();
        }
    }
}

impl fmt::Debug for LockChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockChanges").field("is_reporting", &self.is_reporting()).finish()
    }
}
