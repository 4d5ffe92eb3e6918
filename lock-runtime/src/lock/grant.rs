//! From a grant of the store to a lease of a task.

use std::sync::Arc;

use crate::base::clock::Instant;
use crate::base::error::LockError;
use crate::base::lock_spec::LockSpec;
use crate::exec::events;
use crate::exec::panic_boundary;
use crate::lease::grant::Grant;
use crate::lease::held_lease::HeldLease;
use crate::lease::lease::{HoldTimes, Lease};
use crate::lock::core::PoolCore;
use crate::lock::waiter::LeaseReply;
use crate::queue::key_queue::Contention;
use crate::queue::permit_state::Holder;

/// Makes a lease of `grant`: tracked, scheduled for renewal, known to the queues of its keys. The wait for it began at
/// `requested_at`. `contention` is what the store says about other waiters.
pub(crate) fn lease(
    core: &Arc<PoolCore>,
    spec: Arc<LockSpec>,
    grant: Grant,
    requested_at: Instant,
    contention: Contention,
) -> HeldLease {
    let id = core.tracker.next_id();
    let times = HoldTimes { requested_at, hold_began_at: core.clock().now() };
    let lease = acquired(core, id, spec, grant, times);
    track(core, &lease, contention);
    HeldLease::new(lease, core.clone())
}

/// Makes a lease of the grant that `former` has given up for it: tracked and scheduled for renewal in its place. The queue of
/// the key knows it as `holder`.
pub(super) fn successor(
    core: &Arc<PoolCore>,
    former: &Lease,
    holder: Holder,
    spec: Arc<LockSpec>,
    grant: Grant,
    requested_at: Instant,
) -> HeldLease {
    let times = HoldTimes { requested_at, hold_began_at: holder.since };
    let lease = acquired(core, holder.lease, spec, grant, times);
    core.tracker.replace(former, &lease);
    core.renewals.transfer(former, &lease);
    HeldLease::new(lease, core.clone())
}

fn acquired(
    core: &PoolCore,
    id: u64,
    spec: Arc<LockSpec>,
    grant: Grant,
    times: HoldTimes,
) -> Arc<Lease> {
    let lease = Arc::new(Lease::new(id, core.name().clone(), spec, grant, times, core.clock()));
    // Before the driver can find the lease lost and count its end.
    events::acquired(lease.origin(), lease.fence, lease.waited());
    lease
}

/// Makes `lease` known to the queues of its keys, tracks it, and schedules it for renewal.
fn track(core: &PoolCore, lease: &Arc<Lease>, contention: Contention) {
    // Before a release by force finds the lease, and before the driver finds it lost. Either passes the permit on, and the
    // next waiter sets another owner.
    if lease.spec.single_key().is_some() {
        core.queue.set_holder(&lease.spec.store_keys, lease.holder(), contention);
    } else if let Some(keys) = lease.permit_keys() {
        // Another task of this process may have the permit of a key, and wait for it at the store.
        core.queue.set_holder(&keys, lease.holder(), contention);
    }
    core.tracker.insert(lease);
    core.renewals.schedule(lease);
}

/// Gives `lease` to the task that waits for it. If the task is gone, or the pool has begun to shut down, the lease is
/// dropped, and so released.
pub(crate) fn deliver(core: &PoolCore, lease: HeldLease, reply: LeaseReply) {
    let result = if core.tracker.is_open() { Ok(lease) } else { Err(LockError::pool_closed()) };
    panic_boundary::answer(reply, result);
}
