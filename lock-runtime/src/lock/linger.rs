//! Locks that stay with their process after a hold, for its next call (`linger`).
//!
//! A hand-off without a receiver yet: the grant goes from the holder's lease to one without a holder, which is renewed like
//! any other. The next call for the key takes it from there. Otherwise the end of the linger releases it: its time is over,
//! or something else waits for the lock.

use std::sync::Arc;

use crate::base::clock::Instant;
use crate::base::key::Key;
use crate::base::measurement::Measurement;
use crate::base::options::ReleaseMode;
use crate::exec::events;
use crate::lease::held_lease::{EndsHolds, HeldLease};
use crate::lease::lease::Lease;
use crate::lock::core::PoolCore;
use crate::lock::grant;
use crate::lock::waiter::LockWaiter;
use crate::queue::permit_state::Holder;

/// What became of the lock of a hold that has ended.
pub(super) enum LingerOutcome {
    /// It lingers.
    Lingers,
    /// It does not: the lease must be released.
    Release,
    /// It no longer does: the lease that it lingered under must be released.
    ReleaseFormer(Arc<Lease>),
}

/// Keeps the lock of `lease` for the next call, if it may linger.
pub(super) fn keep(core: &Arc<PoolCore>, lease: &Arc<Lease>) -> LingerOutcome {
    let linger = lease.spec.policy.linger;
    let Some(key) = lease.spec.single_key().filter(|_| !linger.is_zero() && lease.has_holder())
    else {
        return LingerOutcome::Release;
    };
    let now = core.clock().now();
    let barging_interval = core.config.barging_window.map(|window| window.interval);
    // A store that does not tell of waiters leaves no other sign of them. The holds of one grant begin within this time.
    let limit = linger.max(core.config.local_handoff_limit);
    let is_recent = lease.hold_began_at.since(lease.grant_sent_at) < limit;
    let may_linger = core.capabilities.local_handoff
        && core.tracker.is_open()
        // No renewal would keep it alive.
        && !core.driver().is_gone()
        && core.queue.may_linger(key, is_recent, barging_interval, now);
    if !may_linger {
        return LingerOutcome::Release;
    }
    let Some((granted, listeners)) = lease.transfer(&lease.spec, now) else {
        return LingerOutcome::Release;
    };
    lease.on_hold_ended();
    events::lingers(lease.origin(), || lease.held_for());
    let idle = Arc::new(Lease::without_holder(core.tracker.next_id(), lease, granted));
    core.queue.transfer_holder(key, idle.holder());
    core.tracker.replace(lease, &idle);
    core.renewals.transfer(lease, &idle);
    listeners.wake();
    if core.queue.begin_linger(key, idle.id, is_recent, now + linger) {
        LingerOutcome::Lingers
    } else {
        LingerOutcome::ReleaseFormer(idle)
    }
}

/// Gives the lock of `key` to `waiter`, which has ended the linger of `lease`. If the lease is not as good as a new grant, both
/// come back: the waiter queues, and the lease is dropped after that. Without a lease, it was lost in this instant.
pub(super) fn take(
    core: &Arc<PoolCore>,
    key: &Key,
    lease: u64,
    waiter: LockWaiter,
    since: Instant,
) -> Result<(), (LockWaiter, Option<HeldLease>)> {
    let Some(idle) = core.tracker.lease(lease) else { return Err((waiter, None)) };
    let now = core.clock().now();
    let granted = if core.driver().is_gone() { None } else { idle.transfer(&waiter.spec, now) };
    let Some((granted, _)) = granted else {
        return Err((waiter, Some(HeldLease::new(idle, core.clone()))));
    };
    idle.metrics.record(Measurement::HandedOff);
    let holder = Holder { lease: core.tracker.next_id(), owner: granted.owner, since: now };
    core.queue.transfer_holder(key, holder);
    let next = grant::successor(core, &idle, holder, waiter.spec, granted, since);
    grant::deliver(core, next, waiter.reply);
    Ok(())
}

/// Releases the locks of `keys` that linger, for a request of another kind. `false` if none does.
pub(super) fn make_way(core: &Arc<PoolCore>, keys: &[Key]) -> bool {
    let mut any = false;
    for key in keys {
        if let Some(idle) = core.queue.end_linger(key).and_then(|lease| core.tracker.lease(lease)) {
            any = true;
            drop(core.clone().end_hold(&idle, ReleaseMode::Background));
        }
    }
    any
}

/// Ends all lingers: the pool shuts down. None begins after this.
pub(super) fn end_all(core: &Arc<PoolCore>) {
    for idle in core.queue.end_all_lingers().into_iter().filter_map(|it| core.tracker.lease(it)) {
        drop(core.clone().end_hold(&idle, ReleaseMode::Background));
    }
}
