//! Reservations that were made for abandoned owner tokens.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backend::queue_events::UnclaimedGrant;
use crate::backend::{LeaseRef, ReleaseRequest};
use crate::base::key::Key;

/// Starts a task that releases each lock that was reserved for an owner token after the pool had abandoned the token.
///
/// It runs until the sender is dropped. A release that fails is not repeated: the reservation expires.
pub(crate) fn release_unclaimed<S, F>(
    unclaimed: UnboundedReceiver<UnclaimedGrant>,
    request_timeout: Duration,
    store: &Arc<S>,
    release: impl Fn(Arc<S>, ReleaseRequest) -> F + Send + 'static,
) -> AbortHandle
where
    S: Send + Sync + 'static,
    F: Future + Send + 'static,
{
    let store = store.clone();
    let release = move |request| release(store.clone(), request);
    tokio::spawn(release_each(unclaimed, request_timeout, release)).abort_handle()
}

async fn release_each<F: Future>(
    mut unclaimed: UnboundedReceiver<UnclaimedGrant>,
    request_timeout: Duration,
    release: impl Fn(ReleaseRequest) -> F,
) {
    // The ttl is not known here; this one leads to the shortest reservation for the next token in the queue.
    const UNKNOWN_TTL: Duration = Duration::from_secs(1);
    while let Some(grant) = unclaimed.recv().await {
        // The releases before this one take time. A release of a lock that is held by now would end the hold.
        if grant.is_claimed() {
            continue;
        }
        let UnclaimedGrant { key, owner, .. } = grant;
        let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
        let release = release(ReleaseRequest::new(LeaseRef::new(keys, owner, UNKNOWN_TTL)));
        let _ = timeout(request_timeout, release).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;

    use tokio::sync::mpsc;

    use super::*;
    use crate::backend::notifier::{Notifier, NotifySink};
    use crate::backend::queue_events::QueueEvents;
    use crate::backend::{BackendError, Owner};

    /// A pool that knows these owners.
    #[derive(Clone, Default)]
    struct Pool(Arc<Mutex<HashSet<Owner>>>);

    impl NotifySink for Pool {
        fn key_changed(&self, _: &str) {}
        fn resync(&self) {}
        fn disconnected(&self, _: &BackendError) {}
        fn head_of_queue(&self, _: &str, owner: &Owner, _: Duration) -> bool {
            self.0.lock().unwrap().contains(owner)
        }
        fn contended(&self, _: &str) {}
    }

    /// The answer that queues an owner may be handled while the message of its grant is.
    #[tokio::test]
    async fn a_grant_whose_owner_is_known_by_now_is_not_released() {
        let (found, unclaimed) = mpsc::unbounded_channel();
        let (pool, events) = (Pool::default(), QueueEvents::new(found));
        events.subscribe(Notifier::new(pool.clone()));
        let [abandoned, late, other] = std::array::from_fn(|_| Owner::random().unwrap());
        for owner in [abandoned, late, other] {
            events.head_of_queue("order:42", owner, Duration::ZERO);
        }
        pool.0.lock().unwrap().insert(late);
        drop(events);
        let released = Mutex::new(Vec::new());
        let release = |request: ReleaseRequest| {
            released.lock().unwrap().push(request.lease.owner);
            std::future::ready(())
        };
        release_each(unclaimed, Duration::from_secs(1), release).await;
        assert_eq!(*released.lock().unwrap(), [abandoned, other]);
    }
}
