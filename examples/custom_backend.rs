//! A custom store is one type, here a table in memory. It passes the same conformance suite as the built-in stores,
//! and then keeps the locks of a pool.
//!
//! ```text
//! cargo add lock-runtime --dev --features testing     # in another program: the suite is for its tests
//! cargo run --example custom_backend
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_runtime::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, LeaseRef, LeaseStatus, Owner,
    ReleaseOutcome, ReleaseRequest, Warning,
};
use lock_runtime::{Fence, Key, LockPool, distributed_lock, testing};
use tokio::time::Instant;

/// Clones are connections to the same table.
#[derive(Clone, Default)]
struct Table(Arc<Mutex<Rows>>);

#[derive(Default)]
struct Rows {
    /// A row without a release stays until its key is requested again. A store with many keys deletes expired rows.
    by_key: HashMap<Key, Row>,
    last_fence: u64,
}

struct Row {
    owner: Owner,
    expires: Instant,
}

impl Rows {
    fn holder(&self, key: &Key) -> Option<&Row> {
        self.by_key.get(key).filter(|row| row.expires > now())
    }

    fn attempt(&mut self, claim: &AcquireRequest) -> AcquireOutcome {
        let others = claim
            .keys
            .iter()
            .filter_map(|key| self.holder(key))
            .filter(|row| row.owner != claim.owner);
        if let Some(expires) = others.map(|row| row.expires).max() {
            return AcquireOutcome::contended(Some(expires - now()));
        }
        // Never shortens the lease: this may be a late request with a shorter ttl.
        let left =
            claim.keys.iter().filter_map(|key| self.holder(key)).map(|row| row.expires - now());
        let span = left.max().unwrap_or_default().max(claim.kept_for());
        self.take(&claim.keys, claim.owner, span);
        // Not below the clock: the table is empty after a restart, and a database may have seen greater fences.
        self.last_fence = (self.last_fence + 1).max(wall_micros());
        AcquireOutcome::acquired(claim.fencing.then_some(Fence::new(self.last_fence)))
    }

    fn held(&self, lease: &LeaseRef) -> LeaseStatus {
        let is_held = |key| self.holder(key).is_some_and(|row| row.owner == lease.owner);
        if lease.keys.iter().all(is_held) { LeaseStatus::Held } else { LeaseStatus::NotHeld }
    }

    fn take(&mut self, keys: &[Key], owner: Owner, span: Duration) {
        for key in keys {
            self.by_key.insert(key.clone(), Row { owner, expires: now() + span });
        }
    }
}

#[allow(clippy::disallowed_methods)]
fn now() -> Instant {
    Instant::now()
}

fn wall_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

impl Backend for Table {
    // One attempt per request; waiting, retries and time limits are up to the pool.
    async fn acquire(
        &self,
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let mut rows = self.0.lock().unwrap();
        claims.iter().map(|claim| Ok(rows.attempt(claim))).collect()
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let mut rows = self.0.lock().unwrap();
        let mut renew = |lease: &LeaseRef| {
            let held = rows.held(lease);
            if held == LeaseStatus::Held {
                rows.take(&lease.keys, lease.owner, lease.kept_for());
            }
            Ok(held)
        };
        leases.iter().map(&mut renew).collect()
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let mut rows = self.0.lock().unwrap();
        let mut release = |ReleaseRequest { lease, free_after, .. }: &ReleaseRequest| {
            let held = rows.held(lease);
            for key in lease.keys.iter() {
                // What has expired is not kept for longer.
                let is_own = rows.holder(key).is_some_and(|row| row.owner == lease.owner);
                match rows.by_key.get_mut(key) {
                    Some(row) if is_own && !free_after.is_zero() => {
                        row.expires = now() + *free_after;
                    }
                    Some(_) if is_own => drop(rows.by_key.remove(key)),
                    _ => {}
                }
            }
            Ok(if held == LeaseStatus::Held {
                ReleaseOutcome::Freed
            } else {
                ReleaseOutcome::NotHeld
            })
        };
        releases.iter().map(&mut release).collect()
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        Ok(self.0.lock().unwrap().held(lease))
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        Ok(Vec::new())
    }
}

#[distributed_lock(key = "report:<day>", pool = "table", guard = lock)]
async fn report(day: u32) -> Result<Option<Fence>, lock_runtime::LockError> {
    Ok(lock.fence())
}

#[tokio::main]
async fn main() -> Result<(), lock_runtime::LockError> {
    let table = Table::default();
    testing::conformance(table.clone(), table.clone()).await;
    println!("the table passes the suite");

    let pool = LockPool::with_backend(table).connect().await?;
    lock_runtime::install("table", pool)?;
    let fence = report(1).await;
    lock_runtime::shutdown(Duration::from_secs(1)).await;
    println!("day 1 was reported under fence {:?}", fence?);
    Ok(())
}
