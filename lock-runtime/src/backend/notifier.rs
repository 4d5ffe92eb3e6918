//! Notifications from a store to the pool.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::backend_error::BackendError;
use crate::base::owner::Owner;

/// Receives what happens to keys in a store. Keys are as the store knows them, with the pool's prefix.
///
/// Notifications are hints: a waiter sends its request again, and only the answer counts. A spurious notification
/// costs a request; a missed one costs the time until the next regular request. No method blocks.
#[derive(Clone)]
pub struct Notifier(Arc<dyn NotifySink>);

impl Notifier {
    pub(crate) fn new(sink: impl NotifySink + 'static) -> Self {
        Self(Arc::new(sink))
    }

    /// `key` may have been freed, or taken from its holder.
    pub fn key_changed(&self, key: &str) {
        self.0.key_changed(key);
    }

    /// Any key may have been freed or taken: the connection was down, or the store was emptied.
    pub fn resync(&self) {
        self.0.resync();
    }

    /// The connection to the store has ended, or a new one has failed. The pool then sends probes until the store answers, and
    /// reports an outage if it does not.
    pub fn disconnected(&self, error: &BackendError) {
        self.0.disconnected(error);
    }

    /// `owner`, from the store's wait queue for `key`, was granted the lock if `available_in` is zero. Otherwise it is
    /// next, and the lock is available within that time. `false` if the pool no longer knows the owner; the store then
    /// has to notify the next owner.
    #[must_use]
    pub fn head_of_queue(&self, key: &str, owner: &Owner, available_in: Duration) -> bool {
        self.0.head_of_queue(key, owner, available_in)
    }

    /// Other owners wait for `key`, which this pool holds.
    pub fn contended(&self, key: &str) {
        self.0.contended(key);
    }
}

impl fmt::Debug for Notifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notifier").finish_non_exhaustive()
    }
}

/// The receiving end of a [`Notifier`], with the same methods.
pub(crate) trait NotifySink: Send + Sync {
    fn key_changed(&self, key: &str);
    fn resync(&self);
    fn disconnected(&self, error: &BackendError);
    fn head_of_queue(&self, key: &str, owner: &Owner, available_in: Duration) -> bool;
    fn contended(&self, key: &str);
}
