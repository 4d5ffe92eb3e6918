//! A grant of the store to this process.

use crate::base::clock::Instant;
use crate::base::fence::Fences;
use crate::base::owner::Owner;
use crate::base::policy::Policy;
use crate::queue::permit::KeyPermit;

/// What the process holds at the store, from a grant to the release, across hand-offs between its tasks.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) owner: Owner,
    /// When the request of the grant was sent.
    pub(crate) sent: Instant,
    /// When the store has forgotten all requests of this owner that were never answered, if there are any.
    pub(crate) ambiguous_until: Option<Instant>,
    /// When the store has forgotten the earlier grants to this owner: their ttl may have been longer.
    pub(super) earlier_until: Instant,
    pub(super) valid_until: Instant,
    pub(super) stored_until: Instant,
    /// `None` for a new grant.
    pub(super) next_renewal: Option<Instant>,
    /// When the store has forgotten what its renewals that were never answered may have left there, if there are any.
    pub(super) late_renewals_until: Option<Instant>,
    pub(super) fences: Option<Fences>,
    /// Of all its keys.
    pub(super) permit: Option<KeyPermit>,
}

impl Grant {
    /// The grant of a request that was sent at `sent`.
    pub(crate) fn new(
        owner: Owner,
        ambiguous_until: Option<Instant>,
        policy: &Policy,
        sent: Instant,
        fences: Option<Fences>,
        permit: Option<KeyPermit>,
    ) -> Self {
        Self {
            owner,
            sent,
            ambiguous_until,
            earlier_until: sent,
            valid_until: sent + policy.ttl.validity(),
            stored_until: sent + policy.kept_for(),
            next_renewal: None,
            late_renewals_until: None,
            fences,
            permit,
        }
    }

    /// The same grant, where the store has forgotten earlier ones to this owner token at `until`.
    pub(crate) fn with_earlier_until(self, until: Instant) -> Self {
        Self { earlier_until: until, ..self }
    }
}
