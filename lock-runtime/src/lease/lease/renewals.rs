//! The renewals of a lease: when one is due, and what the end of one changes.

use std::time::Duration;

use super::Lease;
use crate::base::backend_error::{BackendError, FailureKind};
use crate::base::clock::Instant;
use crate::base::jitter;
use crate::lease::lease_state::LeaseState;
use crate::lease::phase::Phase;
use crate::lease::renewal_action::RenewalAction;

impl Lease {
    /// What the lease needs at `now`. [`RenewalAction::Renew`] is the transition to a renewal in flight. The caller sends
    /// it, and within half of the remaining time reports to [`on_renewed`](Self::on_renewed),
    /// [`on_renewal_failed`](Self::on_renewal_failed) or [`on_not_held`](Self::on_not_held).
    pub(crate) fn poll_renewal(&self, now: Instant) -> RenewalAction {
        let mut state = self.state.lock();
        let Some(due) = self.due_in(&state) else { return RenewalAction::Over };
        if due > now {
            return RenewalAction::Wait(due);
        }
        let cancel_at = self.cancel_at();
        if now >= cancel_at {
            drop(state);
            return if self.expire(now) { RenewalAction::Lost } else { RenewalAction::Over };
        }
        if state.phase != Phase::Held {
            return RenewalAction::Wait(cancel_at);
        }
        if now >= self.offered_until && self.offer.withdraw() {
            return RenewalAction::OfferExpired;
        }
        state.phase = Phase::Renewing;
        RenewalAction::Renew { cancel_at, in_doubt: state.unconfirmed.is_some() }
    }

    /// The store has confirmed a renewal that was sent at `sent`; the next one is due after `pause`.
    pub(crate) fn on_renewed(&self, sent: Instant, pause: Duration) {
        self.renewal_over(sent, |state| {
            // Validity that has run out stays so: the holder may have read it, and another owner may have held the lock.
            if self.is_held() {
                self.extend_validity(sent);
            }
            state.next_renewal = Some(jitter::early(sent, pause, self.id));
            state.unconfirmed = None;
        });
    }

    /// A renewal failed for a reason that may pass. The next one is due after a pause. This one ends at `end`, which is later
    /// than now if its answer is still awaited.
    pub(crate) fn on_renewal_failed(&self, now: Instant, end: Instant, error: BackendError) {
        let pause = self.ttl.get() / 24;
        if error.kind() == FailureKind::MaybeApplied {
            // Before a release that waits for this renewal goes on.
            let mut state = self.state.lock();
            let until = Some(end + self.ttl.stored());
            state.late_renewals_until = state.late_renewals_until.max(until);
        }
        self.renewal_over(end, |state| {
            state.next_renewal = Some(jitter::early(now, pause, self.id));
            state.unconfirmed = Some(error);
        });
    }

    /// The store has confirmed a renewal after its [failure](Self::on_renewal_failed). It was sent at `sent`. The next one
    /// stays due, because the key may have changed since. `false` if the lease is not held any more.
    pub(crate) fn on_late_answer(&self, sent: Instant) -> bool {
        let mut state = self.state.lock();
        let is_held = matches!(state.phase, Phase::Held | Phase::Renewing) && self.is_held();
        if is_held {
            self.extend_validity(sent);
            state.unconfirmed = None;
        }
        is_held
    }

    /// The store answered a renewal with "not held".
    pub(crate) fn on_not_held(&self, now: Instant) {
        self.renewal_over(now, |state| state.next_renewal = Some(now));
    }

    /// When the store has forgotten what the renewals that were never answered may have left there, if there are any.
    pub(crate) fn late_renewals_until(&self) -> Option<Instant> {
        let state = self.state.lock();
        // The release has not waited for the end of this one.
        let is_in_flight = state.phase == Phase::ReleasePending;
        let in_flight = is_in_flight.then(|| self.clock.now() + self.ttl.stored());
        state.late_renewals_until.max(in_flight)
    }

    /// Why the last renewal was not confirmed, if it was not.
    pub(crate) fn unconfirmed(&self) -> Option<BackendError> {
        self.state.lock().unconfirmed.clone()
    }

    /// The renewal in flight has ended. It may have been applied as late as `stored_from`, even if it failed. `go_on` is
    /// for a lease that is still held.
    fn renewal_over(&self, stored_from: Instant, go_on: impl FnOnce(&mut LeaseState)) {
        let mut state = self.state.lock();
        match state.phase {
            Phase::Renewing => {
                go_on(&mut state);
                if let Some(changed) = state.changed_since.take() {
                    state.next_renewal = Some(changed);
                }
                state.phase = Phase::Held;
            }
            Phase::LostRenewing => state.phase = Phase::Lost,
            Phase::ReleasePending => {
                state.phase = Phase::Releasing;
                self.settles.notify_waiters();
            }
            Phase::Held | Phase::Transferred | Phase::Lost | Phase::Releasing => return,
        }
        self.store_until(stored_from);
    }
}
