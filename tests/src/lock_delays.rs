//! What a `lock_delay` does on every store.

use std::time::{Duration, Instant};

use lock_runtime::testing::{Fault, FaultyBackend, open_backend};
use lock_runtime::{LockGuard, LockPool, LockRequest, Wait};

use crate::eventually_async;
use crate::prelude::*;

const TTL: Duration = ms(2_000);
const DELAY: Duration = ms(6_000);

/// Checks on the store at `url` that a lost lock is granted `lock_delay` later than it would be without, and a released
/// one at once.
///
/// # Panics
///
/// When the store grants it otherwise.
pub async fn delay_the_next_grant(url: &str) {
    let (backend, faults) = FaultyBackend::new(open_backend(url).await.unwrap());
    let builder = LockPool::with_backend(backend).ttl(TTL).wait(Wait::Forever);
    let (pool, other) = (builder.connect().await.unwrap(), patient(url, TTL).await);
    a_release_frees_at_once(&pool, &other).await;

    let limited =
        Held::by(&pool, "delayed:limited", |it| it.lock_delay(DELAY).max_hold(ms(200))).await;
    eventually_async(DEADLINE, "the limit is over", async || !limited.guard.is_held()).await;
    // Its release is sent, and frees nothing.
    let limited_began = limited.began;
    assert!(limited.guard.release().await.unwrap_err().is_lost());

    let silent = Held::by(&pool, "delayed:silent", |it| it.lock_delay(DELAY)).await;
    let plain = Held::by(&pool, "delayed:plain", |it| it).await;
    // As from a process that has died.
    faults.always(Fault::LoseRequest);
    let waiting = ["delayed:limited", "delayed:silent", "delayed:plain"]
        .map(|key| acquire_in_task(&other, key));
    let [limited_next, silent_next, plain_next] = waiting;
    let (plain_at, next) = joined("without a delay", plain_next).await;
    next.release().await.unwrap();
    assert!(!plain.guard.is_held());
    for (began, waiting) in [(limited_began, limited_next), (silent.began, silent_next)] {
        let (at, next) = joined("behind the delay", waiting).await;
        let lasted = at - began + ms(5);
        assert!(lasted >= TTL + DELAY, "granted {lasted:?} after the request of the lost lock");
        assert!(at > plain_at, "the delay changes nothing");
        next.release().await.unwrap();
    }
    assert!(!silent.guard.is_held());
    faults.always(Fault::None);
}

async fn a_release_frees_at_once(pool: &LockPool, other: &LockPool) {
    let delay = ms(20_000);
    let held = Held::by(pool, "delayed:released", |it| it.lock_delay(delay)).await;
    let released = release(held.guard).await;
    let (at, next) = joined("the next", acquire_in_task(other, "delayed:released")).await;
    assert!(at - released < delay / 2, "granted {:?} behind a release", at - released);
    next.release().await.unwrap();
}

struct Held {
    guard: LockGuard,
    /// Before its request.
    began: Instant,
}

impl Held {
    async fn by(pool: &LockPool, key: &str, with: impl FnOnce(LockRequest) -> LockRequest) -> Self {
        let began = Instant::now();
        Self { guard: with(pool.lock(key)).acquire().await.unwrap(), began }
    }
}
