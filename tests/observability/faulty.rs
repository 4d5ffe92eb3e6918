//! Pools with faults that a test plans.

use lock_runtime::LockPool;
use lock_runtime::testing::{FaultPlan, FaultyBackend, open_backend};

/// A pool in memory, installed under a name that selects its events and metrics.
pub(crate) async fn faulty_pool(name: &str) -> (LockPool, FaultPlan) {
    let (backend, faults) = FaultyBackend::new(open_backend("memory://").await.unwrap());
    let pool = LockPool::with_backend(backend).connect().await.unwrap();
    lock_runtime::install(name, pool.clone()).unwrap();
    (pool, faults)
}
