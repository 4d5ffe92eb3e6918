//! `tracing` events of target `lock_runtime`.
//!
//! `lock` is the key's template, `name` the annotated function (absent for the programmatic API).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, trace, warn};

use crate::base::backend_error::{BackendError, Warning};
#[cfg(any(feature = "actix", feature = "tower"))]
use crate::base::error::LockError;
use crate::base::fence::Fence;
use crate::base::lock_spec::LockSpec;
use crate::exec::event_thread::{self, is_wanted};

/// The lock and the pool that an event is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) spec: &'a Arc<LockSpec>,
    pub(crate) pool: &'a Arc<str>,
}

/// Emits an event about a lock on the event thread.
macro_rules! emit {
    ($event:ident, $origin:expr, $($rest:tt)*) => {{
        let Origin { spec, pool } = $origin;
        let (spec, pool) = (spec.clone(), pool.clone());
        event_thread::send(move || {
            $event!(
                target: "lock_runtime",
                lock = %spec.label,
                name = spec.label.name(),
                pool = %pool,
                $($rest)*
            );
        });
    }};
}

pub(crate) fn acquired(origin: Origin<'_>, fence: Option<Fence>, waited: Duration) {
    if is_wanted!(DEBUG) {
        let (fence, waited_ms) = (fence.map(Fence::get), millis(waited));
        emit!(debug, origin, fence, waited_ms, "acquired");
    }
}

pub(crate) fn handed_off(origin: Origin<'_>, held: Duration) {
    if is_wanted!(DEBUG) {
        let held_ms = millis(held);
        emit!(debug, origin, held_ms, "handed off");
    }
}

pub(crate) fn contended(origin: Origin<'_>, expires_in: Option<Duration>) {
    if is_wanted!(DEBUG) {
        let expires_in_ms = expires_in.map(millis);
        emit!(debug, origin, expires_in_ms, "contended");
    }
}

pub(crate) fn renewed(origin: Origin<'_>, held: Duration) {
    if is_wanted!(TRACE) {
        let held_ms = millis(held);
        emit!(trace, origin, held_ms, "renewed");
    }
}

pub(crate) fn not_renewed(origin: Origin<'_>, valid_for: Duration, error: &BackendError) {
    if is_wanted!(WARN) {
        let (valid_for_ms, error) = (millis(valid_for), error.clone());
        emit!(warn, origin, valid_for_ms, %error, "not renewed yet");
    }
}

pub(crate) fn lost(origin: Origin<'_>, held: Duration, reason: impl fmt::Debug + Send + 'static) {
    if is_wanted!(WARN) {
        let held_ms = millis(held);
        emit!(warn, origin, held_ms, ?reason, "lost");
    }
}

pub(crate) fn released(origin: Origin<'_>, held: Duration, was_held: bool) {
    if is_wanted!(DEBUG) {
        let held_ms = millis(held);
        emit!(debug, origin, held_ms, was_held, "released");
    }
}

pub(crate) fn not_released(origin: Origin<'_>, error: &BackendError) {
    if is_wanted!(WARN) {
        let error = error.clone();
        emit!(warn, origin, %error, "not released yet");
    }
}

/// A client was answered with `status`.
#[cfg(any(feature = "actix", feature = "tower"))]
pub(crate) fn answered(error: &LockError, status: u16) {
    macro_rules! emit {
        ($event:ident) => {{
            let error = error.clone();
            event_thread::send(move || {
                let (lock, pool) = (error.template(), error.pool());
                $event!(target: "lock_runtime", lock, pool, status, %error, "answered with an error");
            });
        }};
    }
    // During an outage, and in a shutdown, each request is answered by 503. Events of their own tell that.
    if status >= 500 && (status != 503 || error.body_started()) {
        if is_wanted!(WARN) {
            emit!(warn);
        }
    } else if is_wanted!(DEBUG) {
        emit!(debug);
    }
}

/// All requests to the store have failed for a while.
pub(crate) fn store_lost(pool: &str, error: &BackendError) {
    if is_wanted!(WARN) {
        let (pool, error) = (pool.to_owned(), error.clone());
        event_thread::send(
            move || warn!(target: "lock_runtime", pool, %error, "the store is down"),
        );
    }
}

/// The store answers again.
pub(crate) fn store_back(pool: &str, down: Duration) {
    if is_wanted!(WARN) {
        let (pool, down_ms) = (pool.to_owned(), millis(down));
        event_thread::send(
            move || warn!(target: "lock_runtime", pool, down_ms, "the store is back"),
        );
    }
}

/// A store was connected to that can lose locks.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) fn backend_warning(server: &str, warning: &Warning) {
    if is_wanted!(WARN) {
        let (server, warning) = (server.to_owned(), warning.clone());
        event_thread::send(
            move || warn!(target: "lock_runtime", server, %warning, "the store may lose locks"),
        );
    }
}

/// A store was connected to that keeps locks by plain commands.
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
