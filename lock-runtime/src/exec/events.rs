//! What the program learns about its locks: `tracing` events and spans of target `lock_runtime`, and metrics.
//!
//! `lock` is the key's template, `name` the annotated function (absent for the programmatic API).

use std::sync::Arc;
use std::time::Duration;

use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Span, debug, debug_span, info, trace, warn};

use crate::base::backend_error::{BackendError, Warning};
use crate::base::call_site::LockLabel;
use crate::base::error::LockError;
use crate::base::fence::Fence;
use crate::base::loss::Loss;
use crate::base::measurement::{Measurement, ReleaseResult};
use crate::base::metrics::LockMetrics;
use crate::base::owner_info;
use crate::base::owner_tag::OwnerTag;
use crate::base::span_slot::SpanSlot;
use crate::base::text::millis;
use crate::exec::event_thread::{self, is_wanted};
use crate::exec::panic_boundary;

/// The call and the pool that an event is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) label: &'a LockLabel,
    pub(crate) pool: &'a Arc<str>,
    pub(crate) span: &'a SpanSlot,
    pub(crate) metrics: &'a LockMetrics,
}

/// Emits an event about a lock on the event thread, in the span of its call if that is open at the delivery.
macro_rules! emit {
    ($event:ident, $origin:expr, $($rest:tt)*) => {{
        let Origin { label, pool, span, .. } = $origin;
        let (label, pool) = (label.clone(), pool.clone());
        event_thread::send_in(span.clone(), move |parent| {
            $event!(
                target: "lock_runtime",
                parent: parent,
                lock = label.public_name(),
                name = label.function(),
                pool = &*pool,
                $($rest)*
            );
        });
    }};
}

/// Emits the event of a request that has failed: as a warning with the number of such failures of the pool since the last one,
/// or for debugging if that number is `None`. An outage fails very many requests in a second.
macro_rules! emit_failure {
    ($origin:expr, $failed:expr, $error:expr, $($field:ident,)* $text:literal) => {{
        if let Some(failed) = $failed {
            if is_wanted!(WARN, $origin.span.subscriber()) {
                let error = $error.clone();
                emit!(warn, $origin, failed, $($field,)* %error, $text);
            }
        } else if is_wanted!(DEBUG, $origin.span.subscriber()) {
            let error = $error.clone();
            emit!(debug, $origin, $($field,)* %error, $text);
        }
    }};
}

/// Whether a subscriber may want the span of a call, or an event about it. It costs one load.
#[inline]
pub(crate) fn wants_calls() -> bool {
    Level::DEBUG <= LevelFilter::current()
}

/// The span of a call, if a subscriber wants it.
pub(crate) fn call_span(label: &LockLabel, pool: &Arc<str>) -> Option<Span> {
    // Without a subscriber the macro would write a line through the crate `log`.
    if !wants_calls() {
        return None;
    }
    let span = panic_boundary::call(|| {
        debug_span!(
            target: "lock_runtime",
            "lock",
            lock = label.public_name(),
            name = label.function(),
            pool = &**pool,
            waited_ms = Empty,
            fence = Empty,
            held_ms = Empty,
            outcome = Empty,
        )
    });
    span.ok().filter(|span| !span.is_disabled())
}

/// Enters `span`, without a guard that would leave it outside of a panic boundary.
pub(crate) fn enter(span: &Span) {
    let _ = panic_boundary::call(|| span.with_subscriber(|(id, to)| to.enter(id)));
}

/// Leaves `span`.
pub(crate) fn exit(span: &Span) {
    let _ = panic_boundary::call(|| span.with_subscriber(|(id, to)| to.exit(id)));
}

/// Records the time of the wait in the span of its call.
pub(crate) fn record_wait(span: &Span, waited: Option<Duration>) {
    if let Some(waited) = waited {
        let _ = panic_boundary::call(|| span.record("waited_ms", millis(waited)).is_disabled());
    }
}

/// Records the fence of a grant.
pub(crate) fn record_fence(span: &Span, fence: Option<Fence>) {
    if let Some(fence) = fence {
        let _ = panic_boundary::call(|| span.record("fence", fence.get()).is_disabled());
    }
}

/// Records how a call ended, and the time that it held the lock, if it did.
pub(crate) fn record_end(span: &Span, held: Option<Duration>, outcome: &'static str) {
    let _ = panic_boundary::call(|| {
        if let Some(held) = held {
            span.record("held_ms", millis(held));
        }
        span.record("outcome", outcome);
    });
}

