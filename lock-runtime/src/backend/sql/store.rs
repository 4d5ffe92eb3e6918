//! A store on two connections to a database.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::AbortHandle;

use crate::backend::queue_events::{QueueEvents, UnclaimedGrant};
use crate::backend::sql::job::{PendingRequest, StoreJob};
use crate::backend::sql::listed_keys::ListedKeys;
use crate::backend::sql::pin::FenceTable;
use crate::backend::sql::renewal_queue::RENEWALS;
use crate::backend::sql::sender::{CLAIMS, JobSender};
use crate::backend::unclaimed_grants::release_unclaimed;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendError, Capabilities, Inspection, KeyList,
    KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome, ReleaseRequest, Warning,
};
use crate::base::fence::Fence;
use crate::base::key::Key;

/// Sends requests to one of two connections, and gives each its answer. Dropping it ends the connections.
pub(crate) struct SqlStore {
    events: Arc<QueueEvents>,
    claims: Arc<JobSender>,
    upkeep: JobSender,
    unclaimed: AbortHandle,
    /// With pins.
    fences: Option<FenceTable>,
}

impl Drop for SqlStore {
    fn drop(&mut self) {
        self.unclaimed.abort();
    }
}

impl SqlStore {
    /// A store on the connections for `claims` and for `upkeep`, with pins by `fences` if there is such a table. Grants that
    /// arrive in `found` are released.
    pub(crate) fn new(
        events: Arc<QueueEvents>,
        claims: JobSender,
        upkeep: JobSender,
        found: UnboundedReceiver<UnclaimedGrant>,
        request_timeout: Duration,
        fences: Option<FenceTable>,
    ) -> Self {
        let claims = Arc::new(claims);
        let unclaimed =
            release_unclaimed(found, request_timeout, &claims, |claims, request| async move {
                claims.send(|reply| StoreJob::Release((request, reply))).get().await
            });
        Self { events, claims, upkeep, unclaimed, fences }
    }
}

impl Backend for SqlStore {
    fn capabilities(&self) -> Capabilities {
        // A fence is that of a row, and a hand-off within the process changes no row.
        let local_handoff = self.fences.is_none();
        Capabilities {
            wait_queue: true,
            local_handoff,
            // A connection sends one batch after the other: over a slow link, what is sent in excess is answered too late.
            paced: true,
            least_in_flight: 2 * CLAIMS,
            most_renewals: RENEWALS,
            ..Capabilities::default()
        }
    }

    fn pin_sql(&self, keys: &[Key], fence: Fence) -> Option<String> {
        self.fences.as_ref().map(|fences| fences.pin(keys, fence))
    }

    fn subscribe(&self, notifier: Notifier) {
        self.events.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        let new = requests.iter().filter(|request| request.enqueue && request.attempt == 0);
        let pending = self.events.expect(new.map(|request| request.owner).collect());
        let mut outcomes = each(&self.claims, requests, StoreJob::Acquire).await;
        pending.retry_heads(requests, &mut outcomes);
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        each(&self.upkeep, leases, StoreJob::Renew).await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        each(&self.claims, requests, StoreJob::Release).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        self.upkeep.send(|reply| StoreJob::IsHeld((lease.clone(), reply))).get().await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        let inspecting = self.upkeep.send(|reply| StoreJob::Inspect((key.clone(), reply)));
        inspecting.get().await.map(Some)
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        let mut listed = ListedKeys::new(pattern, limit);
        while let Some(from) = listed.next_page() {
            let from = from.to_vec();
            let reading = self.upkeep.send(|reply| StoreJob::List((from, reply)));
            listed.add_page(&reading.get().await?);
        }
        Ok(Some(listed.into_list()))
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.upkeep.send(StoreJob::Health).get().await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        self.claims.send(StoreJob::Probe).get().await
    }

    async fn close(&self) {
        tokio::join!(self.claims.close(), self.upkeep.close());
    }
}

/// Sends all `requests` as jobs, then awaits their answers.
async fn each<R: Clone, T>(
    link: &JobSender,
    requests: &[R],
    job: fn(PendingRequest<R, T>) -> StoreJob,
) -> Vec<Result<T, BackendError>> {
    let send = |request: &R| link.send(|reply| job((request.clone(), reply)));
    let answers: Vec<_> = requests.iter().map(send).collect();
    let mut outcomes = Vec::with_capacity(answers.len());
    for answer in answers {
        outcomes.push(answer.get().await);
    }
    outcomes
}
