//! Why a lease was lost.

use crate::base::label_values::label_values;

label_values! {
    /// Why a lease was lost, with its word in events and metrics.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    Loss {
        /// The store did not confirm a renewal in time.
        Expired = "expired",
        /// The store reports that the key is not held by this owner.
        Taken = "taken",
        /// `renew = false`, and the ttl is over.
        TtlOver = "ttl_over",
        /// `max_hold` is over.
        MaxHold = "max_hold",
        /// The pool shuts down, and its grace is over.
        PoolClosed = "pool_closed",
        /// The store reports to a release that the key is not held by this owner.
        FoundAtRelease = "found_at_release",
    }
}