pub(crate) fn acquired(origin: Origin<'_>, fence: Option<Fence>, waited: Duration) {
    origin.metrics.record(Measurement::Granted);
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let (fence, waited_ms) = (fence.map(Fence::get), millis(waited));
        emit!(debug, origin, fence, waited_ms, "acquired");
    }
}

/// Another owner held the lock until the end of the wait.
pub(crate) fn conflict(origin: Origin<'_>, waited: Option<Duration>) {
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let waited_ms = waited.map(millis);
        emit!(debug, origin, waited_ms, "conflict");
    }
}

/// A call is refused because of `max_waiters`, and so were others since the last event.
pub(crate) fn queue_full(origin: Origin<'_>, rejected: u64) {
    if is_wanted!(WARN, origin.span.subscriber()) {
        emit!(warn, origin, rejected, "queue full");
    }
}

/// The call has failed without a lock, for another reason than a conflict or a full queue.
pub(crate) fn not_acquired(origin: Origin<'_>, waited: Option<Duration>, error: &LockError) {
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let (waited_ms, error) = (waited.map(millis), error.without_key());
        emit!(debug, origin, waited_ms, %error, "not acquired");
    }
}

/// The caller has given up its wait.
pub(crate) fn cancelled(origin: Origin<'_>, waited: Option<Duration>) {
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let waited_ms = waited.map(millis);
        emit!(debug, origin, waited_ms, "cancelled");
    }
}

pub(crate) fn handed_off(origin: Origin<'_>, held: Duration) {
    origin.metrics.record(Measurement::HandedOff);
    origin.metrics.record(Measurement::HoldEnded(held));
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let held_ms = millis(held);
        emit!(debug, origin, held_ms, "handed off");
    }
}

pub(crate) fn contended(origin: Origin<'_>, expires_in: Option<Duration>) {
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let expires_in_ms = expires_in.map(millis);
        emit!(debug, origin, expires_in_ms, "contended");
    }
}

/// `held_for` reads the clock and takes a mutex, so it is only called for an event.
pub(crate) fn renewed(origin: Origin<'_>, held_for: impl FnOnce() -> Duration) {
    if is_wanted!(TRACE, origin.span.subscriber()) {
        let held_ms = millis(held_for());
        emit!(trace, origin, held_ms, "renewed");
    }
}

/// `failed` as for [`emit_failure`].
pub(crate) fn not_renewed(
    origin: Origin<'_>,
    failed: Option<u64>,
    valid_for: Duration,
    error: &BackendError,
) {
    let valid_for_ms = millis(valid_for);
    emit_failure!(origin, failed, error, valid_for_ms, "not renewed yet");
}

pub(crate) fn lost(origin: Origin<'_>, owner: OwnerTag, held: Duration, loss: Loss) {
    if is_wanted!(WARN, origin.span.subscriber()) {
        let (held_ms, reason) = (millis(held), loss.as_str());
        emit!(warn, origin, held_ms, reason, %owner, "lost");
    }
}

/// The hold has ended, and the lock stays with its process for the next call.
pub(crate) fn lingers(origin: Origin<'_>, held_for: impl FnOnce() -> Duration) {
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let held_ms = millis(held_for());
        emit!(debug, origin, held_ms, "lingers");
    }
}

/// `held_for` is `None` for a lock that lingered. Its hold ended before.
pub(crate) fn released(
    origin: Origin<'_>,
    held_for: impl FnOnce() -> Option<Duration>,
    was_held: bool,
) {
    let result = if was_held { ReleaseResult::Released } else { ReleaseResult::NotHeld };
    origin.metrics.record(Measurement::Release(result));
    if is_wanted!(DEBUG, origin.span.subscriber()) {
        let held_ms = held_for().map(millis);
        emit!(debug, origin, held_ms, was_held, "released");
    }
}

/// The release is repeated. `failed` as for [`emit_failure`].
pub(crate) fn not_released_yet(origin: Origin<'_>, failed: Option<u64>, error: &BackendError) {
    emit_failure!(origin, failed, error, "not released yet");
}

/// No release is sent any more: the store frees the lock after `expires_in`. `failed` as for [`emit_failure`].
pub(crate) fn not_released(
    origin: Origin<'_>,
    failed: Option<u64>,
    expires_in: Duration,
    error: &BackendError,
) {
    let expires_in_ms = millis(expires_in);
    emit_failure!(origin, failed, error, expires_in_ms, "not released");
}

