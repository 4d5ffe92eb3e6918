//! The permits of a request for several keys, from the queues of this process.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::key::Key;
use crate::base::owner::Owner;
use crate::lock::acquire::pending_reply::PendingReply;
use crate::lock::acquire::run::pass_on;
use crate::lock::core::PoolCore;
use crate::lock::waiter::LockWaiter;
use crate::queue::permit::KeyPermit;
use crate::queue::permits_wait::Registration;
use crate::queue::wait_params::WaitParams;
use crate::queue::wake_signal::WakeSignal;

type PermitReply = Result<KeyPermit, LockError>;

/// The permits that one request for `keys` has, and its places in their queues.
pub(super) struct LocalPermits {
    core: Arc<PoolCore>,
    keys: Arc<[Key]>,
    params: WaitParams,
    /// The rank in the queues.
    id: u64,
    /// Notified when a request to the store may be due early, or a reservation changes.
    wake: Arc<WakeSignal>,
    /// The first request for the permits of all keys, until they are awaited.
    requested: Option<PermitRequest>,
    permit: Option<KeyPermit>,
    registration: Option<Registration<LockWaiter>>,
}

/// A request for the permits of all keys.
enum PermitRequest {
    Here(KeyPermit),
    Awaited(AwaitedPermits),
}

/// A wait for the permits of all keys. Dropping it leaves the queue. Permits that arrive in that instant pass on.
struct AwaitedPermits {
    core: Arc<PoolCore>,
    id: u64,
    answer: Option<oneshot::Receiver<PermitReply>>,
}

impl Drop for AwaitedPermits {
    fn drop(&mut self) {
        // Closed first, as in `Waiting`.
        if let Some(answer) = self.answer.take() {
            drop(answer);
            if !self.core.is_inherited() {
                pass_on(&self.core, self.core.queue.cancel_permits_wait(self.id));
            }
        }
    }
}

impl LocalPermits {
    /// Requests the permits of all `keys`.
    ///
    /// # Errors
    /// Same as [`enqueue`](crate::queue::wait_queue::WaitQueues::enqueue).
    pub(super) fn request(
        core: &Arc<PoolCore>,
        keys: Arc<[Key]>,
        params: WaitParams,
    ) -> Result<Self, LockError> {
        let mut permits = Self {
            core: core.clone(),
            keys,
            params,
            id: core.queue.rank(),
            wake: Arc::default(),
            requested: None,
            permit: None,
            registration: None,
        };
        permits.requested = Some(permits.request_all(false)?);
        Ok(permits)
    }

    fn request_all(&self, again: bool) -> Result<PermitRequest, LockError> {
        let (reply, answer) = oneshot::channel();
        let (core, keys) = (&self.core, &self.keys);
        let (id, params, wake) = (self.id, &self.params, &self.wake);
        Ok(if core.queue.enqueue_for_permits(id, keys, params, wake, reply, again)? {
            PermitRequest::Here(KeyPermit::new(core.clone(), keys.clone()))
        } else {
            let (core, answer) = (core.clone(), Some(answer));
            PermitRequest::Awaited(AwaitedPermits { core, id, answer })
        })
    }

    /// Waits for the permits of all keys, if it has none. `false` if the wait has ended.
    pub(super) async fn take_all(&mut self, reply: &mut PendingReply) -> bool {
        if self.permit.is_some() {
            return true;
        }
        let requested = match self.requested.take() {
            Some(requested) => Ok(requested),
            None => self.request_all(true),
        };
        match requested {
            Ok(PermitRequest::Here(permit)) => self.permit = Some(permit),
            Ok(PermitRequest::Awaited(awaited)) => self.permit = self.wait(awaited, reply).await,
            Err(error) => reply.reject(error),
        }
        self.permit.is_some()
    }

    /// Waits for the permits of `awaited`. `None` if the wait has ended.
    async fn wait(
        &self,
        mut awaited: AwaitedPermits,
        reply: &mut PendingReply,
    ) -> Option<KeyPermit> {
        let (core, id) = (&self.core, self.id);
        let WaitParams { deadline, end, .. } = self.params;
        loop {
            let reservation_ends_at = core.queue.reservation_ends_at(id);
            let until = [reservation_ends_at, deadline].into_iter().flatten().min();
            let answer = awaited.answer.as_mut()?;
            tokio::select! {
                biased;
                () = core.tracker.closing() => return None,
                permit = answer => {
                    awaited.answer = None;
                    return match permit {
                        Ok(Ok(permit)) => Some(permit),
                        Ok(Err(error)) => {
                            reply.reject(error);
                            None
                        }
                        // The driver's runtime ends.
                        Err(_) => None,
                    };
                }
                () = reply.gone() => return None,
                () = self.wake.notified() => {}
                () = core.clock().sleep_until_due(until) => {
                    let now = core.clock().now();
                    if deadline.is_some_and(|deadline| deadline <= now) {
                        reply.reject(core.queue.permits_wait_error(id, end, now));
                        return None;
                    }
                    if reservation_ends_at.is_some_and(|at| at <= now) {
                        pass_on(core, core.queue.end_reservation(id));
                    }
                }
            }
        }
    }

    /// Takes the permits of those of `keys` that no task of this process uses.
    pub(super) fn take_free(&mut self, keys: &[Key]) {
        let has = |key| self.permit.as_ref().is_some_and(|permit| permit.keys().contains(key));
        if !keys.iter().all(has) {
            let taken = self.core.queue.take_free(keys);
            let core = &self.core;
            let empty = || KeyPermit::new(core.clone(), Arc::from([]));
            self.permit.get_or_insert_with(empty).add(taken);
        }
    }

    /// Drops the permits of the keys that `is_kept` excludes.
    pub(super) fn retain(&mut self, is_kept: impl Fn(&Key) -> bool) {
        let Some(mut permit) = self.permit.take() else { return };
        permit.retain(is_kept);
        if !permit.keys().is_empty() {
            self.permit = Some(permit);
        }
    }

    pub(super) fn drop_all(&mut self) {
        self.permit = None;
    }

    pub(super) const fn is_registered(&self) -> bool {
        self.registration.is_some()
    }

    /// Makes the owner token known in the queues of all keys.
    pub(super) fn register(&mut self, owner: Owner) {
        let (queues, keys, id) = (&self.core.queue, &self.keys, self.id);
        queues.register(keys, id, owner, &self.wake);
        let registration = || Registration { queues: queues.clone(), keys: keys.clone(), id };
        self.registration.get_or_insert_with(registration);
    }

    /// Resolves when a request to the store may be due early.
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// When the request that is due early is due, if this has changed.
    pub(super) fn take_due(&self) -> Option<Instant> {
        self.wake.take_due()
    }

    /// Whether other owners wait for some of `keys`.
    pub(super) fn is_contended<'a>(&self, keys: impl Iterator<Item = &'a Key>) -> bool {
        self.core.queue.is_contended(keys, self.id)
    }

    pub(super) fn clear_contended<'a>(&self, keys: impl Iterator<Item = &'a Key>) {
        self.core.queue.clear_contended(keys, self.id);
    }

    /// The permits for a lease, with the registration attached.
    pub(super) fn into_permit(self) -> KeyPermit {
        let permit = self.permit.unwrap_or_else(|| KeyPermit::new(self.core, Arc::from([])));
        match self.registration {
            Some(registration) => permit.with(registration),
            None => permit,
        }
    }
}
