//! [`Backend`] as an object, so that a pool has one type for every store.

use std::future::Future;
use std::pin::Pin;
#[cfg(feature = "testing")]
use std::sync::Arc;

use tokio::runtime::Handle;

use super::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, FailureKind, Finding,
    Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome,
    ReleaseRequest, Warning,
};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::exec::foreground::ForegroundPlace;
use crate::exec::panic_boundary;

pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The object-safe form of [`Backend`]. A panic in the store fails the request, like a lost reply.
pub(crate) trait DynBackend: Send + Sync {
    fn capabilities(&self) -> Capabilities;
    fn foreground(&self, caller: &Handle) -> Option<ForegroundPlace>;
    fn subscribe(&self, notifier: Notifier);
    fn acquire<'a>(
        &'a self,
        requests: &'a [AcquireRequest],
    ) -> Boxed<'a, Vec<Result<AcquireOutcome, BackendError>>>;
    fn renew<'a>(
        &'a self,
        leases: &'a [LeaseRef],
    ) -> Boxed<'a, Vec<Result<LeaseStatus, BackendError>>>;
    fn release<'a>(
        &'a self,
        requests: &'a [ReleaseRequest],
    ) -> Boxed<'a, Vec<Result<ReleaseOutcome, BackendError>>>;
    fn is_held<'a>(&'a self, lease: &'a LeaseRef) -> Boxed<'a, Result<LeaseStatus, BackendError>>;
    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String>;
    fn inspect<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<Option<Inspection>, BackendError>>;
    fn list<'a>(
        &'a self,
        pattern: &'a KeyPattern,
        limit: usize,
    ) -> Boxed<'a, Result<Option<KeyList>, BackendError>>;
    fn watch<'a>(
        &'a self,
        pattern: &'a KeyPattern,
        changed: &'a (dyn Fn() + Send + Sync),
    ) -> Boxed<'a, Result<(), BackendError>>;
    fn health(&self) -> Boxed<'_, Result<Vec<Warning>, BackendError>>;
    fn diagnose(&self) -> Boxed<'_, Result<Vec<Finding>, BackendError>>;
    fn probe(&self) -> Boxed<'_, Result<(), BackendError>>;
    fn close(&self) -> Boxed<'_, ()>;
}

impl<B: Backend> DynBackend for B {
    fn capabilities(&self) -> Capabilities {
        panic_boundary::call(|| Backend::capabilities(self)).unwrap_or_default()
    }

    fn foreground(&self, caller: &Handle) -> Option<ForegroundPlace> {
        Backend::foreground(self, caller)
    }

    fn subscribe(&self, notifier: Notifier) {
        Backend::subscribe(self, notifier);
    }

