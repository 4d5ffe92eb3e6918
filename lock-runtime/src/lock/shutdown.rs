//! The end of a pool: drains it, cancels the holders, releases the rest.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::base::clock::Instant;
use crate::base::loss::Loss;
use crate::exec::event_thread;
use crate::lease::lease::Lease;
use crate::lease::tracker::{Counts, PoolPhase};
use crate::lock::core::PoolCore;
use crate::lock::final_release::release_all;
use crate::lock::linger;

/// How the locks that were held, or not yet confirmed as released, at the start of a shutdown have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Released, and confirmed by the store.
    pub released: usize,
    /// Ended without a confirmation by the store, or still in use by a body that blocks its thread. They expire with their ttl.
    pub abandoned: usize,
}

/// Rejects waiters and new acquires, waits for the holders until `grace` is over, then cancels them and releases all
/// leases.
pub(crate) async fn shut_down(core: Arc<PoolCore>, grace: Duration) -> ShutdownReport {
    let (clock, request_timeout) = (core.clock(), core.config.request_timeout);
    let before = core.tracker.counts();
    core.grace_end.send_modify(|end| {
        let asked = clock.now() + grace;
        *end = Some(end.map_or(asked, |end| end.min(asked)));
    });
    if !core.tracker.advance(PoolPhase::Draining) {
        // Another call is already running.
        core.tracker.ended().await;
        return ShutdownReport::default();
    }
    core.queue.close();
    linger::end_all(&core);
    if !idle_in_grace(&core).await {
        for lease in core.tracker.leases() {
            lease.lose(Loss::PoolClosed);
        }
        // Cancelled bodies end at their next await, and release. Most other leases are released here.
        let cancel_time = request_timeout.min(Duration::from_millis(500));
        if !idle_by(&core, clock.now() + cancel_time).await {
            release_all(&core, unused_leases(&core)).await;
            drain(&core).await;
            release_all(&core, unused_leases(&core)).await;
        }
    }
    let after = core.tracker.counts();
    core.store_status.close();
    core.tracker.advance(PoolPhase::Closed);
    let _ = timeout(request_timeout, core.backend().close()).await;
    // A program that ends now would lose the events.
    event_thread::flushed(request_timeout / 2).await;
    core.tracker.advance(PoolPhase::Ended);
    ShutdownReport {
        released: after.released - before.released,
        // Releases that are still retried count as abandoned.
        abandoned: after.abandoned - before.abandoned + after.held,
    }
}

/// The leases without a thread in their body. While a body blocks its thread, no other owner gets its lock.
fn unused_leases(core: &PoolCore) -> Vec<Arc<Lease>> {
    let mut leases = core.tracker.leases();
    leases.retain(|lease| !lease.body_runs());
    leases
}

/// Waits until all leases are released and no request is in flight, as long as the store answers some. Bodies that ended on
/// their own have already sent their releases. An acquire that is in flight may be granted, and is then released.
async fn drain(core: &PoolCore) {
    let (clock, request_timeout) = (core.clock(), core.config.request_timeout);
    let end = clock.now() + request_timeout.saturating_mul(10);
    loop {
        let Counts { held, in_flight, .. } = core.tracker.counts();
        let left = held + in_flight;
        if left == 0 {
            return;
        }
        // As long as a release is retried before its caller gets an error.
        let until = (clock.now() + request_timeout.saturating_mul(2)).min(end);
        tokio::select! {
            biased;
            () = core.tracker.fewer_than(left) => {}
            () = clock.sleep_until(until) => return,
        }
    }
}

/// Another call may end the grace period earlier.
async fn idle_in_grace(core: &PoolCore) -> bool {
    let mut grace_end = core.grace_end.subscribe();
    loop {
        let Some(end) = *grace_end.borrow_and_update() else { return false };
        tokio::select! {
            biased;
            is_idle = idle_by(core, end) => return is_idle,
            _ = grace_end.changed() => {}
        }
    }
}

async fn idle_by(core: &PoolCore, until: Instant) -> bool {
    tokio::select! {
        biased;
        () = core.tracker.idle() => true,
        () = core.clock().sleep_until(until) => false,
    }
}
