//! What a pool tells about itself: `tracing` events of target `lock_runtime`.
//!
//! `lock` is the key's template, `name` the annotated function (not there for the programmatic API).

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, trace, warn};

use crate::backend::{BackendError, ReleaseOutcome, Warning};
use crate::exec::event_thread::{self, is_wanted};
use crate::lease::lease::{Lease, Loss};
use crate::lock::acquire::Ask;
use crate::lock::core::Engine;

/// An event about a lock of this subject in this pool.
macro_rules! tell {
    ($event:ident, $ask:expr, $pool:expr, $($rest:tt)*) => {{
        let (ask, pool): (Arc<Ask>, Arc<str>) = ($ask.clone(), $pool.clone());
        event_thread::send(move || {
            $event!(
                target: "lock_runtime",
                lock = %ask.subject,
                name = ask.subject.name(),
                pool = %pool,
                $($rest)*
            );
        });
    }};
}

pub(crate) fn acquired(lease: &Lease, waited: Duration) {
    if is_wanted!(DEBUG) {
        let (fence, waited_ms) = (lease.fence.map(crate::Fence::get), millis(waited));
        tell!(debug, lease.ask, lease.pool, fence, waited_ms, "acquired");
    }
}

pub(crate) fn passed_on(lease: &Lease) {
    if is_wanted!(DEBUG) {
        let held_ms = millis(lease.held_for());
        tell!(debug, lease.ask, lease.pool, held_ms, "handed on");
    }
}

pub(crate) fn contended(engine: &Engine, ask: &Arc<Ask>, expires_in: Option<Duration>) {
    if is_wanted!(DEBUG) {
        let free_in_ms = expires_in.map(millis);
        tell!(debug, ask, engine.name(), free_in_ms, "contended");
    }
}

pub(crate) fn renewed(lease: &Lease) {
    if is_wanted!(TRACE) {
        let held_ms = millis(lease.held_for());
        tell!(trace, lease.ask, lease.pool, held_ms, "renewed");
    }
}

pub(crate) fn not_renewed(lease: &Lease, error: &BackendError) {
    if is_wanted!(WARN) {
        let (valid_for_ms, error) = (millis(lease.valid_for()), error.clone());
        tell!(warn, lease.ask, lease.pool, valid_for_ms, %error, "not renewed yet");
    }
}

pub(crate) fn lost(lease: &Lease, loss: Loss) {
    if is_wanted!(WARN) {
        let held_ms = millis(lease.held_for());
        tell!(warn, lease.ask, lease.pool, held_ms, reason = ?loss, "lost");
    }
}

pub(crate) fn released(lease: &Lease, outcome: ReleaseOutcome) {
    if is_wanted!(DEBUG) {
        let (held_ms, still_ours) = (millis(lease.held_for()), outcome != ReleaseOutcome::NotHeld);
        tell!(debug, lease.ask, lease.pool, held_ms, still_ours, "released");
    }
}

pub(crate) fn not_released(lease: &Lease, error: &BackendError) {
    if is_wanted!(WARN) {
        let error = error.clone();
        tell!(warn, lease.ask, lease.pool, %error, "not released yet");
    }
}

/// About a store that was just connected to.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) fn weak_store(server: &str, warning: &Warning) {
    if is_wanted!(WARN) {
        let (server, warning) = (server.to_owned(), warning.clone());
        event_thread::send(
            move || warn!(target: "lock_runtime", server, %warning, "the store may lose locks"),
        );
    }
}

/// How a store keeps its locks, if not in the usual way.
#[cfg(feature = "redis")]
pub(crate) fn without_scripts(server: &str, reason: &str) {
    if is_wanted!(WARN) {
        let (server, reason) = (server.to_owned(), reason.to_owned());
        event_thread::send(
            move || warn!(target: "lock_runtime", server, reason, "locks are kept without scripts"),
        );
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
