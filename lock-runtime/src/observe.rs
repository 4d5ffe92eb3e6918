//! What a pool tells about itself: `tracing` events of target `lock_runtime`.
//!
//! `lock` is the key's template, `name` the annotated function (not there for the programmatic API).

use std::time::Duration;

use tracing::{debug, trace, warn};

use crate::acquire::Ask;
use crate::backend::{BackendError, Released, Warning};
use crate::engine::Engine;
use crate::lease::{Lease, Loss};

/// An event about a lock of this subject in this pool.
macro_rules! tell {
    ($event:ident, $subject:expr, $pool:expr, $($rest:tt)*) => {
        $event!(
            target: "lock_runtime",
            lock = %$subject,
            name = $subject.name(),
            pool = %$pool,
            $($rest)*
        )
    };
}

pub(crate) fn acquired(lease: &Lease, waited: Duration) {
    let fence = lease.fence.map(crate::Fence::get);
    tell!(debug, lease.ask.subject, lease.pool, fence, waited_ms = millis(waited), "acquired");
}

pub(crate) fn passed_on(lease: &Lease) {
    tell!(debug, lease.ask.subject, lease.pool, held_ms = millis(lease.held_for()), "handed on");
}

pub(crate) fn contended(engine: &Engine, ask: &Ask, free_in: Option<Duration>) {
    tell!(debug, ask.subject, engine.name(), free_in_ms = free_in.map(millis), "contended");
}

pub(crate) fn renewed(lease: &Lease) {
    tell!(trace, lease.ask.subject, lease.pool, held_ms = millis(lease.held_for()), "renewed");
}

pub(crate) fn not_renewed(lease: &Lease, error: &BackendError) {
    let valid_for_ms = millis(lease.valid_for());
    tell!(warn, lease.ask.subject, lease.pool, valid_for_ms, %error, "not renewed yet");
}

pub(crate) fn lost(lease: &Lease, loss: Loss) {
    let held_ms = millis(lease.held_for());
    tell!(warn, lease.ask.subject, lease.pool, held_ms, reason = ?loss, "lost");
}

pub(crate) fn released(lease: &Lease, outcome: Released) {
    let (held_ms, still_ours) = (millis(lease.held_for()), outcome != Released::No);
    tell!(debug, lease.ask.subject, lease.pool, held_ms, still_ours, "released");
}

pub(crate) fn not_released(lease: &Lease, error: &BackendError) {
    tell!(warn, lease.ask.subject, lease.pool, %error, "not released yet");
}

/// About a store that was just connected to.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) fn weak_store(server: &str, warning: &Warning) {
    warn!(target: "lock_runtime", server, %warning, "the store may lose locks");
}

/// How a store keeps its locks, if not in the usual way.
#[cfg(feature = "redis")]
pub(crate) fn without_scripts(server: &str, reason: &str) {
    warn!(target: "lock_runtime", server, reason, "locks are kept without scripts");
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
