//! The state of a lease, and how a hold ends.

use crate::base::backend_error::BackendError;
use crate::base::clock::Instant;
use crate::base::fence::Fences;
use crate::base::loss::Loss;
use crate::lease::listeners::Listeners;
use crate::lease::phase::Phase;
use crate::queue::permit::KeyPermit;

/// What changes under the mutex of a lease. What a renewal reads comes first, as in the lease.
#[derive(Debug)]
#[repr(C)]
pub(super) struct LeaseState {
    pub(super) phase: Phase,
    /// Whether a sequencer names the owner token. The token is then not passed on to another holder.
    pub(super) is_named: bool,
    /// Why validity ended before the release, if it did.
    pub(super) loss: Option<Loss>,
    pub(super) next_renewal: Option<Instant>,
    /// When the key may have changed after the renewal in flight was sent: its answer may be from before the change.
    pub(super) changed_since: Option<Instant>,
    /// The answer to the last renewal, if it was not a confirmation.
    pub(super) unconfirmed: Option<BackendError>,
    /// When the store has forgotten what the renewals that were never answered may have left there, if there are any.
    pub(super) late_renewals_until: Option<Instant>,
    /// When the hold ended: by a loss, a release or a transfer.
    pub(super) ended_at: Option<Instant>,
    /// Of all its keys, until a task releases them or the lease is lost.
    pub(super) permit: Option<KeyPermit>,
    pub(super) listeners: Listeners,
    /// Reserved for later holders of this process.
    pub(super) fences: Option<Fences>,
}

impl LeaseState {
    pub(super) fn ending(&self) -> Option<Ending> {
        match (self.loss, self.phase) {
            (Some(loss), _) => Some(Ending::Lost(loss)),
            (None, Phase::Transferred | Phase::ReleasePending | Phase::Releasing) => {
                Some(Ending::Released)
            }
            (None, Phase::Held | Phase::Renewing | Phase::Lost | Phase::LostRenewing) => None,
        }
    }
}

/// What a lease does when its key may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expedited {
    /// Its next renewal is due.
    Due,
    /// A renewal in flight is repeated after its answer, or the lease is not renewed any more.
    NotDue,
    /// The grant has gone to a successor.
    Transferred,
}

/// How a hold ended, for its listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Lost(Loss),
    /// Released by the holder, and not lost before.
    Released,
}
