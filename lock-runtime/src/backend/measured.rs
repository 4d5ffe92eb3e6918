//! Measures the calls to a store.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::dyn_backend::{Boxed, DynBackend};
use super::{
    AcquireOutcome, AcquireRequest, BackendError, Capabilities, Finding, Inspection, KeyList,
    KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::clock::{Clock, Instant};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::measurement::{StoreOperation, StoreResult};
use crate::base::metrics::PoolMetrics;
use crate::exec::foreground::ForegroundPlace;

/// A store. Its calls are counted and timed.
pub(crate) struct MeasuredBackend {
    store: Arc<dyn DynBackend>,
    metrics: Arc<PoolMetrics>,
    clock: Clock,
}

/// One call. A call that is dropped before its answer counts as unanswered.
struct StoreCall<'a> {
    backend: &'a MeasuredBackend,
    operation: StoreOperation,
    result: StoreResult,
    began: Instant,
}

impl Drop for StoreCall<'_> {
    fn drop(&mut self) {
        let taken = self.backend.clock.now().since(self.began);
        self.backend.metrics.store_call(self.operation, self.result, taken);
    }
}

impl MeasuredBackend {
    /// A local store answers immediately, and is not measured.
    pub(crate) fn wrap(
        store: Arc<dyn DynBackend>,
        metrics: Arc<PoolMetrics>,
        clock: Clock,
    ) -> Arc<dyn DynBackend> {
        if store.capabilities().local {
            return store;
        }
        Arc::new(Self { store, metrics, clock })
    }

    /// Awaits `answer`. The call begins when the returned future is polled.
    fn measure<'a, T: Send + 'a>(
        &'a self,
        operation: StoreOperation,
        answer: Boxed<'a, T>,
        is_failed: fn(&T) -> bool,
    ) -> Boxed<'a, T> {
        if !self.metrics.measures_store() {
            return answer;
        }
        Box::pin(async move {
            let (began, result) = (self.clock.now(), StoreResult::Unanswered);
            let mut call = StoreCall { backend: self, operation, result, began };
            let answer = answer.await;
            let failed = is_failed(&answer);
            call.result = if failed { StoreResult::Failed } else { StoreResult::Answered };
            answer
        })
    }
}

fn any_failed<T>(outcomes: &[Result<T, BackendError>]) -> bool {
    outcomes.iter().any(Result::is_err)
}

impl DynBackend for MeasuredBackend {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn foreground(&self, caller: &Handle) -> Option<ForegroundPlace> {
        self.store.foreground(caller)
    }

    fn subscribe(&self, notifier: Notifier) {
        self.store.subscribe(notifier);
    }

    fn acquire<'a>(
        &'a self,
        requests: &'a [AcquireRequest],
    ) -> Boxed<'a, Vec<Result<AcquireOutcome, BackendError>>> {
        self.measure(StoreOperation::Acquire, self.store.acquire(requests), |outcomes| {
            any_failed(outcomes)
        })
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [LeaseRef],
    ) -> Boxed<'a, Vec<Result<LeaseStatus, BackendError>>> {
        self.measure(StoreOperation::Renew, self.store.renew(leases), |outcomes| {
            any_failed(outcomes)
        })
    }

    fn release<'a>(
        &'a self,
        requests: &'a [ReleaseRequest],
    ) -> Boxed<'a, Vec<Result<ReleaseOutcome, BackendError>>> {
        self.measure(StoreOperation::Release, self.store.release(requests), |outcomes| {
            any_failed(outcomes)
        })
    }

    fn is_held<'a>(&'a self, lease: &'a LeaseRef) -> Boxed<'a, Result<LeaseStatus, BackendError>> {
        self.measure(StoreOperation::IsHeld, self.store.is_held(lease), Result::is_err)
    }

    // For operators, and not part of a lock's life.
    fn inspect<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<Option<Inspection>, BackendError>> {
        self.store.inspect(key)
    }

    fn list<'a>(
        &'a self,
        pattern: &'a KeyPattern,
        limit: usize,
    ) -> Boxed<'a, Result<Option<KeyList>, BackendError>> {
        self.store.list(pattern, limit)
    }

    fn watch<'a>(
        &'a self,
        pattern: &'a KeyPattern,
        changed: &'a (dyn Fn() + Send + Sync),
    ) -> Boxed<'a, Result<(), BackendError>> {
        self.store.watch(pattern, changed)
    }

    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String> {
        self.store.pin_sql(keys, fence)
    }

    fn health(&self) -> Boxed<'_, Result<Vec<Warning>, BackendError>> {
        self.measure(StoreOperation::Health, self.store.health(), Result::is_err)
    }

    fn probe(&self) -> Boxed<'_, Result<(), BackendError>> {
        self.measure(StoreOperation::Probe, self.store.probe(), Result::is_err)
    }

    // For operators, too.
    fn diagnose(&self) -> Boxed<'_, Result<Vec<Finding>, BackendError>> {
        self.store.diagnose()
    }

    fn close(&self) -> Boxed<'_, ()> {
        self.store.close()
    }
}
