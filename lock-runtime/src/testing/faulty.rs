//! A backend that fails on demand.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, LeaseRef,
    LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, Warning,
};

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The request never arrives, and no reply comes.
    LoseRequest,
    /// The request is served, and its reply never comes.
    LoseReply,
    /// The request arrives late.
    DelayRequest(Duration),
    /// The request is served at once, and its reply comes late.
    DelayReply(Duration),
    /// The request is not served; the caller is told so.
    Fail(FailureKind),
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// [`Backend::acquire`].
    Acquire,
    /// [`Backend::renew`].
    Renew,
    /// [`Backend::release`].
    Release,
}

/// Decides what goes wrong with the requests of a [`FaultyBackend`] backend, and counts them.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan(Arc<Mutex<Plan>>);

#[derive(Debug, Default)]
struct Plan {
    planned: VecDeque<(Operation, Fault)>,
    always: Option<Fault>,
    acquires: usize,
    renews: usize,
    releases: usize,
}

impl FaultPlan {
    /// The next `operation` that has nothing planned for it yet meets `fault`.
    pub fn plan(&self, operation: Operation, fault: Fault) {
        self.lock().planned.push_back((operation, fault));
    }

    /// Every request without a plan of its own meets `fault` from now on.
    pub fn always(&self, fault: Fault) {
        self.lock().always = Some(fault);
    }

    /// How many requests of this kind were made so far.
    #[must_use]
    pub fn count(&self, operation: Operation) -> usize {
        let plan = self.lock();
        match operation {
            Operation::Acquire => plan.acquires,
            Operation::Renew => plan.renews,
            Operation::Release => plan.releases,
        }
    }

    fn meet(&self, operation: Operation) -> Fault {
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

    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fault {
    async fn before(self) -> Result<(), BackendError> {
        match self {
            Self::LoseRequest => pending().await,
            Self::DelayRequest(delay) => tokio::time::sleep(delay).await,
            Self::Fail(failure) => return Err(BackendError::new(failure, "a planned failure")),
            Self::None | Self::LoseReply | Self::DelayReply(_) => {}
        }
        Ok(())
    }

    async fn after(self) {
        match self {
            Self::LoseReply => pending().await,
            Self::DelayReply(delay) => tokio::time::sleep(delay).await,
            Self::None | Self::LoseRequest | Self::DelayRequest(_) | Self::Fail(_) => {}
        }
    }
}

/// `B`, with faults.
#[derive(Debug)]
pub struct FaultyBackend<B> {
    backend: Arc<B>,
    faults: FaultPlan,
}

impl<B: Backend> FaultyBackend<B> {
    /// Wraps `backend`; nothing goes wrong before the returned [`FaultPlan`] say so.
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
        claims: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let fault = self.faults.meet(Operation::Acquire);
        if let Fault::DelayRequest(delay) = fault {
            // Arrives also when its sender has given up meanwhile, as on a network.
            let (backend, late) = (self.backend.clone(), claims.to_vec());
            let late = tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                backend.acquire(&late).await
            });
            let gone =
                || Err(BackendError::new(FailureKind::MaybeApplied, "the runtime has ended"));
            return late.await.unwrap_or_else(|_| claims.iter().map(|_| gone()).collect());
        }
        if let Err(error) = fault.before().await {
            return claims.iter().map(|_| Err(error.clone())).collect();
        }
        let answers = self.backend.acquire(claims).await;
        fault.after().await;
        answers
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        let fault = self.faults.meet(Operation::Renew);
        if let Err(error) = fault.before().await {
            return leases.iter().map(|_| Err(error.clone())).collect();
        }
        let answer = self.backend.renew(leases).await;
        fault.after().await;
        answer
    }

    async fn release(
        &self,
        releases: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let fault = self.faults.meet(Operation::Release);
        if let Err(error) = fault.before().await {
            return releases.iter().map(|_| Err(error.clone())).collect();
        }
        let answer = self.backend.release(releases).await;
        fault.after().await;
        answer
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        self.backend.is_held(lease).await
    }

    fn capabilities(&self) -> Capabilities {
        // Local calls would be faulted on the caller's thread.
        let mut capabilities = self.backend.capabilities();
        capabilities.local = false;
        capabilities
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.backend.health().await
    }

    async fn close(&self) {
        self.backend.close().await;
    }
}
