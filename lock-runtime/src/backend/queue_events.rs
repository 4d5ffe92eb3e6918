//! What a store with a wait queue reports about queued owners.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use once_cell::sync::OnceCell;
use tokio::sync::mpsc::UnboundedSender;

use crate::backend::{AcquireOutcome, AcquireRequest, BackendError, Notifier, Owner, WaitMode};
use crate::base::mutex::Mutex;

/// A grant for an owner token that this pool does not know. The pool has given the token up, or the answer that
/// queued the owner is being handled on another thread.
pub(crate) struct UnclaimedGrant {
    pub(crate) key: String,
    pub(crate) owner: Owner,
    notifier: Notifier,
}

impl UnclaimedGrant {
    /// Notifies the owner again. Returns whether the pool now knows the owner, so that the grant belongs to the pool.
    pub(crate) fn is_claimed(&self) -> bool {
        self.notifier.head_of_queue(&self.key, &self.owner, Duration::ZERO)
    }
}

/// Passes the events of a store to its pool's [`Notifier`]. Methods run on the connections' tasks and never block.
///
/// Events that arrive before [`subscribe`](Self::subscribe) are dropped.
pub(crate) struct QueueEvents {
    notifier: OnceCell<Notifier>,
    /// Owners with an unanswered first request, and whether the owner has become the head of the queue meanwhile.
    pending_claims: Mutex<HashMap<Owner, bool>>,
    unclaimed: UnboundedSender<UnclaimedGrant>,
}

impl QueueEvents {
    /// Sends grants for unknown owners to `unclaimed`.
    pub(crate) fn new(unclaimed: UnboundedSender<UnclaimedGrant>) -> Arc<Self> {
        Arc::new(Self { notifier: OnceCell::new(), pending_claims: Mutex::default(), unclaimed })
    }

    pub(crate) fn subscribe(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    #[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
    pub(crate) fn notifier(&self) -> Option<&Notifier> {
        self.notifier.get()
    }

    /// A waiter has been seen in the queue of `key`, whose lock this pool holds.
    pub(crate) fn contended(&self, key: &str) {
        if let Some(notifier) = self.notifier.get() {
            notifier.contended(key);
        }
    }

    /// `owner` was granted `key`, or may request it after `available_in`.
    pub(crate) fn head_of_queue(&self, key: &str, owner: Owner, available_in: Duration) {
        let Some(notifier) = self.notifier.get() else { return };
        let is_known = notifier.head_of_queue(key, &owner, available_in);
        if is_known || !available_in.is_zero() {
            return;
        }
        match self.pending_claims.lock().get_mut(&owner) {
            Some(is_head) => *is_head = true,
            None => {
                let (key, notifier) = (key.to_owned(), notifier.clone());
                let _ = self.unclaimed.send(UnclaimedGrant { key, owner, notifier });
            }
        }
    }

    pub(crate) fn resync(&self) {
        if let Some(notifier) = self.notifier.get() {
            notifier.resync();
        }
    }

    pub(crate) fn disconnected(&self, error: &BackendError) {
        if let Some(notifier) = self.notifier.get() {
            notifier.disconnected(error);
        }
    }

    /// Registers `owners` whose first request enters the queue, until the returned value is dropped. The pool knows a
    /// token only after the answer to its request. The message that grants the lock may arrive before the answer is
    /// handled.
    pub(crate) fn expect(&self, owners: Vec<Owner>) -> PendingClaims<'_> {
        if !owners.is_empty() {
            self.pending_claims.lock().extend(owners.iter().map(|owner| (*owner, false)));
        }
        PendingClaims { events: self, owners }
    }
}

/// The registration of owners whose first request is unanswered. Dropping it ends the registration.
pub(crate) struct PendingClaims<'a> {
    events: &'a QueueEvents,
    owners: Vec<Owner>,
}

impl PendingClaims<'_> {
    /// Whether `owner` has become the head of the queue meanwhile.
    fn reached_head(&self, owner: &Owner) -> bool {
        !self.owners.is_empty() && self.events.pending_claims.lock().get(owner) == Some(&true)
    }

    /// A queued request retries immediately if its owner has become the head of the queue meanwhile.
    pub(crate) fn retry_heads(
        &self,
        requests: &[AcquireRequest],
        outcomes: &mut [Result<AcquireOutcome, BackendError>],
    ) {
        for (request, outcome) in requests.iter().zip(outcomes) {
            if let Ok(AcquireOutcome::Contended {
                wait_mode: WaitMode::Queued { retry_after }, ..
            }) = outcome
                && self.reached_head(&request.owner)
            {
                *retry_after = Duration::ZERO;
            }
        }
    }
}

impl Drop for PendingClaims<'_> {
    fn drop(&mut self) {
        if !self.owners.is_empty() {
            let mut pending = self.events.pending_claims.lock();
            for owner in &self.owners {
                pending.remove(owner);
            }
        }
    }
}