/// This process has taken a lock from another owner, for `operator` if one is known. `was_held` is `None` if the store did
/// not report it.
pub(crate) fn released_by_force(
    pool: &Arc<str>,
    owner: OwnerTag,
    was_held: Option<bool>,
    operator: Option<String>,
) {
    if is_wanted!(WARN, None) {
        let pool = pool.clone();
        event_thread::send(move || {
            let process = owner_info::process_text();
            let by = operator.map(|operator| format!("{operator} at {process}"));
            let (pool, by) = (&*pool, by.as_deref().unwrap_or(process));
            warn!(target: "lock_runtime", pool, %owner, was_held, by, "released by force");
        });
    }
}

/// A client was answered with `status`.
#[cfg(any(feature = "actix", feature = "tower"))]
pub(crate) fn answered(error: &LockError, status: u16) {
    macro_rules! emit {
        ($event:ident) => {{
            let error = error.without_key();
            event_thread::send(move || {
                let (lock, pool) = (error.template(), error.pool());
                $event!(target: "lock_runtime", lock, pool, status, %error, "answered with an error");
            });
        }};
    }
    // During an outage, and in a shutdown, each request is answered with 503. Other events report that.
    if status >= 500 && (status != 503 || error.body_started()) {
        if is_wanted!(WARN, None) {
            emit!(warn);
        }
    } else if is_wanted!(DEBUG, None) {
        emit!(debug);
    }
}

/// Several functions of a pool have one template.
pub(crate) fn shared_template(template: &'static str, pool: &Arc<str>, functions: String) {
    if is_wanted!(INFO, None) {
        let pool = pool.clone();
        event_thread::send(move || {
            let pool = &*pool;
            info!(target: "lock_runtime", lock = template, pool, functions, "functions share a template");
        });
    }
}

/// A call is nested in locks in the opposite order of earlier calls. The stacks are in text.
#[cold]
pub(crate) fn lock_order_inversion(
    label: &LockLabel,
    pool: &Arc<str>,
    stack: String,
    opposite: String,
) {
    if is_wanted!(WARN, None) {
        let (label, pool) = (label.clone(), pool.clone());
        event_thread::send(move || {
            let (lock, name, pool) = (label.public_name(), label.function(), &*pool);
            warn!(
                target: "lock_runtime",
                lock, name, pool, stack, opposite,
                "locks are nested in opposite orders"
            );
        });
    }
}

/// The store has answered a request with a refusal. `failed` is the number of them since the last event.
pub(crate) fn store_refused(pool: &str, failed: u64, error: &BackendError) {
    if is_wanted!(WARN, None) {
        let (pool, error) = (pool.to_owned(), error.clone());
        event_thread::send(
            move || warn!(target: "lock_runtime", pool, failed, %error, "the store refuses requests"),
        );
    }
}

/// All requests to the store have failed for a while.
pub(crate) fn store_lost(pool: &str, error: &BackendError) {
    if is_wanted!(WARN, None) {
        let (pool, error) = (pool.to_owned(), error.clone());
        event_thread::send(
            move || warn!(target: "lock_runtime", pool, %error, "the store is down"),
        );
    }
}

/// The store answers again.
pub(crate) fn store_back(pool: &str, down: Duration) {
    if is_wanted!(WARN, None) {
        let (pool, down_ms) = (pool.to_owned(), millis(down));
        event_thread::send(
            move || warn!(target: "lock_runtime", pool, down_ms, "the store is back"),
        );
    }
}

/// The pool has connected to a store that can lose locks.
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) fn backend_warning(server: &str, warning: &Warning) {
    if is_wanted!(WARN, None) {
        let (server, warning) = (server.to_owned(), warning.clone());
        event_thread::send(
            move || warn!(target: "lock_runtime", server, %warning, "the store may lose locks"),
        );
    }
}

/// The pool has connected to another master than before.
#[cfg(feature = "redis")]
pub(crate) fn master_moved(former: String, server: String) {
    if is_wanted!(WARN, None) {
        event_thread::send(
            move || warn!(target: "lock_runtime", server, former, "the master has moved"),
        );
    }
}

/// The pool has connected to a store that keeps locks with plain commands.
#[cfg(feature = "redis")]
pub(crate) fn without_scripts(server: &str, reason: &str) {
    if is_wanted!(WARN, None) {
        let (server, reason) = (server.to_owned(), reason.to_owned());
        event_thread::send(
            move || warn!(target: "lock_runtime", server, reason, "locks are kept without scripts"),
        );
    }
}
