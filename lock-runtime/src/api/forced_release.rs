//! Releases of locks that other owners hold.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::api::pool::LockPool;
use crate::backend::{BackendError, FailureKind, ReleaseOutcome, ReleaseRequest};
use crate::base::error::{ErrorKind, LockError};
use crate::base::inspection::LockHolder;
use crate::base::key::Key;
use crate::base::loss::Loss;
use crate::base::options::ReleaseMode;
use crate::base::owner::Owner;
use crate::exec::events;
use crate::lease::held_lease::EndsHolds;
use crate::lock::core::PoolCore;

impl LockPool {
    /// Takes the lock of `key` from `holder`, as shown by [`inspect`](Self::inspect), for a holder that hangs. Returns
    /// whether the lock was that holder's. The result is `false` if the lock is free by now, or if another owner holds it;
    /// that owner keeps it.
    ///
    /// The next owner in the wait queue is granted the lock immediately, with a greater fence. The former holder learns of
    /// the release by its next renewal, or by a notification where the store sends one. A holder in this pool learns of it
    /// immediately. The lease is then lost, and its body is cancelled. Until then both run, and only [fences](crate::Fence)
    /// keep late writes out. The former holder keeps its other keys until then.
    ///
    /// An owner is a grant to a process. Where the lock passes from task to task within the process, or lingers there, the
    /// affected task may have begun after [`inspect`](Self::inspect).
    ///
    /// Neither a `min_hold` nor a `lock_delay` keeps the key locked. With `redlock://` a lock without a fence stays locked
    /// until its ttl is over. A key that was released and is kept for its `min_hold` also stays locked until that time is
    /// over.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let pool = LockPool::connect("memory://").await?;
    /// let hangs = pool.lock("order:42").acquire().await?;
    /// if let Some(holder) = pool.inspect("order:42").await?.holder {
    ///     assert!(pool.force_release("order:42", &holder).await?);
    ///     let next = pool.lock("order:42").acquire().await?;
    ///     assert!(next.fence() > hangs.fence());
    ///     // The next holder is another one.
    ///     assert!(!pool.force_release("order:42", &holder).await?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The event `released by force` has the host and the process of this call, even if the call is dropped. The former
    /// holder learns neither: its event `lost` has the same `owner`, and the reason `taken`. A call that is dropped after
    /// its first poll may still release the lock.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the store does not answer within the pool's `request_timeout` (four times that on
    /// `redlock://`, `etcd://` and `zookeeper://`). The lock may have been released all the same. [`ErrorKind::Config`] if
    /// the holder is a client of another library, [`ErrorKind::InvalidKey`].
    pub async fn force_release(
        &self,
        key: impl Into<Key>,
        holder: &LockHolder,
    ) -> Result<bool, LockError> {
        self.force_release_for(None, &key.into(), holder).await
    }

    /// [`force_release`](Self::force_release) on behalf of `operator`, the name of a user or a program. The event has it in
    /// `by`, for example `alice at web-7/4711`. The name stays in this process. A call that is dropped after its first poll may
    /// still release the lock.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// # let pool = LockPool::connect("memory://").await?;
    /// # let hangs = pool.lock("order:42").acquire().await?;
    /// if let Some(holder) = pool.inspect("order:42").await?.holder {
    ///     assert!(pool.force_release_by("alice", "order:42", &holder).await?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Same as [`force_release`](Self::force_release).
    pub async fn force_release_by(
        &self,
        operator: &str,
        key: impl Into<Key>,
        holder: &LockHolder,
    ) -> Result<bool, LockError> {
        self.force_release_for(Some(operator), &key.into(), holder).await
    }

    async fn force_release_for(
        &self,
        operator: Option<&str>,
        key: &Key,
        holder: &LockHolder,
    ) -> Result<bool, LockError> {
        let released = self.released_by_force(operator, key, holder).await;
        released.map_err(|error| self.locate(error, key))
    }

    async fn released_by_force(
        &self,
        operator: Option<&str>,
        key: &Key,
        holder: &LockHolder,
    ) -> Result<bool, LockError> {
        let request = ReleaseRequest::by_force(self.stored_key(key)?, holder.clone());
        let request = request.ok_or_else(of_another_library)?;
        let (core, owner, token) = (self.core().clone(), holder.owner, request.lease.owner);
        let operator = operator.map(str::to_owned);
        let limit = core.store_call_timeout();
        // The caller may be gone before the answer, like a handler after its client disconnects. The event is sent all the
        // same.
        let releasing = async move {
            let requests = [request];
            let answer = timeout(limit, core.backend().release(&requests)).await;
            let answer = answer.ok().and_then(|mut answers| answers.pop());
            let released = answer
                .unwrap_or_else(|| Err(BackendError::unanswered()))
                .map(|outcome| outcome != ReleaseOutcome::NotHeld);
            let is_refused = |error: &BackendError| {
                matches!(error.kind(), FailureKind::NotApplied | FailureKind::Rejected)
            };
            let may_be_released = !released.as_ref().is_err_and(is_refused);
            if let Some(owner) = owner.filter(|_| may_be_released) {
                let was_held = released.as_ref().ok().copied();
                events::released_by_force(core.name(), owner, was_held, operator);
            }
            if let Ok(true) = released {
                lose_holds_of(&core, token).await;
            }
            released
        };
        self.core().driver().run(releasing).await?.map_err(LockError::backend)
    }
}

/// Ends the holds of `owner` in this pool, which do not wait for their next renewal.
async fn lose_holds_of(core: &Arc<PoolCore>, owner: Owner) {
    loop {
        let mut leases = core.tracker.leases();
        leases.retain(|lease| lease.owner == owner);
        for lease in &leases {
            if lease.lose(Loss::Taken) && lease.withdraw_if_unclaimed() {
                drop(core.clone().end_hold(lease, ReleaseMode::Background));
            }
        }
        // A hand-off has yet to put the next lease in its place.
        if !leases.iter().any(|lease| lease.is_transferred()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[cold]
fn of_another_library() -> LockError {
    let cause = "the store does not report the whole owner token of this holder: it is a client of another library, or of a custom store";
    LockError::new(ErrorKind::Config, cause)
        .remedy("end the holder, or delete its lock with the tools of its library or of the store")
}
