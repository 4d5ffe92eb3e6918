//! What the renewals of a pool have to do for a lease.

use crate::base::clock::Instant;

/// What a lease needs now.
#[derive(Debug)]
pub(crate) enum RenewalAction {
    /// A renewal. Poll again at `cancel_at`.
    Renew {
        cancel_at: Instant,
        /// Whether the last renewal failed.
        in_doubt: bool,
    },
    /// Nothing before this moment.
    Wait(Instant),
    /// The lease is lost by this call.
    Lost,
    /// The caller has not picked the grant up in time, and no longer can. The lease must be released.
    OfferExpired,
    /// No further renewal.
    Over,
}
