//! The facts that metrics are made of.

use std::time::Duration;

use crate::base::label_values::label_values;
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

label_values! {
    /// What one renewal of a lease led to.
    #[derive(Clone, Copy, Debug)]
    RenewalResult {
        Renewed = "renewed",
        Failed = "failed",
        NotHeld = "not_held",
    }
}

label_values! {
    /// What one request to release a lease led to.
    #[derive(Clone, Copy, Debug)]
    ReleaseResult {
        Released = "released",
        NotHeld = "not_held",
        Failed = "failed",
    }
}

#[cfg(feature = "metrics")]
label_values! {
    /// A call to a store.
    #[derive(Clone, Copy, Debug)]
    StoreOperation {
        Acquire = "acquire",
        Renew = "renew",
        Release = "release",
        IsHeld = "is_held",
        Health = "health",
        Probe = "probe",
    }
}

#[cfg(feature = "metrics")]
label_values! {
    /// How a call to a store ended.
    #[derive(Clone, Copy, Debug)]
    StoreResult {
        Answered = "answered",
        /// At least one entry of the call has failed.
        Failed = "failed",
        /// The call was given up.
        Unanswered = "unanswered",
    }
}
