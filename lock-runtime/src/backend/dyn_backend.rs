//! [`Backend`] as an object, so that a pool has one type for every store.

use std::future::Future;
use std::pin::Pin;
#[cfg(feature = "testing")]
use std::sync::Arc;

use tokio::runtime::Handle;

use super::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, Finding, Inspection,
    KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::exec::foreground::ForegroundPlace;
use crate::exec::panic_boundary::{self, Panic};

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
        let call = async { Backend::acquire(self, requests).await };
        Box::pin(panic_boundary::run(call, |panic| of_each(panic, requests.len())))
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [LeaseRef],
    ) -> Boxed<'a, Vec<Result<LeaseStatus, BackendError>>> {
        let call = async { Backend::renew(self, leases).await };
        Box::pin(panic_boundary::run(call, |panic| of_each(panic, leases.len())))
    }

    fn release<'a>(
        &'a self,
        requests: &'a [ReleaseRequest],
    ) -> Boxed<'a, Vec<Result<ReleaseOutcome, BackendError>>> {
        let call = async { Backend::release(self, requests).await };
        Box::pin(panic_boundary::run(call, |panic| of_each(panic, requests.len())))
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

/// The outcomes of a call of `count` entries after `panic`.
#[cold]
fn of_each<T>(panic: Panic, count: usize) -> Vec<Result<T, BackendError>> {
    let error = panic.into_error();
    (0..count).map(|_| Err(error.clone())).collect()
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