    fn acquire<'a>(
        &'a self,
        requests: &'a [AcquireRequest],
    ) -> Boxed<'a, Vec<Result<AcquireOutcome, BackendError>>> {
        let call = async move {
            let mut outcomes = one_for_each(Backend::acquire(self, requests).await, requests.len());
            for (outcome, request) in outcomes.iter_mut().zip(requests) {
                if request.fencing {
                    check_fence(self, outcome);
                }
            }
            outcomes
        };
        Box::pin(panic_boundary::run(call, |panic| of_each(&panic.into_error(), requests.len())))
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [LeaseRef],
    ) -> Boxed<'a, Vec<Result<LeaseStatus, BackendError>>> {
        let call = async { one_for_each(Backend::renew(self, leases).await, leases.len()) };
        Box::pin(panic_boundary::run(call, |panic| of_each(&panic.into_error(), leases.len())))
    }

    fn release<'a>(
        &'a self,
        requests: &'a [ReleaseRequest],
    ) -> Boxed<'a, Vec<Result<ReleaseOutcome, BackendError>>> {
        let call = async { one_for_each(Backend::release(self, requests).await, requests.len()) };
        Box::pin(panic_boundary::run(call, |panic| of_each(&panic.into_error(), requests.len())))
    }

    fn is_held<'a>(&'a self, lease: &'a LeaseRef) -> Boxed<'a, Result<LeaseStatus, BackendError>> {
        fallible(async { Backend::is_held(self, lease).await })
    }

    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String> {
        panic_boundary::call(|| Backend::pin_sql(self, keys, fence)).unwrap_or_default()
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> Boxed<'a, Result<Option<Inspection>, BackendError>> {
        fallible(async { Backend::inspect(self, key).await })
    }

    fn list<'a>(
        &'a self,
        pattern: &'a KeyPattern,
        limit: usize,
    ) -> Boxed<'a, Result<Option<KeyList>, BackendError>> {
        fallible(async move { Backend::list(self, pattern, limit).await })
    }

    fn watch<'a>(
        &'a self,
        pattern: &'a KeyPattern,
        changed: &'a (dyn Fn() + Send + Sync),
    ) -> Boxed<'a, Result<(), BackendError>> {
        fallible(async move { Backend::watch(self, pattern, changed).await })
    }

    fn probe(&self) -> Boxed<'_, Result<(), BackendError>> {
        fallible(async { Backend::probe(self).await })
    }

    fn health(&self) -> Boxed<'_, Result<Vec<Warning>, BackendError>> {
        fallible(async { Backend::health(self).await })
    }

    fn diagnose(&self) -> Boxed<'_, Result<Vec<Finding>, BackendError>> {
        fallible(async { Backend::diagnose(self).await })
    }

    fn close(&self) -> Boxed<'_, ()> {
        Box::pin(panic_boundary::run(async { Backend::close(self).await }, drop))
    }
}

/// `outcomes`, if there is one for each of `count` entries.
fn one_for_each<T>(
    outcomes: Vec<Result<T, BackendError>>,
    count: usize,
) -> Vec<Result<T, BackendError>> {
    if outcomes.len() == count {
        return outcomes;
    }
    let message = format!("the store gave {} outcomes for {count} entries", outcomes.len());
    let error = BackendError::new(FailureKind::MaybeApplied, message)
        .remedy("it is a bug of the `Backend`: one outcome for each entry, in order");
    of_each(&error, count)
}

/// The outcomes of a call of `count` entries that has failed.
#[cold]
fn of_each<T>(error: &BackendError, count: usize) -> Vec<Result<T, BackendError>> {
    (0..count).map(|_| Err(error.clone())).collect()
}

/// A request for a fence was answered with `outcome`.
fn check_fence(backend: &impl Backend, outcome: &mut Result<AcquireOutcome, BackendError>) {
    match outcome {
        Ok(AcquireOutcome::Acquired { fence: None, .. }) => {
            let message = "the store granted a lock without the fence that was requested";
            // The pool releases what may have been granted.
            let error = BackendError::new(FailureKind::MaybeApplied, message);
            *outcome = Err(error.remedy(
                "it is a bug of the `Backend`: a store without fences says so in its `capabilities()`, and rejects the request",
            ));
        }
        Err(error) if error.kind() == FailureKind::Rejected && error.remedy_text().is_empty() => {
            if !Backend::capabilities(backend).fencing {
                *error = error.clone().remedy(
                    "the store has no fences: write `.fencing(false)` on the request, or leave `guard` out of the attribute",
                );
            }
        }
        Ok(_) | Err(_) => {}
    }
}

/// The outcome of `call`, or the error of its panic.
fn fallible<'a, T: 'a>(
    call: impl Future<Output = Result<T, BackendError>> + Send + 'a,
) -> Boxed<'a, Result<T, BackendError>> {
    Box::pin(panic_boundary::run(call, |panic| Err(panic.into_error())))
}

/// A backend that was opened by its URL.
#[cfg(feature = "testing")]
pub(crate) struct Opened(pub(crate) Arc<dyn DynBackend>);

#[cfg(feature = "testing")]
impl Backend for Opened {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn foreground(&self, caller: &Handle) -> Option<ForegroundPlace> {
        self.0.foreground(caller)
    }

