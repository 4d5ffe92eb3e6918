//! Acquires that are dropped at each of their polls.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use lock_runtime::{LockError, LockPool, distributed_lock};

use crate::eventually_async;
use crate::poll::drop_at_every_poll;
use crate::prelude::*;

/// The key of all but requests for several.
pub const KEY: &str = "order:7";
/// Of the dropped acquires. No test waits as long, so that no ttl hides a leftover.
pub const TTL: Duration = ms(20_000);
/// Of the dropped acquires: a leftover lease would be renewed. A lease that is given back at once is not, even on a busy
/// machine.
pub const RENEW: Duration = ms(800);
/// What a busy machine may add to an immediate effect.
pub const PROMPT: Duration = ms(10_000);

/// Looks at the store.
type FindHolder = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Two pools on one store.
pub struct Rivals {
    /// The pool of the dropped acquires.
    pub ours: LockPool,
    /// Stands for another process.
    pub theirs: LockPool,
    holder: Box<FindHolder>,
}

impl fmt::Debug for Rivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rivals").field("ours", &self.ours).finish_non_exhaustive()
    }
}

impl Rivals {
    /// Pools on the store at `url`. `holder` says what the store keeps of the owner of a key.
    ///
    /// # Panics
    ///
    /// When the store is not connected.
    pub async fn new(
        url: &str,
        holder: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let ours = LockPool::connect(url).await.unwrap();
        let theirs = LockPool::connect(url).await.unwrap();
        Self { ours, theirs, holder: Box::new(holder) }
    }

    /// What the store keeps of the owner of `key`. `None` if it is free.
    pub fn holder(&self, key: &str) -> Option<String> {
        (self.holder)(key)
    }

    /// Each pool can acquire `key`: neither the store nor the wait queue of the pool blocks it.
    ///
    /// # Panics
    ///
    /// When one of them cannot, or when the key stays.
    pub async fn all_can_acquire(&self, key: &str) {
        for pool in [&self.ours, &self.theirs, &self.ours] {
            let guard = pool.lock(key).wait(PROMPT).acquire().await;
            // With a short request timeout the answer may come too late. The release goes on.
            if let Err(error) = guard.unwrap().release().await {
                assert!(error.is_backend(), "{error}");
            }
        }
        eventually_async(PROMPT, "the key is free", async || self.holder(key).is_none()).await;
    }
}

/// The future that is dropped.
#[derive(Clone, Copy, Debug)]
pub enum DroppedCall {
    /// `acquire`.
    Acquire,
    /// `try_acquire`.
    TryAcquire,
    /// `run`.
    Run,
    /// An annotated function.
    Attribute,
}

#[distributed_lock(key = "order:<id>", ttl = "20s", renew = "800ms", wait = "300ms", pool = pool)]
async fn annotated(pool: LockPool, id: u32) -> Result<(), LockError> {
    tokio::task::yield_now().await;
    Ok(())
}

impl DroppedCall {
    /// The call, of [`KEY`].
    pub fn of(self, pool: &LockPool) -> Pin<Box<dyn Future<Output = ()>>> {
        let request = pool.lock(KEY).ttl(TTL).renew(RENEW).wait(ms(300));
        let pool = pool.clone();
        Box::pin(async move {
            match self {
                Self::Acquire => drop(request.acquire().await),
                Self::TryAcquire => drop(request.try_acquire().await),
                Self::Run => drop(request.run(tokio::task::yield_now()).await),
                Self::Attribute => drop(annotated(pool, 7).await),
            }
        })
    }
}

/// Nothing holds the key.
///
/// # Panics
///
/// When a dropped call leaves something behind, as in all functions below.
pub async fn while_the_key_is_free(rivals: &Rivals, call: DroppedCall) {
    drop_at_every_poll(
        || call.of(&rivals.ours),
        async |_| {
            let free = async || rivals.holder(KEY).is_none();
            eventually_async(PROMPT, "the key is free", free).await;
            rivals.all_can_acquire(KEY).await;
        },
    )
    .await;
}

/// The store has it for another pool.
///
/// # Panics
///
/// As above.
pub async fn while_another_pool_holds_it(rivals: &Rivals, call: DroppedCall) {
    behind(rivals, &rivals.theirs, call).await;
}

/// A task of the same pool holds it.
///
/// # Panics
///
/// As above.
pub async fn behind_a_local_task(rivals: &Rivals, call: DroppedCall) {
    behind(rivals, &rivals.ours, call).await;
}

async fn behind(rivals: &Rivals, holder: &LockPool, call: DroppedCall) {
    let take = async || holder.lock(KEY).wait(PROMPT).acquire().await.unwrap();
    let held = RefCell::new(Some(take().await));
    drop_at_every_poll(
        || call.of(&rivals.ours),
        async |_| {
            let before = rivals.holder(KEY);
            let guard = held.take().unwrap();
            guard.verify().await.unwrap();
            assert_eq!(rivals.holder(KEY), before, "nothing of the holder's was touched");
            guard.release().await.unwrap();
            rivals.all_can_acquire(KEY).await;
            held.replace(Some(take().await));
        },
    )
    .await;
    drop(held.take());
}

/// Of three keys, this pool holds the second one at first.
///
/// # Panics
///
/// As above.
pub async fn of_several_keys_behind(rivals: &Rivals, holder: &LockPool) {
    let middle = holder.lock("b").acquire().await.unwrap();
    let owner = rivals.holder("b");
    let all =
        || rivals.ours.lock_all(["c", "a", "b"]).ttl(TTL).renew(RENEW).wait(ms(300)).acquire();
    drop_at_every_poll(all, async |_| {
        rivals.all_can_acquire("a").await;
        rivals.all_can_acquire("c").await;
        assert_eq!(rivals.holder("b"), owner);
    })
    .await;
    middle.release().await.unwrap();
    rivals.all_can_acquire("b").await;
    // Without another holder, the same acquire completes.
    drop_at_every_poll(all, async |_| rivals.all_can_acquire("b").await).await;
    rivals.all_can_acquire("a").await;
}
