//! Reads of one key from the store, and of all locks of this process.

use std::sync::Arc;

use crate::api::pool::LockPool;
use crate::base::error::{ErrorKind, LockError};
use crate::base::inspection::Inspection;
use crate::base::key::Key;
use crate::base::lock_name::LockName;
use crate::lock::snapshot::{Snapshot, snapshot};

impl LockPool {
    /// Reads from the store which owner holds `key`, and which owners wait for it: owners in this process, in others, and
    /// clients of other libraries. Nothing is changed, extended or notified.
    ///
    /// The answer is slightly old when it arrives. It is for operators and dashboards, and no basis for a decision about
    /// the key.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let url = "memory://";
    /// let pool = LockPool::connect(url).await?;
    /// let guard = pool.lock("order:42").acquire().await?;
    /// let holder = pool.inspect("order:42").await?.holder.expect("it is held");
    /// assert_eq!(holder.fence, guard.fence());
    /// println!("held by {:?}, for at most {:?} more", holder.owner, holder.expires_in);
    /// guard.release().await?;
    /// assert!(pool.inspect("order:42").await?.is_free());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Cancel safe. Sends one request, or a few.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the store does not answer within the pool's `request_timeout`, [`ErrorKind::Config`] if a
    /// custom store does not implement [`inspect`](crate::backend::Backend::inspect), [`ErrorKind::InvalidKey`].
    pub async fn inspect(&self, key: impl Into<Key>) -> Result<Inspection, LockError> {
        let key: Key = key.into();
        let stored = self.stored_key(&key).map_err(|error| self.locate(error, &key))?;
        let core = self.core().clone();
        let limit = core.store_call_timeout();
        let answer =
            self.core().ask(limit, async move { core.backend().inspect(&stored).await }).await;
        let shown = answer.and_then(|shown| shown.ok_or_else(not_supported));
        shown.map_err(|error| self.locate(error, &key))
    }

    /// The key as the store knows it, or why there is none.
    pub(crate) fn stored_key(&self, key: &Key) -> Result<Key, LockError> {
        let core = self.core();
        if core.is_inherited() {
            return Err(LockError::inherited());
        }
        let prefix = &core.config.key_prefix;
        let key = key.clone().checked()?.shortened_for(prefix);
        key.check_reserved_text(prefix)?;
        Ok(key.prefixed(prefix))
    }

    /// The error with its key and its pool.
    pub(crate) fn locate(&self, error: LockError, key: &Key) -> LockError {
        let keys: Arc<[Key]> = [key.clone()].into();
        error.at(LockName::Key(key.clone())).of_keys(&keys).in_pool(self.core().name())
    }

    /// The locks that this process holds in this pool, and the keys that its tasks wait for.
    ///
    /// Sends nothing, and delays neither renewals nor acquires: 10,000 held locks take a few milliseconds. It has the locks
    /// of this pool only; [`pool`](crate::pool()) finds the other pools.
    ///
    /// In a process that was forked from the pool's process, it is empty.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let pool = LockPool::connect("memory://").await?;
    /// let guard = pool.lock("order:42").acquire().await?;
    /// for lock in pool.snapshot().held {
    ///     println!("{:?} for {:?}, valid for {:?}", lock.keys, lock.held_for, lock.valid_for);
    /// }
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        snapshot(self.core())
    }
}

#[cold]
fn not_supported() -> LockError {
    LockError::new(ErrorKind::Config, "this store does not report which owner holds a lock")
        .remedy("implement `Backend::inspect` for it; `snapshot()` shows the locks of this process")
}
