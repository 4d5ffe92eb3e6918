//! Why a lease was lost.

/// Why a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The store did not confirm a renewal in time.
    Expired,
    /// The store reports that the key is not held by this owner.
    Taken,
    /// `renew = false`, and the ttl is over.
    TtlOver,
    /// `max_hold` is over.
    MaxHold,
    /// The pool shuts down, and its grace is over.
    PoolClosed,
    /// The store reports to a release that the key is not held by this owner.
    FoundAtRelease,
}

impl Loss {
    /// In the order of their numbers.
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 6] = [
        Self::Expired,
        Self::Taken,
        Self::TtlOver,
        Self::MaxHold,
        Self::PoolClosed,
        Self::FoundAtRelease,
    ];

    /// The word in events and metrics.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Taken => "taken",
            Self::TtlOver => "ttl_over",
            Self::MaxHold => "max_hold",
            Self::PoolClosed => "pool_closed",
            Self::FoundAtRelease => "found_at_release",
        }
    }
}
