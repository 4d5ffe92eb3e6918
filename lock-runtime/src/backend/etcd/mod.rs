//! `etcd://`: locks as keys with a lease.
//!
//! A lock is a prefix, and each owner of it, or waiter, is a key below it. The key that was made first holds the lock, and each
//! other key watches the one right before it. The layout is that of `etcdctl lock` and of Go's `concurrency.Mutex`, so all of
//! them exclude each other:
//!
//! ```text
//! /locks/order:1/<owner>            made by revision 7: holds the lock
//! /locks/order:1/<owner>            made by revision 9: waits, watches the other one
//! /locks/%lease/<lease>             the number of the connection that may put keys under this lease
//! /locks/%fence/order:1             after a grant of several keys: see `fence`
//! ```
//!
//! 1. **A key lives as long as its lease.** There is a lease for each class of ttls, for all locks of the pool. A lock that ends
//!    earlier is deleted by its process. A renewal is a sign of life for the lease, and a read that a majority confirms: see
//!    `leases`.
//! 2. **The owner token is in the name**, so a key is found again after a lost answer.
//! 3. **Requests of one owner run one after another**, each to its answer or to the end of its connection, even if the caller is
//!    gone. Requests that a former connection has left in flight no longer put keys. So nothing is granted after a release.
//! 4. **An owner is recorded before its request is sent.** What a dropped call or a lost connection leaves is deleted at its
//!    deadline.
//! 5. **A fence is a revision of the cluster**: of the key's creation, or of a write beside the queue.
//!
//! The files from bottom to top: `protocol`, `url`, `key_names`, `server_error`, `transport`, `grpc`, `combined`, `member` (a
//! connection), `leases`, `member_opener` and `member_task` (keep a connection up), `open_signs`, `keep_alives`, `watches`, `owned_key` and
//! `owned_keys` (what each owner has), `locks`, `acquiring`, `fence`, `grant`, `acquire`, `release`, `renew`, `inspect`,
//! `list`, `upkeep` and `diagnostics`.

mod acquire;
mod acquiring;
mod combined;
mod diagnostics;
mod fence;
mod grant;
mod grpc;
mod inspect;
mod keep_alives;
mod key_names;
mod leases;
mod list;
mod lock_changes;
mod locks;
mod member;
mod member_opener;
mod member_task;
mod open_signs;
mod owned_key;
mod owned_keys;
mod protocol;
mod release;
mod renew;
mod server_error;
mod transport;
mod upkeep;
mod url;
mod watches;

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use self::keep_alives::KeepAlives;
use self::key_names::KeyNames;
use self::leases::Leases;
use self::locks::{AbandonFlag, EtcdLocks};
use self::member_task::MemberLink;
use self::owned_keys::OwnedKeys;
use self::server_error::unanswered;
use self::transport::MemberDialer;
use self::url::EtcdCluster;
use self::watches::KeyWatches;
use crate::backend::credentials::beside_password;
use crate::backend::queue_events::QueueEvents;
use crate::backend::unclaimed_grants::release_unclaimed;
use crate::backend::{
    AcquireOutcome, AcquireRequest, Backend, BackendConfig, BackendError, Capabilities, DynBackend,
    Inspection, KeyList, KeyPattern, LeaseRef, LeaseStatus, Notifier, ReleaseOutcome,
    ReleaseRequest, Warning,
};
use crate::base::error::LockError;
use crate::base::key::Key;

/// Opens the store at `url`, which has the scheme of etcd.
pub(crate) async fn open(
    url: &str,
    config: BackendConfig<'_>,
) -> Result<Arc<dyn DynBackend>, LockError> {
    let cluster = EtcdCluster::parse(url)?;
    let config = config.with_connect_timeout(cluster.connect_timeout);
    let credentials = beside_password(config.credentials, cluster.login.is_some())?;
    let dialer = MemberDialer::new(cluster, credentials, config.limits()).await?;
    Ok(Arc::new(Etcd::connect(Arc::new(dialer), config).await.map_err(LockError::backend)?))
}

struct Etcd {
    locks: Arc<EtcdLocks>,
    tasks: [AbortHandle; 3],
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.begin_close();
    }
}

