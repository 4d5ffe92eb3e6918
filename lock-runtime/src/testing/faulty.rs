//! A backend that fails on demand.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, Finding,
    Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome,
    ReleaseRequest, Warning,
};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::mutex::{Mutex, MutexGuard};

/// The fault that a call to the store meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No fault.
    None,
    /// The request is lost: it is not served and not answered.
    LoseRequest,
    /// The request is served, and its reply is lost.
    LoseReply,
    /// The request arrives late, even if it is given up meanwhile.
    DelayRequest(Duration),
    /// The request is served immediately, and its reply arrives late.
    DelayReply(Duration),
    /// The request is not served and fails with this kind.
    Fail(FailureKind),
}

/// A kind of call to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// [`Backend::acquire`].
    Acquire,
    /// [`Backend::renew`].
    Renew,
    /// [`Backend::release`].
    Release,
}

/// Plans the faults of a [`FaultyBackend`] and counts the calls to it. Clones share one plan.
///
/// A call has one request or several: the requests of tasks that call at the same time share one. All of them meet its fault.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan(Arc<Mutex<PlanState>>);

#[derive(Debug, Default)]
struct PlanState {
    planned: VecDeque<(Operation, Fault)>,
    always: Option<Fault>,
    acquires: usize,
    renews: usize,
    releases: usize,
}

impl FaultPlan {
    /// Plans `fault` for the next `operation` without a planned fault.
    pub fn plan(&self, operation: Operation, fault: Fault) {
        self.lock().planned.push_back((operation, fault));
    }

    /// From now on, every call without a planned fault meets `fault`. This includes reads, such as those of `verify()`,
    /// `health()` and `check()`.
    pub fn always(&self, fault: Fault) {
        self.lock().always = Some(fault);
    }

    /// The number of calls of this kind so far.
    #[must_use]
    pub fn count(&self, operation: Operation) -> usize {
        let plan = self.lock();
        match operation {
            Operation::Acquire => plan.acquires,
            Operation::Renew => plan.renews,
            Operation::Release => plan.releases,
        }
    }

    fn next(&self, operation: Operation) -> Fault {
        let mut plan = self.lock();
        match operation {
            Operation::Acquire => plan.acquires += 1,
            Operation::Renew => plan.renews += 1,
            Operation::Release => plan.releases += 1,
        }
        let planned = plan.planned.iter().position(|(planned, _)| *planned == operation);
        let planned = planned.and_then(|at| plan.planned.remove(at)).map(|(_, fault)| fault);
        planned.or(plan.always).unwrap_or(Fault::None)
    }

    /// The answer to a read, which meets the fault of all requests.
    async fn read<T: Send + 'static>(
        &self,
        serve: impl Future<Output = Result<T, BackendError>> + Send + 'static,
    ) -> Result<T, BackendError> {
        let fault = self.lock().always.unwrap_or(Fault::None);
        fault.meet(1, async move { vec![serve.await] }).await.remove(0)
    }

    fn lock(&self) -> MutexGuard<'_, PlanState> {
        self.0.lock()
    }
}

impl Fault {
    /// The answers to a request of `count` entries that meets this fault. `serve` is its call to the store.
    async fn meet<T: Send + 'static>(
        self,
        count: usize,
        serve: impl Future<Output = Vec<Result<T, BackendError>>> + Send + 'static,
    ) -> Vec<Result<T, BackendError>> {
        let fail = |kind, text: &str| {
            let error = BackendError::new(kind, text);
            (0..count).map(|_| Err(error.clone())).collect()
        };
        match self {
            Self::None => serve.await,
            Self::LoseRequest => pending().await,
            Self::LoseReply => {
                serve.await;
                pending().await
            }
            Self::DelayRequest(delay) => {
                // As on a network, the request arrives even if the future is dropped meanwhile.
                let late = tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    serve.await
                });
                let stopped = |_| fail(FailureKind::MaybeApplied, "the runtime has ended");
                late.await.unwrap_or_else(stopped)
            }
            Self::DelayReply(delay) => {
                let answers = serve.await;
                tokio::time::sleep(delay).await;
                answers
            }
            Self::Fail(kind) => fail(kind, "a planned failure"),
        }
    }
}

/// A backend with the faults of a [`FaultPlan`].
#[derive(Debug)]
pub struct FaultyBackend<B> {
    backend: Arc<B>,
    faults: FaultPlan,
}

impl<B: Backend> FaultyBackend<B> {
    /// Wraps `backend`. Without entries in the returned [`FaultPlan`] there are no faults.
    pub fn new(backend: B) -> (Self, FaultPlan) {
        let faults = FaultPlan::default();
        (Self { backend: Arc::new(backend), faults: faults.clone() }, faults)
    }
}

impl<B: Backend> Backend for FaultyBackend<B> {
    fn subscribe(&self, notifier: Notifier) {
        self.backend.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let (backend, all) = (self.backend.clone(), requests.to_vec());
        let serve = async move { backend.acquire(&all).await };
        self.faults.next(Operation::Acquire).meet(requests.len(), serve).await
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let (backend, all) = (self.backend.clone(), leases.to_vec());
        let serve = async move { backend.renew(&all).await };
        self.faults.next(Operation::Renew).meet(leases.len(), serve).await
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let (backend, all) = (self.backend.clone(), releases.to_vec());
        let serve = async move { backend.release(&all).await };
        self.faults.next(Operation::Release).meet(releases.len(), serve).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        let (backend, lease) = (self.backend.clone(), lease.clone());
        self.faults.read(async move { backend.is_held(&lease).await }).await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let (backend, key) = (self.backend.clone(), key.clone());
        self.faults.read(async move { backend.inspect(&key).await }).await
    }

    fn capabilities(&self) -> Capabilities {
        // A local call would meet its faults on the thread of the caller.
        let mut capabilities = self.backend.capabilities();
        capabilities.local = false;
        capabilities
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        let (backend, pattern) = (self.backend.clone(), pattern.clone());
        self.faults.read(async move { backend.list(&pattern, limit).await }).await
    }

    async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        self.backend.watch(pattern, changed).await
    }

    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String> {
        self.backend.pin_sql(keys, fence)
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        let backend = self.backend.clone();
        self.faults.read(async move { backend.health().await }).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let backend = self.backend.clone();
        self.faults.read(async move { backend.diagnose().await }).await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        let backend = self.backend.clone();
        self.faults.read(async move { backend.probe().await }).await
    }

    async fn close(&self) {
        self.backend.close().await;
    }
}
