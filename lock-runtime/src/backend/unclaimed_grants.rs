//! Reservations that were made for abandoned owner tokens.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::backend::queue_events::UnclaimedGrant;
use crate::backend::{LeaseRef, ReleaseRequest};
use crate::base::key::Key;

/// Releases each lock that was reserved for an owner token after the pool had abandoned the token.
///
/// Runs until the sender is dropped. A release that fails is not repeated: the reservation expires.
pub(crate) async fn release_unclaimed<F: Future>(
    mut unclaimed: mpsc::UnboundedReceiver<UnclaimedGrant>,
    request_timeout: Duration,
    release: impl Fn(ReleaseRequest) -> F,
) {
    // The ttl is not known here; this one leads to the shortest reservation for the next token in the queue.
    const UNKNOWN_TTL: Duration = Duration::from_secs(1);
    while let Some(UnclaimedGrant { key, owner }) = unclaimed.recv().await {
        let keys: Arc<[Key]> = Arc::new([Key::from(key)]);
        let release = release(ReleaseRequest::new(LeaseRef::new(keys, owner, UNKNOWN_TTL)));
        let _ = timeout(request_timeout, release).await;
    }
}
