//! What a pool tells about itself: `tracing` events of target `lock_runtime`.
//!
//! `lock` is the key's template, `name` the annotated function (empty for the programmatic API).

use std::time::Duration;

use tracing::{debug, trace, warn};

use crate::acquire::Ask;
use crate::backend::{BackendError, Held};
use crate::engine::Engine;
use crate::lease::{Lease, Loss};

const TARGET: &str = "lock_runtime";

pub(crate) fn acquired(lease: &Lease, waited: Duration) {
    debug!(
        target: TARGET,
        lock = %lease.subject,
        name = lease.subject.name(),
        pool = %lease.pool,
        fence = lease.fence.map(crate::Fence::get),
        waited_ms = millis(waited),
        "acquired"
    );
}

pub(crate) fn contended(engine: &Engine, ask: &Ask, free_in: Option<Duration>) {
    debug!(
        target: TARGET,
        lock = %ask.subject,
        name = ask.subject.name(),
        pool = %engine.name(),
        free_in_ms = free_in.map(millis),
        "contended"
    );
}

pub(crate) fn renewed(lease: &Lease) {
    trace!(
        target: TARGET,
        lock = %lease.subject,
        name = lease.subject.name(),
        pool = %lease.pool,
        held_ms = millis(lease.held_for()),
        "renewed"
    );
}

pub(crate) fn not_renewed(lease: &Lease, error: &BackendError) {
    warn!(
        target: TARGET,
        lock = %lease.subject,
        name = lease.subject.name(),
        pool = %lease.pool,
        valid_for_ms = millis(lease.valid_for()),
        %error,
        "not renewed yet"
    );
}

pub(crate) fn lost(lease: &Lease, loss: Loss) {
    warn!(
        target: TARGET,
        lock = %lease.subject,
        name = lease.subject.name(),
        pool = %lease.pool,
        held_ms = millis(lease.held_for()),
        reason = ?loss,
        "lost"
    );
}

pub(crate) fn released(lease: &Lease, held: Held) {
    debug!(
        target: TARGET,
        lock = %lease.subject,
        name = lease.subject.name(),
        pool = %lease.pool,
        held_ms = millis(lease.held_for()),
        still_ours = held == Held::Yes,
        "released"
    );
}

pub(crate) fn not_released(lease: &Lease, error: &BackendError) {
    warn!(
        target: TARGET,
        lock = %lease.subject,
        name = lease.subject.name(),
        pool = %lease.pool,
        %error,
        "not released yet"
    );
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
