//! The facts that metrics are made of.

use std::time::Duration;

use crate::base::loss::Loss;
use crate::base::outcome::Outcome;

/// One fact about the locks of a template.
#[cfg_attr(not(feature = "metrics"), allow(dead_code))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Measurement {
    /// A call begins to wait for a lock, or for the answer to its first request.
    WaitBegan,
    /// That wait is over.
    WaitEnded(Outcome),
    /// The call has its lock after a wait of this time.
    Waited(Duration),
    /// A lease begins.
    Granted,
    /// The hold has ended after this time.
    HoldEnded(Duration),
    HandedOff,
    Renewal(RenewalResult),
    Lost(Loss),
    Release(ReleaseResult),
}

/// What one renewal of a lease led to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RenewalResult {
    Renewed,
    Failed,
    NotHeld,
}

/// What one request to release a lease led to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReleaseResult {
    Released,
    NotHeld,
    Failed,
}

/// A call to a store.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreOperation {
    Acquire,
    Renew,
    Release,
    IsHeld,
    Health,
    Probe,
}

/// How a call to a store ended.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreResult {
    Answered,
    /// At least one entry of the call has failed.
    Failed,
    /// The call was given up.
    Unanswered,
}
