#![deny(warnings, clippy::pedantic)]
#![allow(dead_code)]

use std::time::Duration;

use lock_runtime::{LockError, LockPool, distributed_lock};

async fn fallback(id: u64, live: bool) -> Result<u64, LockError> {
    std::future::ready(Ok(id + u64::from(live))).await
}

fn pool() -> LockPool {
    unimplemented!()
}

#[distributed_lock(
    key = "order:<id>",
    ttl = "1m30s",
    wait = "forever",
    renew = "10s",
    max_hold = "10m",
    min_hold = "250ms",
    lock_delay = "2s",
    on_conflict = fallback,
    on_lost = "notify",
    release = "background",
    on_error = |error: LockError| Err(error),
    pool = "orders",
    guard = lock,
    reentrant = false,
    retry_delay = "100ms",
    retry_count = 10,
    name = "settle"
)]
async fn constants(id: u64, live: bool) -> Result<u64, LockError> {
    Ok(id + u64::from(lock.is_held()) + u64::from(live))
}

#[distributed_lock(
    key = format!("order:{id}"),
    ttl = Duration::from_secs(id),
    wait = if live { Duration::ZERO } else { Duration::from_secs(1) },
    renew = live,
    max_hold = Duration::from_secs(id * 2),
    min_hold = Duration::ZERO,
    lock_delay = Duration::ZERO,
    linger = Duration::ZERO,
    pool = pool(),
    when = live && id > 3,
    retry_delay = Duration::from_millis(id),
    retry_count = u32::try_from(id).unwrap_or(1),
)]
async fn expressions(id: u64, live: bool) -> Result<u64, LockError> {
    Ok(id + u64::from(live))
}

#[distributed_lock(
    key = "a",
    wait = "0s",
    renew = false,
    ttl = "7d",
    on_lost = "cancel",
    release = "await",
    on_conflict = "error"
)]
async fn others() -> Result<(), LockError> {
    Ok(())
}

#[distributed_lock(
    key = "order:<id>",
    ttl = "5s",
    wait = "1s",
    renew = true,
    on_lost = "notify",
    guard = lock,
    min_hold = "0s",
    lock_delay = "0s",
    reentrant = true,
    retry_count = 10
)]
async fn passes_through(id: u64) -> Result<u64, LockError> {
    Ok(id + u64::from(lock.is_held()))
}

#[rustfmt::skip]
#[distributed_lock(key = ("order:<id>"), ttl = ("5s"), when = (id > 1))]
async fn parentheses(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "order:<id>", on_lost = "notify")]
async fn notifies_by_the_event_alone(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

#[distributed_lock(key = "partition:<id>", ttl = "5s", linger = "50ms")]
async fn lingers(id: u64) -> Result<u64, LockError> {
    Ok(id)
}

fn main() {}
