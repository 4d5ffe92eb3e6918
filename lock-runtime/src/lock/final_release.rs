//! The releases of a shutdown.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{ReleaseOutcome, TIME_PER_REQUEST};
use crate::base::backend_error::FailureKind;
use crate::base::clock::Instant;
use crate::base::measurement::{Measurement, ReleaseResult};
use crate::lease::lease::Lease;
use crate::lock::core::PoolCore;
use crate::lock::release::{end_of, report_given_up, report_released, wait_for_renewals};
use crate::lock::undo::release_within;

/// Releases `leases` together, even while their holders run: the end of a shutdown. What fails is repeated until one request
/// timeout is over: a connection that has ended is soon replaced.
pub(crate) async fn release_all(core: &Arc<PoolCore>, mut leases: Vec<Arc<Lease>>) {
    leases.retain(|lease| lease.begin_release());
    if leases.is_empty() {
        return;
    }
    for lease in &leases {
        core.renewals.cancel(lease);
    }
    wait_for_renewals(core, &leases).await;
    let until = core.clock().now() + core.config.request_timeout;
    let mut pause = Duration::from_millis(5);
    let mut left: Vec<_> = leases.into_iter().map(|lease| (lease, false)).collect();
    let count = u32::try_from(left.len()).unwrap_or(u32::MAX);
    let mut limit =
        core.store_call_timeout().saturating_add(TIME_PER_REQUEST.saturating_mul(count));
    loop {
        left = release_in_one_request(core, left, limit, until.saturating_sub(pause)).await;
        if left.is_empty() {
            return;
        }
        core.clock().sleep_until(core.clock().now() + pause).await;
        pause = (pause * 2).min(Duration::from_millis(80));
        limit = limit.min(until.since(core.clock().now()));
    }
}

/// Releases `leases` with one request, which may take `limit`. Each comes with whether an earlier release may have been applied.
/// Returns the leases to try again, if it is not later than `until`.
async fn release_in_one_request(
    core: &Arc<PoolCore>,
    leases: Vec<(Arc<Lease>, bool)>,
    limit: Duration,
    until: Instant,
) -> Vec<(Arc<Lease>, bool)> {
    let request = |(lease, _): &(Arc<Lease>, bool)| end_of(lease, lease.locked_beside_holder());
    let requests: Vec<_> = leases.iter().map(request).collect();
    let outcomes = release_within(core, &requests, limit).await;
    let now = core.clock().now();
    let mut again = Vec::new();
    for ((lease, may_be_applied), outcome) in leases.into_iter().zip(outcomes) {
        match outcome {
            Ok(outcome) => {
                let was_held = outcome != ReleaseOutcome::NotHeld;
                report_released(&lease, was_held, was_held || may_be_applied);
                core.tracker.remove_ended(&lease, true);
            }
            Err(error) => {
                lease.metrics.record(Measurement::Release(ReleaseResult::Failed));
                if error.kind() != FailureKind::Rejected && now <= until {
                    let may_be_applied =
                        may_be_applied || error.kind() == FailureKind::MaybeApplied;
                    again.push((lease, may_be_applied));
                    continue;
                }
                report_given_up(core, &lease, now, &error);
                core.tracker.remove_ended(&lease, false);
            }
        }
        drop(lease.take_permit());
    }
    again
}