impl Etcd {
    async fn connect(
        dialer: Arc<MemberDialer>,
        config: BackendConfig<'_>,
    ) -> Result<Self, BackendError> {
        let (unclaimed, found) = mpsc::unbounded_channel();
        let (clock, names) = (config.clock, KeyNames::new(&dialer.cluster.root));
        let events = QueueEvents::new(unclaimed);
        let (leases, ended_leases) = Leases::new(names.clone(), clock, dialer.most_keys_of_lease());
        let (watches, watched) = KeyWatches::new();
        let (keys, misses) = OwnedKeys::new(events.clone(), clock, names, watches);
        let link = MemberLink::start(dialer, clock, events, leases.clone());
        link.member().await?;
        let signs = KeepAlives::start(link.clone(), leases.clone(), clock, config.request_timeout);
        let watching = watched.serve(link.clone(), keys.clone());
        // The call ends at the request timeout, with all answers that have arrived.
        let renewal_limit = config.request_timeout * 4 / 5;
        let locks = Arc::new(EtcdLocks { keys, leases, signs, link, renewal_limit });
        let limit = config.request_timeout;
        let releasing = release_unclaimed(found, limit, &locks, |locks, request| async move {
            locks.with_token(|| locks.release(&request)).await
        });
        let tasks = [
            watching,
            releasing,
            tokio::spawn(upkeep::run(locks.clone(), ended_leases, misses)).abort_handle(),
        ];
        Ok(Self { locks, tasks })
    }

    fn begin_close(&self) {
        let leases = self.locks.leases.all();
        let last = self.locks.keys.last_requests(leases.iter().map(|lease| lease.id));
        self.locks.link.begin_close(last);
    }

    /// One task for each of `requests`, all at the same time. A task continues when the caller is gone: see the head of this
    /// file.
    async fn each<R, T, F>(
        &self,
        requests: &[R],
        call: impl Fn(Arc<EtcdLocks>, R, AbandonFlag) -> F,
    ) -> Vec<Result<T, BackendError>>
    where
        R: Clone,
        T: Send + 'static,
        F: Future<Output = Result<T, BackendError>> + Send + 'static,
    {
        let abandoned = AbandonOnDrop(AbandonFlag::default());
        let start = |request: &R| {
            tokio::spawn(call(self.locks.clone(), request.clone(), abandoned.0.clone()))
        };
        let started: Vec<_> = requests.iter().map(start).collect();
        let mut outcomes = Vec::with_capacity(started.len());
        for outcome in started {
            outcomes.push(outcome.await.unwrap_or_else(|_| Err(unanswered())));
        }
        outcomes
    }
}

/// Says that the caller is gone, as soon as it is.
struct AbandonOnDrop(AbandonFlag);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}

impl Backend for Etcd {
    fn capabilities(&self) -> Capabilities {
        // All changes take their turn at one leader, so what is sent in excess is answered too late.
        Capabilities { wait_queue: true, paced: true, ..Capabilities::default() }
    }

    fn subscribe(&self, notifier: Notifier) {
        self.locks.keys.events.subscribe(notifier);
    }

    async fn acquire(
        &self,
        requests: &[AcquireRequest],
    ) -> Vec<Result<AcquireOutcome, BackendError>> {
        // Even a repeated request may be the first one that is answered.
        let queued = requests.iter().filter(|request| request.enqueue);
        let pending = self.locks.keys.events.expect(queued.map(|it| it.owner).collect());
        let call = |locks: Arc<EtcdLocks>, request, abandoned| async move {
            locks.with_token(|| locks.acquire(&request, &abandoned)).await
        };
        let mut outcomes = self.each(requests, call).await;
        pending.retry_heads(requests, &mut outcomes);
        outcomes
    }

    async fn renew(&self, leases: &[LeaseRef]) -> Vec<Result<LeaseStatus, BackendError>> {
        self.locks.renew(leases).await
    }

    async fn release(
        &self,
        requests: &[ReleaseRequest],
    ) -> Vec<Result<ReleaseOutcome, BackendError>> {
        let call = |locks: Arc<EtcdLocks>, request, _| async move {
            locks.with_token(|| locks.release(&request)).await
        };
        self.each(requests, call).await
    }

    async fn is_held(&self, lease: &LeaseRef) -> Result<LeaseStatus, BackendError> {
        self.locks.with_token(|| self.locks.is_held(lease)).await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, BackendError> {
        self.locks.with_token(|| self.locks.inspect(key)).await.map(Some)
    }

    async fn list(
        &self,
        pattern: &KeyPattern,
        limit: usize,
    ) -> Result<Option<KeyList>, BackendError> {
        self.locks.with_token(|| self.locks.list(pattern, limit)).await.map(Some)
    }

    async fn watch(
        &self,
        pattern: &KeyPattern,
        changed: &(dyn Fn() + Send + Sync),
    ) -> Result<(), BackendError> {
        self.locks.watch(pattern, changed).await
    }

    async fn health(&self) -> Result<Vec<Warning>, BackendError> {
        self.locks.with_token(|| self.locks.health()).await
    }

    async fn probe(&self) -> Result<(), BackendError> {
        self.locks.with_token(|| self.locks.probe()).await
    }

    async fn close(&self) {
        self.begin_close();
        self.locks.link.closed().await;
    }
}
