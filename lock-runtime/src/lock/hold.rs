//! The end of a hold: the next waiter of this process gets the lock, or the store frees the key.
//!
//! A hand-off sends no request. The grant of the process stays as it is at the store; only its holder changes, with a
//! fencing token of its own. Hand-offs go on as long as no other process waits, and for
//! [`local_handoff_limit`](crate::PoolBuilder::local_handoff_limit) if one may. A lock without a waiter may
//! [linger](crate::lock::linger).

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::base::options::ReleaseMode;
use crate::exec::driver_answer::DriverAnswer;
use crate::exec::events;
use crate::lease::held_lease::{EndsHolds, Releasing};
use crate::lease::lease::Lease;
use crate::lock::core::PoolCore;
use crate::lock::grant;
use crate::lock::linger::{self, LingerOutcome};
use crate::lock::outgoing::{Outgoing, PendingRelease};
use crate::queue::key_queue::WaitFor;
use crate::queue::permit_state::Holder;

impl EndsHolds for PoolCore {
    fn end_hold(self: Arc<Self>, lease: &Arc<Lease>, mode: ReleaseMode) -> Option<Releasing> {
        // The lock and the connection belong to the parent process.
        if self.is_inherited() {
            return None;
        }
        if hand_off(&self, lease) {
            return Some(Releasing::Done);
        }
        note_end(&self, lease);
        let idle;
        let lease = match linger::keep(&self, lease) {
            LingerOutcome::Lingers => return Some(Releasing::Done),
            LingerOutcome::Release => lease,
            LingerOutcome::ReleaseFormer(lease) => {
                idle = lease;
                &idle
            }
        };
        if !lease.begin_release() {
            return None;
        }
        self.renewals.cancel(lease);
        let (reply, answer) = oneshot::channel();
        let release = Outgoing::Release(PendingRelease::new(lease.clone(), reply));
        // The driver may note it after the next call for the same key. An awaited release of one key notes it as it is sent.
        let is_noted_later = mode == ReleaseMode::Awaited && lease.spec.single_key().is_some();
        if !is_noted_later && let Some(keys) = lease.permit_keys() {
            self.queue.mark_releasing(&keys, lease.id);
        }
        match mode {
            ReleaseMode::Awaited => self.send_from_caller(release),
            ReleaseMode::Background => self.send_unawaited(release),
        }
        Some(Releasing::InFlight(DriverAnswer::new(answer, &self.queue.process)))
    }
}

/// Records that the time of `lease` is over, if it is. After a suspend of the machine, on a blocked thread, or within the moment
/// that the driver needs, nothing may have noticed it.
pub(crate) fn note_end(core: &PoolCore, lease: &Lease) {
    if lease.is_overdue() {
        lease.expire(core.clock().now());
    }
}

/// Gives the lock of `lease` to the next waiter. `false` if it has to be released: no task waits, the limit is reached, or
/// the remaining lease is not as good as a new grant.
fn hand_off(core: &Arc<PoolCore>, lease: &Arc<Lease>) -> bool {
    let Some(key) = lease.spec.single_key() else { return false };
    let limit = core.config.local_handoff_limit;
    if limit.is_zero() || !core.tracker.is_open() {
        return false;
    }
    let barging_interval = core.config.barging_window.map(|window| window.interval);
    let now = || core.clock().now();
    let next = core.queue.hand_off(key, barging_interval, now, |spec, contended, now| {
        let held_for = now.since(lease.grant_sent_at);
        if contended && held_for >= limit {
            return None;
        }
        let (transferred, listeners) = lease.transfer(spec, now)?;
        let holder = Holder { lease: core.tracker.next_id(), owner: transferred.owner, since: now };
        Some((holder, (transferred, listeners)))
    });
    let Some((entry, holder, (transferred, listeners))) = next else { return false };
    if lease.has_holder() {
        events::handed_off(lease.origin(), lease.held_for());
    }
    if let WaitFor::Lock(waiter) = entry.wait_for {
        // Dropped in this instant, the new lease is released or handed off in turn.
        let next = grant::successor(core, lease, holder, waiter.spec, transferred, entry.since);
        grant::deliver(core, next, waiter.reply);
    }
    listeners.wake();
    true
}