    fn subscribe(&self, notifier: Notifier) {
        self.0.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        self.0.acquire(requests).await
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.0.renew(leases).await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        self.0.release(requests).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        self.0.is_held(lease).await
    }

    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String> {
        self.0.pin_sql(keys, fence)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        self.0.inspect(key).await
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        self.0.list(pattern, limit).await
    }

    async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        self.0.watch(pattern, changed).await
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.0.health().await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.0.diagnose().await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        self.0.probe().await
    }

    async fn close(&self) {
        self.0.close().await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::owner::Owner;

    /// Answers each acquire with its own outcome, and no other request.
    struct Defective(Result<AcquireOutcome, BackendError>, bool);

    impl Backend for Defective {
        fn capabilities(&self) -> Capabilities {
            Capabilities { fencing: self.1, ..Capabilities::default() }
        }

        async fn acquire(&self, _: &[AcquireRequest]) -> Vec<Result<AcquireOutcome, BackendError>> {
            vec![self.0.clone()]
        }

        async fn renew(&self, _: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
            Vec::new()
        }

        async fn release(&self, _: &[ReleaseRequest]) -> Vec<Result<ReleaseOutcome, BackendError>> {
            Vec::new()
        }

        async fn is_held(&self, _: &LeaseRef) -> Result<LeaseStatus, BackendError> {
            Ok(LeaseStatus::Held)
        }

        async fn health(&self) -> Result<Vec<Warning>, BackendError> {
            Ok(Vec::new())
        }
    }

    fn request(fencing: bool) -> AcquireRequest {
        let keys = [Key::from_static("k")];
        let ttl = Duration::from_secs(1);
        AcquireRequest { fencing, ..AcquireRequest::new(keys, Owner::random().unwrap(), ttl) }
    }

    #[tokio::test]
    async fn a_call_without_one_outcome_for_each_entry_fails_as_a_whole() {
        let store = Defective(Ok(AcquireOutcome::acquired(None)), true);
        let store: &dyn DynBackend = &store;
        let error = store.renew(&[request(false).lease()]).await.remove(0).unwrap_err();
        assert!(error.message().contains("0 outcomes for 1 entries"), "{error}");
        let releases = [ReleaseRequest::new(request(false).lease())];
        let error = store.release(&releases).await.remove(0).unwrap_err();
        assert!(error.message().contains("0 outcomes for 1 entries"), "{error}");
        let acquired = store.acquire(&[request(false), request(false)]).await;
        assert_eq!(acquired.len(), 2);
        for outcome in acquired {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), FailureKind::MaybeApplied);
            assert!(error.message().contains("1 outcomes for 2 entries"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_request_for_a_fence_gets_one_or_an_error_that_says_why() {
        let outcome = async |outcome, has_fences, fencing| {
            let store = Defective(outcome, has_fences);
            let store: &dyn DynBackend = &store;
            store.acquire(&[request(fencing)]).await.remove(0)
        };
        let unfenced = || Ok(AcquireOutcome::acquired(None));
        outcome(unfenced(), true, false).await.unwrap();
        outcome(Ok(AcquireOutcome::acquired(Some(Fence::new(7)))), true, true).await.unwrap();
        let error = outcome(unfenced(), true, true).await.unwrap_err();
        assert_eq!(error.kind(), FailureKind::MaybeApplied);
        assert!(error.message().contains("without the fence"), "{error}");
        let rejected = || Err(BackendError::new(FailureKind::Rejected, "no fences"));
        let error = outcome(rejected(), false, true).await.unwrap_err();
        assert!(error.remedy_text().contains("`.fencing(false)`"), "{error}");
        let error = outcome(rejected(), true, true).await.unwrap_err();
        assert_eq!(error.remedy_text(), "");
        let named = || rejected().map_err(|error| error.remedy("read the manual"));
        let error = outcome(named(), false, true).await.unwrap_err();
        assert_eq!(error.remedy_text(), "read the manual");
    }
}
