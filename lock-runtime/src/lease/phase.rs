//! The phases of a lease.

/// The phase of a lease. A renewal is sent in a phase that names it, and a lease that is being released is never renewed. One
/// call of `begin_release` returns true, and its caller sends the release. A renewal in flight delays it by one request
/// timeout at most.
///
/// | | renewal due | renewal ended | loss | release by the holder | hand-off, linger |
/// |---|---|---|---|---|---|
/// | `Held` | `Renewing` | | `Lost` | `Releasing` | `Transferred` |
/// | `Renewing` | | `Held` | `LostRenewing` | `ReleasePending` | |
/// | `LostRenewing` | | `Lost` | | `ReleasePending` | |
/// | `Lost` | | | | `Releasing` | |
/// | `ReleasePending` | | `Releasing` | | | |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Held,
    /// Held, with a renewal in flight.
    Renewing,
    /// Released by its holder; another task of this process holds the lock under another lease.
    Transferred,
    Lost,
    /// Lost, with a renewal in flight.
    LostRenewing,
    /// Released by its holder, with a renewal in flight. The release request waits for it.
    ReleasePending,
    Releasing,
}
